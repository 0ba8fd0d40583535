"""A child of ``hf-diloco launch`` that is started again when it dies."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

from hf_diloco.cli.processes import Child
from hf_diloco.errors import DiLoCoError

_FIRST_DELAY_SECONDS, _LAST_DELAY_SECONDS = 1.0, 60.0
_GOOD_STRETCH_SECONDS = 300.0  # who has lived so long did not die of its start


class Backoff:
    """When a process that died is started again: later each time, and after too many times not at all.

    Args:
        most: restarts in a row before it is given up; a good stretch of life starts the count anew.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.in_a_row = 0

    def delay(self, lived_seconds: float) -> float | None:
        """Seconds until the next start, after a life of ``lived_seconds``; None to give up."""
        if lived_seconds >= _GOOD_STRETCH_SECONDS:
            self.in_a_row = 0
        if self.in_a_row >= self.most:
            return None
        self.in_a_row += 1
        return float(min(_FIRST_DELAY_SECONDS * 2 ** (self.in_a_row - 1), _LAST_DELAY_SECONDS))


class Supervised:
    """One child, watched.

    Args:
        name: as people are told.
        child: just started.
        max_restarts: in a row; 0: it is never started again.
        only_after_signals: a child that ended by itself, if with an error, stays dead.
        command: to start it again with; default: the same.
    """

    def __init__(
        self,
        name: str,
        child: Child,
        max_restarts: int,
        *,
        only_after_signals: bool = False,
        command: Callable[[], list[str]] | None = None,
    ) -> None:
        self.name, self.child = name, child
        self.exit_code: int | None = None  # when it has ended well, or for good
        self.num_restarts = 0
        self.called_off = False  # it was being brought back when that was no longer wanted
        self._backoff = Backoff(max_restarts)
        self._only_after_signals, self._command = only_after_signals, command
        self._due: float | None = None

    def look(self) -> str | None:
        """Notice its end, and start it again when that is due. Returns what there is to say."""
        now = time.monotonic()
        if self._due is not None:
            return self._start_again() if now >= self._due else None
        code = self.child.poll() if self.exit_code is None else None
        if code is None:
            return None
        delay = None
        if code > 128 or (code != 0 and not self._only_after_signals):
            delay = self._backoff.delay(now - self.child.started_at)
        if delay is None:
            self.exit_code = code
            return self._last_words(code)
        self._due = now + delay
        number = f"restart {self._backoff.in_a_row} of at most {self._backoff.most} in a row"
        return (
            f"{self.name} died ({meaning(code)}) and is started again in {delay:.0f} s ({number}). "
            f"{shown_tail(self.child)}"
        )

    def settle(self) -> None:
        """Never start it again; if it has ended, that is how it ended."""
        self._due = None
        self._backoff.most = 0
        if self.exit_code is None:
            self.exit_code = self.child.poll()

    @property
    def waits(self) -> bool:
        """It is dead, to be started again."""
        return self._due is not None

    def call_off(self) -> None:
        """Bring it back no more."""
        self.called_off = True
        self.settle()
        self.child.stop()

    def _start_again(self) -> str:
        self._due = None
        try:
            self.child.restart(self._command() if self._command else None)
        except DiLoCoError as error:
            self.exit_code = self.child.poll()
            return f"{self.name} cannot be started again: {error}"
        self.num_restarts += 1
        return f"{self.name} is started again."

    def _last_words(self, code: int) -> str:
        if code == 0 or self.called_off:
            return f"{self.name} has ended ({meaning(code)})."
        if self._backoff.in_a_row:
            return (
                f"{self.name} died ({meaning(code)}) and is given up; restarts in a row: {self._backoff.in_a_row}. "
                f"{shown_tail(self.child)}"
            )
        return f"{self.name} died ({meaning(code)}). {shown_tail(self.child)}"


def meaning(code: int) -> str:
    """An exit code in words; 128 + n is signal n."""
    try:
        return f"exit code {code}" if code <= 128 else f"killed by {signal.Signals(code - 128).name}"
    except ValueError:
        return f"exit code {code}"


def shown_tail(child: Child) -> str:
    """What it has printed last, to be shown."""
    tail = child.last_lines()
    indented = "\n".join(f"  | {line}" for line in tail.splitlines()) if tail else "  | (nothing)"
    return f"Its last lines (more in {child.log}):\n{indented}"
