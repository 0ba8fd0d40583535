"""The processes that a learner or the syncer starts: spawned, told, watched, ended."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import hf_diloco
from hf_diloco.errors import UnsupportedError
from hf_diloco.links.channel import Channel
from hf_diloco.links.loop import Loop

_END_SECONDS = 3.0


def require_linux() -> None:
    """Links between processes stand on memfd, SCM_RIGHTS, splice and /proc.

    Raises:
        UnsupportedError: this is not Linux.
    """
    if not sys.platform.startswith("linux"):
        raise UnsupportedError(
            f"hf-diloco links learners and syncer on Linux only; this is {sys.platform}. Run both on Linux (a "
            "container will do). In one process, hf_diloco.links.in_process works everywhere."
        )


class Child:
    """A process ``python -m hf_diloco.links.<module>`` and the channel to it. It ends when this process does."""

    def __init__(
        self,
        loop: Loop,
        module: str,
        arguments: Sequence[str],
        on_message: Callable[[dict[str, Any]], None],
        on_closed: Callable[[str], None],
    ) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", f"hf_diloco.links.{module}", str(theirs.fileno()), str(os.getpid())]
            self._process = subprocess.Popen(
                [*command, *arguments],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=_environment(),
            )
        self.channel = Channel(ours, loop, lambda message, _payload, _release: on_message(message), on_closed)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def silent_for(self) -> float:
        """Seconds since it last said anything."""
        return time.monotonic() - self.channel.heard

    def look(self) -> None:
        """Notice its end also where its side of the channel lives on in a fork. In the loop's thread."""
        if self._process.poll() is not None:
            self.channel.finish()

    def kill(self) -> None:
        """End it now, whatever it does; its children follow."""
        self._process.kill()

    def end(self) -> int:
        """Let it end, kill it if it takes too long, and reap it. Its exit code."""
        try:
            return self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


def _environment() -> dict[str, str]:
    root = str(Path(hf_diloco.__file__).parent.parent)
    path = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    environment = {name: value for name, value in os.environ.items() if name != "HF_DILOCO_TOKEN"}
    return environment | {
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONWARNINGS": "ignore",  # "error" is meant for the user's program
        "PYTHONSAFEPATH": "1",  # a torch.py or json.py in the working directory is not ours
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",  # numpy would start threads: a zygote must have one only
        "MKL_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "TP_SOCKET_IFNAME": "lo",
    }
