"""Numbers of a storm, from the tape, the witnesses and what was done; pure functions.

All times are of the machine's monotonic clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

from hf_diloco.chaos.accounting import Line, read_merges

Interval = tuple[float, float]


@dataclass(frozen=True)
class Rejoin:
    """A learner that was killed, until it is merged again; seconds, None where it did not come so far."""

    learner_id: int
    detect: float | None  # until the syncer knew; the others go on meanwhile
    start: float | None  # until its new process looks for the syncer: interpreter, imports, model
    link: float | None  # ... until the syncer has let it in
    fetch: float | None  # ... until it holds the global parameters
    load: float | None  # ... until its first step is done: data, optimizer
    first_merge: float | None  # ... until that, or a later one, is merged
    total: float | None


def with_times(tape: Iterable[Line], wall_minus_monotonic: float) -> list[dict[str, Any]]:
    """The tape's lines with ``at``: each syncer process counts its seconds from its own beginning."""
    lines = [dict(line) for line in tape]
    base = 0.0
    for line in lines:
        if line["kind"] == "start":
            base = line["time"] - line["seconds"] - wall_minus_monotonic
        line["at"] = base + line["seconds"]
    return lines


def first_step(witnesses: Mapping[int, Sequence[Line]]) -> float | None:
    """When training began."""
    times = [line["time"] for lines in witnesses.values() for line in lines if line["kind"] == "step"]
    return min(times, default=None)


def merged_tokens(tape: Sequence[Line], window: Interval) -> float:
    """Tokens merged in this time, as a mean over the fragments."""
    num_fragments = next((line["num_fragments"] for line in tape if line["kind"] == "layout"), 1)
    rounds = [line for line in read_merges(tape).valid if window[0] <= line["at"] <= window[1]]
    return float(sum(item["tokens"] for line in rounds for item in line["participants"])) / num_fragments


def gaps(tape: Sequence[Line], window: Interval, excused: Sequence[Interval] = ()) -> list[float]:
    """Seconds between merges, without what of them lies in ``excused`` times; the last up to the window's end."""
    times = [line["at"] for line in tape if line["kind"] == "round" and window[0] <= line["at"] <= window[1]]
    edges = [window[0], *times, window[1]]
    return [later - earlier - overlap(excused, (earlier, later)) for earlier, later in pairwise(edges)]


def first_merges_after(tape: Sequence[Line], moments: Iterable[float]) -> list[float | None]:
    """For each moment the seconds to the next merge."""
    times = [line["at"] for line in tape if line["kind"] == "round"]
    return [next((at - moment for at in times if at >= moment), None) for moment in moments]


def detection(tape: Sequence[Line], learner_id: int, began_at: float, until: float) -> float | None:
    """Seconds until the syncer found this learner's link gone; None if there was none, or it did not ``until`` then."""
    for line in tape:
        if line["kind"] in ("join", "leave") and line["learner_id"] == learner_id and began_at <= line["at"] <= until:
            return line["at"] - began_at if line["kind"] == "leave" and not line["for_good"] else None
    return None


def rejoins(tape: Sequence[Line], learner_id: int, witness: Sequence[Line], killed: Sequence[float]) -> list[Rejoin]:
    """What became of one learner after each of the times its process ended."""
    found = []
    for number, killed_at in enumerate(killed):
        until = killed[number + 1] if number + 1 < len(killed) else math.inf
        mine = [line for line in witness if killed_at < line["time"] < until]
        joining = next((line for line in mine if line["kind"] == "joining"), None)
        incarnation = joining["incarnation"] if joining else ""
        moments = [
            killed_at,
            joining["time"] if joining else None,
            _first(tape, "join", lambda line, name=incarnation: line["incarnation"] == name),
            next((line["time"] for line in mine if line["kind"] == "joined"), None),
            next((line["time"] for line in mine if line["kind"] == "step"), None),
            _first(tape, "round", lambda line, name=incarnation: name in _incarnations(line)) if incarnation else None,
        ]
        parts = [
            None if earlier is None or later is None else max(later - earlier, 0.0)
            for earlier, later in pairwise(moments)
        ]
        start, link, fetch, load, first_merge = parts
        total = None if moments[-1] is None else moments[-1] - killed_at
        detect = detection(tape, learner_id, killed_at, until)
        found.append(Rejoin(learner_id, detect, start, link, fetch, load, first_merge, total))
    return found


def _first(tape: Iterable[Line], kind: str, fits: Any) -> float | None:
    return next((line["at"] for line in tape if line["kind"] == kind and fits(line)), None)


def _incarnations(round: Line) -> set[str]:
    return {participant["update_id"].partition("/")[0] for participant in round["participants"]}


# ------------------------------------------------------------------------------------------------------------ intervals


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same times, without overlaps, in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        elif end > start:
            merged.append((start, end))
    return merged


def intersection(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """Times that lie in both."""
    pairs = ((max(a, c), min(b, d)) for a, b in first for c, d in second)
    return union((start, end) for start, end in pairs if end > start)


def overlap(intervals: Sequence[Interval], window: Interval) -> float:
    """Seconds of the window that lie in the intervals."""
    return sum(end - start for start, end in intersection(union(intervals), [window]))


# ----------------------------------------------------------------------------------------------------------- statistics


def quantile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that at least this share of all do not exceed; None of nothing."""
    if not values:
        return None
    return sorted(values)[min(max(math.ceil(share * len(values)) - 1, 0), len(values) - 1)]


def summary(values: Sequence[float]) -> dict[str, float | int | None]:
    """How many, median, 99th percentile, longest."""
    return {
        "count": len(values), "median": quantile(values, 0.5), "p99": quantile(values, 0.99),
        "max": max(values, default=None),
    }  # fmt: skip


def rejoin_parts(rejoined: Sequence[Rejoin]) -> dict[str, dict[str, float | int | None]]:
    """:func:`summary` of each part of the way back."""
    parts = [field.name for field in fields(Rejoin) if field.name != "learner_id"]
    return {name: summary([value for one in rejoined if (value := getattr(one, name)) is not None]) for name in parts}
