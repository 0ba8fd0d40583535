"""``python -m hf_diloco.cli.guard GRACE_SECONDS COMMAND...``: runs a command and leaves nothing of it behind.

``accelerate launch`` does not pass SIGTERM on to the training script, and whoever started both may be killed with
-9. So each child of ``hf-diloco launch`` has a guard above it, which adopts what its parents leave behind
(PR_SET_CHILD_SUBREAPER). When its standard input ends, because launch closed it or is dead, or a signal tells it to,
it sends SIGTERM to the training processes, and SIGKILL to all that is still there after the grace time, or at another
signal. It ends when the last process is gone, with the command's exit code (128 + n for one killed by signal n).
Its standard error is what the command prints to, a file in memory (``output.py``), and its standard output is the log
that it copies that into.

``hf-diloco guard`` is the same for a learner that is started by hand or is the first process of a container; its
standard input does not matter, and the command prints where it does.

Only the standard library is loaded here: a guard costs 10 MB.
"""

from __future__ import annotations

import ctypes
import math
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from hf_diloco.cli.output import LogWriter
from hf_diloco.learner.launchers import is_launcher

_PR_SET_CHILD_SUBREAPER = 36
_TICK_SECONDS = 0.1
_LEFTOVER_SECONDS = 5.0  # for what a command that ended by itself has left running
_LOG_SECONDS = 5.0  # for the last lines, on a disk that hangs
_SAME_REQUEST_SECONDS = 3.0  # SIGTERM to all processes of a job, and passed on by somebody, comes twice
_TERMINATED = 128 + signal.SIGTERM


def stop_signals() -> list[signal.Signals]:
    """Those that ask for an end: not SIGHUP where it is ignored already, which is what ``nohup`` does."""
    is_deaf = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGTERM, signal.SIGINT, *([] if is_deaf else [signal.SIGHUP])]


class Guard:
    """The processes of one command.

    Args:
        command: program and arguments.
        grace_seconds: from SIGTERM (or the violent death of the command) to SIGKILL for what is left.
        on_leash: the end of standard input is a request to stop, and the command prints to our standard error only.
            Otherwise this is a foreground process, and the command gets a process group of its own: Ctrl-C in the
            terminal is for the guard alone.
        stopped_exit_code: takes the place of 0 if the command was told to stop.
    """

    def __init__(
        self, command: list[str], grace_seconds: float, *, on_leash: bool = True, stopped_exit_code: int = 0
    ) -> None:
        self._command = command
        self._grace_seconds = grace_seconds
        self._on_leash = on_leash  # until it has ended
        self._stopped_exit_code = stopped_exit_code
        self._told_at: float | None = None
        self._at_once = False
        self._exit_code: int | None = None
        self._heirs: dict[int, int | None] = {}  # exit codes of what the command left to us when it died

    def run(self) -> int:
        """Run the command to its end, and all that it started. Returns its exit code."""
        for number in stop_signals():
            signal.signal(number, self._on_signal)
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        main = self._spawn()
        deadline, terminated = None, False
        while self._reap(main):
            self._wait_a_tick()
            died = self._exit_code is not None and self._exit_code > 128
            if (died or self._told_at is not None) and not terminated:
                terminated = True
                self._terminate(main)
            if deadline is None and (terminated or self._exit_code is not None):
                seconds = self._grace_seconds if terminated else min(self._grace_seconds, _LEFTOVER_SECONDS)
                deadline = time.monotonic() + seconds
            if self._at_once or (deadline is not None and time.monotonic() >= deadline):
                _send(signal.SIGKILL, _descendants())
        return self._result()

    def _spawn(self) -> int:
        for name in os.listdir("/proc/self/fd"):
            if int(name) > 2 and Path("/proc/self/fd", name).exists():
                os.set_inheritable(int(name), False)
        program = shutil.which(self._command[0]) or self._command[0]
        no_input = (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)
        if self._on_leash:
            one_output = (os.POSIX_SPAWN_DUP2, 2, 1)
            return os.posix_spawn(program, self._command, os.environ, file_actions=[no_input, one_output])
        return os.posix_spawn(program, self._command, os.environ, file_actions=[no_input], setpgroup=0)

    def _wait_a_tick(self) -> None:
        if not self._on_leash:
            time.sleep(_TICK_SECONDS)
        elif select.select([0], [], [], _TICK_SECONDS)[0] and not os.read(0, 1):
            self._on_leash = False
            self._told_at = -math.inf  # any signal after this is another request

    def _on_signal(self, *_: object) -> None:
        now = time.monotonic()
        self._at_once = self._told_at is not None and now - self._told_at > _SAME_REQUEST_SECONDS
        self._told_at = self._told_at or now

    def _terminate(self, main: int) -> None:
        """SIGTERM to the training processes.

        A launcher that is left alone ends when they do, with their exit code; if it got SIGTERM it would die, or
        pass it on to be told twice. What they have started themselves is theirs to end.
        """
        parents = _parents()
        training = {pid for pid, parent in parents.items() if parent in (main, os.getpid())} - {main}
        if is_launcher(self._command) and training:
            _send(signal.SIGTERM, training)
        else:
            _send(signal.SIGTERM, _descendants())

    def _reap(self, main: int) -> bool:
        """Whether any process is left; notes exit codes."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            code = os.waitstatus_to_exitcode(status)
            code = code if code >= 0 else 128 - code
            if pid == main:
                self._exit_code = code
                self._heirs = {pid: None for pid, parent in _parents().items() if parent == os.getpid()}
            elif pid in self._heirs:
                self._heirs[pid] = code

    def _result(self) -> int:
        """The command's exit code; for a launcher that died of SIGTERM, how the training processes have ended."""
        code = self._exit_code or 0
        if code == _TERMINATED and self._heirs and is_launcher(self._command):
            code = max(code or 0 for code in self._heirs.values())
        return self._stopped_exit_code if code == 0 and self._told_at is not None else code


def _parents() -> dict[int, int]:
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue  # it ended just now
            parents[int(entry.name)] = int(stat.rpartition(")")[2].split()[1])
    return parents


def _descendants() -> set[int]:
    parents = _parents()
    found = {os.getpid()}
    while grown := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= grown
    return found - {os.getpid()}


def _send(number: int, pids: Iterable[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def main() -> int:
    """A guard on the leash of ``hf-diloco launch``. Returns its exit code."""
    writer = LogWriter(output=2, log=1)
    writer.start()
    try:
        return Guard(sys.argv[2:], float(sys.argv[1])).run()
    finally:
        writer.close(_LOG_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
