"""``python -m hf_diloco.cli.guard GRACE_SECONDS COMMAND...``: runs a command and leaves nothing of it behind.

``accelerate launch`` does not pass SIGTERM on to the training script, and whoever started both may be killed with
-9. So each child of ``hf-diloco launch`` has a guard above it, which adopts what its parents leave behind
(PR_SET_CHILD_SUBREAPER). When its standard input ends, because launch closed it or is dead, or a signal tells it to,
it sends SIGTERM to its process group, and SIGKILL to all that is still there after the grace time. It ends when the
last process is gone, with the command's exit code (128 + n for one killed by signal n).

Only the standard library is loaded here: a guard costs 10 MB.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import sys
import time
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_TICK_SECONDS = 0.1
_LEFTOVER_SECONDS = 5.0  # for what a command that ended by itself has left running


class Guard:
    """The processes of one command.

    Args:
        command: program and arguments.
        grace_seconds: from SIGTERM (or the violent death of the command) to SIGKILL for what is left.
    """

    def __init__(self, command: list[str], grace_seconds: float) -> None:
        self._command = command
        self._grace_seconds = grace_seconds
        self._told_to_stop = False
        self._watching = True  # standard input, for its end
        self._exit_code: int | None = None

    def run(self) -> int:
        """Run the command to its end, and all that it started. Returns its exit code."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._stop)
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        for name in os.listdir("/proc/self/fd"):
            if int(name) > 2 and Path("/proc/self/fd", name).exists():
                os.set_inheritable(int(name), False)
        program = shutil.which(self._command[0]) or self._command[0]
        no_input = (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)
        main = os.posix_spawn(program, self._command, os.environ, file_actions=[no_input])
        deadline, terminated = None, False
        while self._reap(main):
            self._wait_a_tick()
            if self._told_to_stop and not terminated:
                terminated = True
                os.killpg(0, signal.SIGTERM)
            if deadline is None and (terminated or self._exit_code is not None):
                ended_by_itself = not terminated and self._exit_code is not None and self._exit_code <= 128
                seconds = min(self._grace_seconds, _LEFTOVER_SECONDS) if ended_by_itself else self._grace_seconds
                deadline = time.monotonic() + seconds
            if deadline is not None and time.monotonic() >= deadline:
                _kill_descendants()
        return self._exit_code or 0

    def _wait_a_tick(self) -> None:
        if not self._watching:
            time.sleep(_TICK_SECONDS)
        elif select.select([0], [], [], _TICK_SECONDS)[0] and not os.read(0, 1):
            self._watching = False
            self._told_to_stop = True

    def _stop(self, *_: object) -> None:
        self._told_to_stop = True

    def _reap(self, main: int) -> bool:
        """Whether any process is left; notes the exit code of the command."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == main:
                code = os.waitstatus_to_exitcode(status)
                self._exit_code = code if code >= 0 else 128 - code


def _kill_descendants() -> None:
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue  # it ended just now
            parents[int(entry.name)] = int(stat.rpartition(")")[2].split()[1])
    found = {os.getpid()}
    while grown := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= grown
    for pid in found - {os.getpid()}:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


if __name__ == "__main__":
    sys.exit(Guard(sys.argv[2:], float(sys.argv[1])).run())
