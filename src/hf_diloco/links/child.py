"""What every process that links start has in common: quiet, deaf to signals, and gone with its parent.

Run as ``python -m hf_diloco.links.<module> <fd> <parent pid>``; the fd is one end of a socketpair. No torch here.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import resource
import signal
import socket
import sys
import threading
import time

logger = logging.getLogger(__name__)

PARENT_POLL_SECONDS = 0.2
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15


def begin(name: str) -> tuple[socket.socket, int]:
    """Set this process up; the socket to its parent and the parent's pid."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)  # the parent decides when this ends, after it has drained
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # strangers can make a gateway abort; that is no news
    raise_file_limit()
    level = os.environ.get("HF_DILOCO_LOG_LEVEL", "WARNING").upper()
    known = isinstance(logging.getLevelName(level), int)
    logging.basicConfig(
        level=level if known else "WARNING", stream=sys.stderr, format=f"%(asctime)s %(levelname)s [{name}] %(message)s"
    )
    set_name(name)
    return socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])


def raise_file_limit() -> None:
    """As many open files as this user may have: the usual 1024 are those of some fifty links at the door."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # a sandbox may forbid it
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def set_name(name: str) -> None:
    """The name that ps and top show."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, f"hfd-{name}".encode()[:15], 0, 0, 0)


def end_with(parent: int) -> None:
    """Kill this process when its parent ends. For children of a single-threaded parent (it is its *thread* that
    counts), and only before this process has changed its user."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def watch_parent(parent: int) -> None:
    """Leave at once when the parent has gone, however it went. An EOF is not enough: its forks may hold the fd."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_POLL_SECONDS)
        os._exit(0)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
