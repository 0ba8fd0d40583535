"""``python -m hf_diloco.chaos.garbage PID PORT SEED``: throws random bytes at a port, as PID sees it, until killed.

Connection after connection: noise of random length, greetings of other protocols, lengths that promise gigabytes.
Goes into the network namespace of PID first, since a courier listens in its learner's.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import socket
import struct
import sys
import time

_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_GREETINGS = (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"SSH-2.0-OpenSSH_9.2\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc")
_PAUSE_SECONDS = 0.05
_MOST_BYTES = 1 << 16


def enter(pid: int) -> None:
    """Go into the network namespace of a process.

    Raises:
        OSError: the system does not let this user.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    for name, flag in (("user", _CLONE_NEWUSER), ("net", _CLONE_NEWNET)):
        theirs, ours = f"/proc/{pid}/ns/{name}", f"/proc/self/ns/{name}"
        if os.readlink(theirs) == os.readlink(ours):
            continue
        fd = os.open(theirs, os.O_RDONLY)
        try:
            if libc.setns(fd, flag):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        finally:
            os.close(fd)


def garbage(generator: random.Random) -> bytes:
    """What one connection gets."""
    noise = generator.randbytes(generator.choice((1, 8, 32, 1000, _MOST_BYTES)))
    start = generator.choice((b"", b"", b"HFDL", *_GREETINGS, struct.pack("!Q", 10 << 30), struct.pack("<Q", 10 << 30)))
    return start + noise


def main() -> None:
    """Throw until killed."""
    pid, port, seed = map(int, sys.argv[1:])
    enter(pid)
    generator, parent = random.Random(seed), os.getppid()
    while os.getppid() == parent:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1) as sock:
            sock.sendall(garbage(generator))
            if generator.random() < 0.5:  # some stay, and say nothing more
                sock.recv(1 << 12)
        time.sleep(_PAUSE_SECONDS)


if __name__ == "__main__":
    main()
