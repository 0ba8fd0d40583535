"""Notices that this process is to end soon, so that the learner can ship what it has, take leave and save."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NoReturn

from hf_diloco.learner import data_workers
from hf_diloco.learner.launchers import is_launcher

logger = logging.getLogger(__name__)

_SAME_REQUEST_SECONDS = 3.0  # SIGTERM to all processes of a job, and passed on by a launcher, comes twice


class Preemption:
    """Watches for SIGTERM, and for the end of the launcher that started this process.

    ``accelerate launch`` does not pass SIGTERM on: it dies, and the script lives on without it. So a script whose
    launcher is gone is taken to be preempted, too. A parent that is no launcher may end as it likes (the shell of
    ``nohup python train.py &`` does).

    The handler only takes note. A handler that was there before is called as well; what it raises waits for
    :meth:`exit`. A second SIGTERM ends the process at once. SIGTERM stays as it was in a thread other than the main
    one, where Python allows no handlers, and where it is ignored or handled by something that is not Python.

    Args:
        is_training: whether, with this frame being executed, somebody will still look at ``reason``. Training may
            have ended by an exception without any word to us: then SIGTERM does what it did before.
    """

    def __init__(self, is_training: Callable[[FrameType | None], bool]) -> None:
        self._is_training = is_training
        self._signalled_at: float | None = None
        self._raised: BaseException | None = None
        self._launcher: int | None = None
        self._watches = False

    def watch(self) -> None:
        """Begin; :meth:`end` undoes it."""
        if threading.current_thread() is not threading.main_thread():
            return
        parent = os.getppid()
        self._launcher = parent if _is_launcher(parent) else None
        self._previous = signal.getsignal(signal.SIGTERM)
        if self._previous == signal.SIG_DFL or callable(self._previous):
            signal.signal(signal.SIGTERM, self._on_signal)
            data_workers.spare()
            self._watches = True

    def end(self) -> None:
        """Stop watching. Idempotent."""
        self._launcher = None
        if self._watches and threading.current_thread() is threading.main_thread():
            self._watches = False
            data_workers.spare_no_more()
            if signal.getsignal(signal.SIGTERM) == self._on_signal:  # and not somebody else's by now
                signal.signal(signal.SIGTERM, self._previous)

    @property
    def reason(self) -> str | None:
        """Why this process is to end; None if it is not."""
        if self._signalled_at is not None:
            return "SIGTERM"
        if self._launcher is not None and os.getppid() != self._launcher:
            return "its launcher is gone"
        return None

    def requested(self) -> bool:
        """Whether this process is to end."""
        return self.reason is not None

    def exit(self) -> NoReturn:
        """End the process with exit code 0, or as the handler that was there before wanted it.

        Raises:
            SystemExit: or what that handler raised.
        """
        raise self._raised or SystemExit(0)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self._watches or not self._is_training(frame):
            if signal.getsignal(number) == self._on_signal:
                self.end()
                signal.signal(number, self._previous)
                os.kill(os.getpid(), number)
            elif callable(self._previous):  # a later handler calls this one: a signal would only come back to that
                self._previous(number, frame)
            return
        if self._signalled_at is not None and now - self._signalled_at > _SAME_REQUEST_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            os._exit(128 + number)  # PID 1 of a container survives what it has no handler for
        self._signalled_at = self._signalled_at or now
        if callable(self._previous):
            try:
                self._previous(number, frame)
            except BaseException as raised:
                self._raised = self._raised or raised


def _is_launcher(pid: int) -> bool:
    try:
        return is_launcher(Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0"))
    except OSError:  # it has just ended, or this is not Linux
        return False
