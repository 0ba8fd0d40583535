"""What a run looks like while it runs: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

_PLAIN_EVERY_SECONDS = 5.0
_COLORS = {"training": "green", "finished": "cyan", "absent": "red", "left": "dim", "idle": "yellow"}
_COLUMNS = ("learner", "state", "step", "loss", "tokens/s", "merged / trained tokens")
_COUNTS = {"updates_late": "late updates", "restarts": "restarts"}  # of a learner, shown where there are any


class Display:
    """Shows ``status.json`` as it changes. Use as a context manager.

    Args:
        console: where to; a live table if it is a terminal, else a plain line every few seconds.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self._live = Live(console=console, refresh_per_second=4, transient=False) if console.is_terminal else None
        self._next_line = 0.0
        self._last_lines: list[str] = []

    def __enter__(self) -> Display:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()

    def update(self, status: Mapping[str, Any], *, now: bool = False) -> None:
        """Show this status; plain lines only every few seconds (or ``now``), and only when something changed."""
        if not status:
            return
        if self._live:
            self._live.update(render(status))
        elif now or time.monotonic() >= self._next_line:
            lines = plain_lines(status)
            if lines != self._last_lines:
                self.message("\n".join(lines))
            self._last_lines, self._next_line = lines, time.monotonic() + _PLAIN_EVERY_SECONDS

    def message(self, text: str, style: str = "") -> None:
        """Say something, above the table if there is one."""
        if self._live:
            self.console.print(Text(text, style=style), soft_wrap=True)
            return
        with contextlib.suppress(OSError):  # on a full disk, say: the run is worth more than the line
            self.console.file.write(f"{text}\n")
            self.console.file.flush()


def render(status: Mapping[str, Any]) -> Group:
    """The table."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    counts = [name for name in _COUNTS if any(number(learner.get(name)) for learner in learners(status))]
    for column in (*_COLUMNS, *(_COUNTS[name] for name in counts)):
        table.add_column(column, justify="left" if column in ("learner", "state") else "right")
    for learner in learners(status):
        state = word(learner.get("state"))
        cells = [*learner_cells(learner), *(count(learner.get(name)) for name in counts)]
        table.add_row(cells[0], Text(state, style=_COLORS.get(state, "")), *cells[2:])
    return Group(Text(run_line(status), style="bold"), table)


def plain_lines(status: Mapping[str, Any]) -> list[str]:
    """The same as text: one line for the run, one for each learner."""
    lines = [run_line(status)]
    for learner in learners(status):
        name, state, step, loss, rate, tokens = learner_cells(learner)
        counts = "".join(f", {what} {count(learner[key])}" for key, what in _COUNTS.items() if number(learner.get(key)))
        lines.append(
            f"  learner {name}: {state}, step {step}, loss {loss}, {rate} tokens/s, {tokens} tokens merged{counts}"
        )
    return lines


def run_line(status: Mapping[str, Any]) -> str:
    """One line about the run as a whole."""
    last = status.get("last_participants")
    names = ", ".join(word(item) for item in last) if isinstance(last, list) and last else "-"
    return (
        f"{word(status.get('state'))}{start_gate(status)} · outer step {count(status.get('outer_step'))} of "
        f"{count(status.get('total_steps'))}{pace(status)} · "
        f"{count(status.get('merges'))} merges, the last from learners {names} · "
        f"in {size(status.get('bytes_received'))}, out {size(status.get('bytes_sent'))}"
        + (f" · syncer restarts {count(status['syncer_restarts'])}" if status.get("syncer_restarts") else "")
    )


def pace(status: Mapping[str, Any]) -> str:
    """H that was set and H in effect, if network or syncer cannot keep up."""
    wanted, effective = number(status.get("sync_every")), number(status.get("effective_sync_every"))
    if wanted is None or effective is None or round(effective) <= wanted:
        return ""
    return f" · H {count(wanted)} -> {count(effective)}"


def start_gate(status: Mapping[str, Any]) -> str:
    """For whom a run waits that has not started."""
    if status.get("state") != "waiting" or number(status.get("expected_learners")) is None:
        return ""
    seconds = number(status.get("starts_in_seconds"))
    without = "" if seconds is None else f", without the others in {seconds:.0f} s"
    return f" for learners ({count(status.get('learners_here'))} of {count(status['expected_learners'])} here{without})"


def learners(status: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What the status says of each learner."""
    items = status.get("learners")
    return [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []


def learner_cells(learner: Mapping[str, Any]) -> tuple[str, str, str, str, str, str]:
    """One learner's row."""
    loss, rate = number(learner.get("loss")), number(learner.get("tokens_per_second"))
    return (
        count(learner.get("learner_id")),
        word(learner.get("state")),
        count(learner.get("global_step")),
        "-" if loss is None else f"{loss:.4f}" if abs(loss) < 1e6 else f"{loss:.2e}",
        "-" if rate is None else f"{rate:,.0f}",
        merged_of_trained(learner),
    )


def merged_of_trained(learner: Mapping[str, Any]) -> str:
    """Tokens merged / trained, and the ratio."""
    merged, trained = number(learner.get("tokens_merged")), number(learner.get("tokens_trained"))
    ratio = f" ({merged / trained:.3f})" if merged is not None and trained else ""
    return f"{count(merged)} / {count(trained)}{ratio}"


def number(value: object) -> float | None:
    """``value`` if it is a number."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def count(value: object) -> str:
    """A whole number with separators, or a dash."""
    found = number(value)
    return "-" if found is None else f"{found:,.0f}"


def size(value: object) -> str:
    """Bytes as MB, or a dash."""
    found = number(value)
    return "-" if found is None else f"{found / 1e6:,.1f} MB"


def word(value: object) -> str:
    """A short printable text, or a dash: part of it may come from elsewhere."""
    text = "".join(letter for letter in str(value) if letter.isprintable())[:20] if value is not None else ""
    return text or "-"
