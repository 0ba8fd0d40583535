"""The algorithm and the protocol: no I/O, no clock, no threads, no ``torch.distributed``."""
