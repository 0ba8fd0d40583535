"""A torch.distributed.rpc agent without rendezvous: it is told its peer's address and tells nobody anything.

Two private names of torch are used here and nowhere else: the key ``addrs/<name>`` under which an agent looks up
its peers, and ``_update_group_membership``. :func:`self_test` says clearly when a release has changed them.
"""

# torch does not annotate these:
# mypy: disable-error-code="attr-defined, no-untyped-call, arg-type"

from __future__ import annotations

import os
import pickle

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch.distributed.rpc import api, internal

from hf_diloco.errors import UnsupportedError
from hf_diloco.links import sandbox, wire

_URL_PREFIX = "uv://127.0.0.1:"


class Agent:
    """The one agent of this process, listening on loopback only. It ends with the process (``os._exit``)."""

    def __init__(self, name: str, *, num_threads: int) -> None:
        os.environ["TP_SOCKET_IFNAME"] = "lo"
        self._store = dist.HashStore()
        options = rpc.TensorPipeRpcBackendOptions(
            num_worker_threads=num_threads, rpc_timeout=60, _transports=["uv"], _channels=["basic"]
        )
        dist_autograd._init(0)
        self._agent = rpc.TensorPipeAgent(self._store, name, 0, None, options, {}, [])
        api._init_rpc_states(self._agent)
        url = self._store.get(f"addrs/{name}").decode()
        if not url.startswith(_URL_PREFIX):
            raise UnsupportedError(f"RPC listens at {url!r}, expected {_URL_PREFIX}<port>")
        self.port = int(url.removeprefix(_URL_PREFIX))
        self._num_peers = 0

    def add_peer(self, port: int) -> str:
        """A name for the agent at this port of loopback. Each name has connections of its own."""
        self._num_peers += 1
        name = f"peer{self._num_peers}"
        self._store.set(f"addrs/{name}", f"{_URL_PREFIX}{port}")
        self._agent._update_group_membership(rpc.WorkerInfo(name, self._num_peers), [], {}, True)
        return name


def self_test(*, sandboxed: bool) -> None:
    """An agent starts, reaches an agent (itself) without rendezvous, and refuses pickles. In a throw-away process.

    Raises:
        UnsupportedError: not so with this torch release.
    """
    if sandboxed:
        sandbox.before_agent()
    try:
        agent = Agent("self", num_threads=2)
        to_self = agent.add_peer(agent.port)
        wire.offer("echo", lambda value: value)
        if wire.call(to_self, "echo", "x", timeout_seconds=10).wait() != "x":
            raise UnsupportedError("a call came back changed")
        if sandboxed:
            sandbox.lock(may_connect=False)
            sandbox.check_locked(may_connect=False)
            if wire.call(to_self, "echo", torch.ones(1), timeout_seconds=10).wait() != 1:
                raise sandbox.NoSandboxError("RPC needs what the sandbox forbids")
        foreign = pickle.dumps((os.getpid, ()))
        try:
            rpc._invoke_rpc_python_udf(agent._agent.get_worker_info(to_self), foreign, [], 10.0, False).wait()
        except Exception as error:
            if "refused" not in str(error):
                raise
        else:
            raise UnsupportedError("a pickle was not refused")
        if internal.deserialize(foreign, []).__class__ is not AttributeError:
            raise UnsupportedError("the codec was not replaced")
    except sandbox.NoSandboxError:
        raise
    except Exception as error:
        raise UnsupportedError(
            f"torch {torch.__version__} changed the parts of torch.distributed.rpc that hf-diloco's links stand on "
            f"({type(error).__name__}: {str(error)[:200]}); install torch {wire.TESTED_TORCH}, with which hf-diloco is "
            "tested."
        ) from error
