"""Keeps DataLoader workers alive when all processes of a job get SIGTERM, until the learner has drained and saved.

``kill -- -PGID``, Slurm and systemd send SIGTERM to every process. torch's workers die of it, and then the main process
raises "DataLoader worker is killed by signal" wherever it is, before the next step boundary. So while a learner
trains, its workers ignore SIGTERM, from others, that is: their main process still ends them with it when it exits.
(A worker cannot see who sent a signal. The main process sets a byte in shared memory before its last SIGTERM.)

torch offers no way to do that for the workers of an evaluation, so a private function of it is replaced. Workers that
are started by spawn or forkserver have a fresh torch: they die as they would without hf-diloco.
"""

from __future__ import annotations

import atexit
import mmap
import os
import signal
from typing import Any

from torch.utils.data._utils import signal_handling

_NAME = "_set_worker_signal_handlers"
_torch_sets: Any = None
_exiting: mmap.mmap | None = None


def spare() -> None:
    """From now on, workers that are forked ignore SIGTERM. Idempotent."""
    global _torch_sets, _exiting
    if not hasattr(signal_handling, _NAME) or getattr(signal_handling, _NAME) is _set_worker_signal_handlers:
        return
    if _exiting is None:
        _exiting = mmap.mmap(-1, 1)
        atexit.register(_say_that_we_exit, os.getpid())  # runs before multiprocessing's, which sends SIGTERM and joins
    _torch_sets = getattr(signal_handling, _NAME)
    setattr(signal_handling, _NAME, _set_worker_signal_handlers)


def spare_no_more() -> None:
    """Undo :func:`spare` for workers to come. Idempotent."""
    if getattr(signal_handling, _NAME, None) is _set_worker_signal_handlers:
        setattr(signal_handling, _NAME, _torch_sets)


def _set_worker_signal_handlers() -> None:
    """In the worker, in the place of torch's."""
    _torch_sets()
    signal.signal(signal.SIGTERM, _on_sigterm)


def _on_sigterm(*_: object) -> None:
    assert _exiting is not None
    if _exiting[0]:
        os._exit(0)


def _say_that_we_exit(pid: int) -> None:
    if _exiting is not None and os.getpid() == pid:
        _exiting[0] = 1
