"""Imports torch once, then forks a disposable courier or gateway for each link, in milliseconds.

``python -m hf_diloco.links.zygote <fd> <parent pid> courier|gateway``. Started by exec and single-threaded, so the
forks are safe whatever the trainer does (CUDA, threads, notebooks).
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

from hf_diloco.errors import UnsupportedError
from hf_diloco.links import child
from hf_diloco.links.channel import FrameReader, encode_frame

_END_SECONDS = 0.5  # children that were told to leave get this long before they are killed

Role = Callable[[socket.socket, dict[str, Any]], None]


class _Zygote:
    role: Role
    sandboxed: bool

    def __init__(self, sock: socket.socket, parent: int, name: str) -> None:
        sock.settimeout(child.PARENT_POLL_SECONDS)
        self._sock, self._parent, self._name = sock, parent, name
        self._reader = FrameReader(sock)
        self._pids: dict[int, int] = {}  # of the children that live, by the parent's number for them

    def say(self, **message: Any) -> None:
        try:
            self._sock.sendall(encode_frame(message))
        except OSError:
            os._exit(0)

    def run(self) -> None:
        while os.getppid() == self._parent:
            self._reap()
            try:
                frames = self._reader.read()
            except TimeoutError:
                continue
            except OSError:
                break
            if frames is None:
                break
            for frame in frames:
                self._obey(frame.message, frame.fds)
        self._end()

    def _obey(self, message: dict[str, Any], fds: list[int]) -> None:
        op = message["op"]
        if op == "tick":
            self.say(op="tick")
        elif op == "fork":
            self._fork(message["number"], message["args"], fds[0])
        elif op == "kill" and (pid := self._pids.get(message["number"])):
            os.kill(pid, signal.SIGKILL)
        elif op == "quit":
            self._end()

    def _fork(self, number: int, args: dict[str, Any], fd: int) -> None:
        zygote = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:  # too many processes, or no memory: this link fails, the others stay
            child.logger.error("no %s can be started: %s", self._name, error)
            os.close(fd)
            self.say(op="exited", number=number)
            return
        if pid:
            os.close(fd)
            self._pids[number] = pid
            return
        try:
            child.end_with(zygote)
            self._sock.close()
            child.set_name(self._name)
            self.role(socket.socket(fileno=fd), {**args, "sandboxed": self.sandboxed})
        except BaseException as error:
            child.logger.exception("a %s failed: %s", self._name, error)
        finally:
            os._exit(1)

    def _reap(self) -> None:
        for number, pid in list(self._pids.items()):
            if os.waitpid(pid, os.WNOHANG)[0]:
                del self._pids[number]
                self.say(op="exited", number=number)

    def _end(self) -> None:
        deadline = time.monotonic() + _END_SECONDS
        while self._pids and time.monotonic() < deadline and os.getppid() == self._parent:
            time.sleep(0.01)
            self._reap()
        for pid in self._pids.values():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        os._exit(0)


def _self_test(*, sandboxed: bool) -> str | None:
    """Why RPC (in a sandbox) cannot be used here; None if it can. In a fork, since agents start threads."""
    from hf_diloco.links import agent

    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        text = ""
        try:
            agent.self_test(sandboxed=sandboxed)
        except BaseException as error:
            text = str(error) or type(error).__name__
        os.write(write_end, text.encode()[:4000])
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        text = pipe.read().decode()
    _, status = os.waitpid(pid, 0)
    return text or (f"torch.distributed.rpc ended the process with status {status}" if status else None)


def _prepare(zygote: _Zygote, name: str) -> tuple[str | None, str | None]:
    """Import and try out all that a link needs. Why links cannot be made; and why they have no sandbox."""
    try:
        import torch
        import torch.distributed.rpc.rref_proxy  # C++ imports it at the first call otherwise

        from hf_diloco.links import wire

        torch.ones(1).add_(1)  # the first operation reads about the processor, which the sandbox forbids later
        wire.install()
        zygote.role = importlib.import_module(f"hf_diloco.links.{name}").main
    except UnsupportedError as error:
        return str(error), None
    except (ImportError, AttributeError) as error:
        return f"torch.distributed.rpc cannot be used with this build of torch ({error}); install another build.", None
    no_sandbox = _self_test(sandboxed=True)
    zygote.sandboxed = no_sandbox is None
    return _self_test(sandboxed=False) if no_sandbox else None, no_sandbox


def main() -> None:
    """Be the zygote of this role."""
    name = sys.argv[3]
    sock, parent = child.begin(f"{name}-0")
    zygote = _Zygote(sock, parent, name)
    problem, no_sandbox = _prepare(zygote, name)
    if problem:
        zygote.say(op="unsupported", text=problem)
    else:
        gc.freeze()  # collections in the children would copy the pages they share
        zygote.say(op="ready", no_sandbox=no_sandbox)
    zygote.run()


if __name__ == "__main__":
    main()
