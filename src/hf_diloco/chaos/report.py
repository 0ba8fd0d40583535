"""What a storm did to a run, in numbers, and whether it may be called good."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from hf_diloco.chaos import measure
from hf_diloco.chaos.accounting import keep_books
from hf_diloco.chaos.inject import Happening
from hf_diloco.chaos.measure import Interval
from hf_diloco.chaos.storm import Record

MOST_GAP_SECONDS = 12.0
# Not a leak: a pool keeps up to 8 free memory regions and has as many in use as rounds are open, in both directions.
MOST_GROWN = 32
_PLACES = ("trained", "merged", "lost", "overwritten", "voided", "held")
_T_95 = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26}


def judge(storm: Record, calm: Record | None) -> dict[str, Any]:
    """All numbers of a storm, beside those of a run without faults, and what is wrong with it (``problems``)."""
    window = (storm.began_at, storm.ended_at)
    books = keep_books(storm.tape, storm.witnesses)
    times = {learner_id: unavailable(storm, learner_id) for learner_id in range(storm.num_learners)}
    lost_seconds = sum(measure.overlap(gone, window) for gone, _ in times.values())
    syncer_down = syncer_outages(storm)
    nobody = [window]
    for gone, cut in times.values():
        nobody = measure.intersection(nobody, measure.union([*gone, *cut]))
    excused = measure.union([*syncer_down, *nobody])
    gaps = measure.gaps(storm.tape, window, excused)
    rejoined = [
        one
        for learner_id in range(storm.num_learners)
        for one in measure.rejoins(storm.tape, learner_id, storm.witnesses[learner_id], deaths(storm, learner_id))
    ]
    num_seconds = window[1] - window[0]
    merged = measure.merged_tokens(storm.tape, window)
    report: dict[str, Any] = {
        "seconds": num_seconds,
        "num_learners": storm.num_learners,
        "faults": [_fault(happening, storm.began_at) for happening in storm.happened],
        "tokens": {name: getattr(books, name) for name in _PLACES},
        "accounts": [asdict(account) for account in books.accounts],
        "merged_in_window": merged,
        "share_left_by_faults": 1 - lost_seconds / (num_seconds * storm.num_learners) if num_seconds else 1.0,
        "gaps": measure.summary(gaps),
        "first_merge_after_syncer": _syncer_returns(storm, syncer_down),
        "syncer_down_seconds": measure.overlap(syncer_down, window),
        "nobody_seconds": measure.overlap(nobody, window),
        "detection": detections(storm),
        "rejoins": [asdict(one) for one in rejoined],
        "rejoin": measure.rejoin_parts(rejoined),
        "eval_loss": final_loss(storm),
        "cpu_share": storm.cpu_share,
        "grown": grown(storm),
        "left": storm.left,
    }  # fmt: skip
    if calm is not None:
        calm_books = keep_books(calm.tape, calm.witnesses)
        last_merge_at = max((line["at"] for line in calm.tape if line["kind"] == "round"), default=calm.began_at)
        calm_window = (calm.began_at, min(calm.began_at + num_seconds, last_merge_at))  # it may have been shorter
        calm_seconds = calm_window[1] - calm_window[0]
        calm_merged = measure.merged_tokens(calm.tape, calm_window) * num_seconds / calm_seconds if calm_seconds else 0
        report["calm"] = {
            "seconds": calm_seconds,
            "merged_in_window": calm_merged,
            "merged": calm_books.merged,
            "gaps": measure.summary(measure.gaps(calm.tape, calm_window)),
            "eval_loss": final_loss(calm),
            "cpu_share": calm.cpu_share,
        }
        report["goodput"] = merged / calm_merged if calm_merged else None
        report["goodput_of_what_faults_leave"] = (
            report["goodput"] / report["share_left_by_faults"] if calm_merged else None
        )
    report["problems"] = [*books.errors, *storm.problems, *_problems(report)]
    if calm is not None:
        wrong = [*calm_books.errors, *calm.problems, *calm.left]
        report["problems"] += [f"without faults: {text}" for text in wrong]
    return report


def _problems(report: Mapping[str, Any]) -> list[str]:
    """What was left behind, or took too long."""
    found = [f"left behind: {text}" for text in report["left"]]
    for name, (fds, regions) in report["grown"].items():
        if max(fds, regions) > MOST_GROWN:
            found.append(f"{name} holds {fds} descriptors more than before the storm, {regions} memory regions more")
    if (longest := report["gaps"]["max"] or 0.0) > MOST_GAP_SECONDS:
        found.append(f"no merge for {longest:.1f} s while syncer and learners were there")
    return found


# ---------------------------------------------------------------------------------------------------- who was away when


def deaths(storm: Record, learner_id: int | None) -> list[float]:
    """When processes of this learner, or of the syncer, ended that were not to end: when they were killed, if so."""
    kills = [
        happening.began_at
        for happening in storm.happened
        if happening.fault.kind in ("kill", "broken_checkpoint") and happening.fault.victim.learner_id == learner_id
    ]
    found = []
    for life in storm.lives:
        if life.learner_id == learner_id and life.ended_at is not None and life.exit_code:
            noticed_at = life.ended_at
            found.append(max((at for at in kills if life.started_at < at < noticed_at), default=noticed_at))
    return found


def unavailable(storm: Record, learner_id: int) -> tuple[list[Interval], list[Interval]]:
    """Times in which this learner could not train (stopped, or dead and not yet back at the door); and was cut off."""
    gone: list[Interval] = []
    cut: list[Interval] = []
    for happening in storm.happened:
        fault, end = happening.fault, happening.ended_at or storm.ended_at
        if happening.missed or fault.victim.learner_id != learner_id:
            continue
        if fault.kind == "stop" and fault.victim.part in ("learner", "trainer", "rank"):
            gone.append((happening.began_at, end))
        elif fault.kind in ("cut", "one_way"):
            cut.append((happening.began_at, end))
    back = [line["time"] for line in storm.witnesses[learner_id] if line["kind"] == "joining"]
    for died_at in deaths(storm, learner_id):
        gone.append((died_at, min((at for at in back if at > died_at), default=math.inf)))
    return measure.union(gone), measure.union(cut)


def syncer_outages(storm: Record) -> list[Interval]:
    """Times in which the syncer was dead, until its next process was up, or was stopped."""
    up = [line["at"] for line in storm.tape if line["kind"] == "start"]
    outages = [(at, min((back for back in up if back > at), default=math.inf)) for at in deaths(storm, None)]
    outages += [
        (happening.began_at, happening.ended_at or storm.ended_at)
        for happening in storm.happened
        if happening.fault.kind == "stop" and happening.fault.victim.part == "syncer"
    ]
    return measure.union(outages)


def _syncer_returns(storm: Record, outages: Sequence[Interval]) -> list[float | None]:
    """After each outage the seconds to the first merge; if the syncer is away again meanwhile, that does not count."""
    moments = [end for _, end in outages if end < math.inf]
    found: list[float | None] = []
    for moment, seconds in zip(moments, measure.first_merges_after(storm.tape, moments), strict=True):
        away = 0.0 if seconds is None else measure.overlap(outages, (moment, moment + seconds))
        found.append(None if seconds is None else seconds - away)
    return found


def detections(storm: Record) -> dict[str, dict[str, Any]]:
    """How long it took until the syncer knew that a link was gone, by kind of fault."""
    found: dict[str, list[float | None]] = defaultdict(list)
    for number, happening in enumerate(storm.happened):
        learner_id = happening.fault.victim.learner_id
        if happening.missed or learner_id is None:
            continue
        later = [
            other.began_at
            for other in storm.happened[number + 1 :]
            if other.fault.victim.learner_id == learner_id or other.fault.victim.part in ("door", "syncer")
        ]
        until = min([*later, happening.began_at + 40.0])
        name = f"{happening.fault.kind}:{happening.fault.victim.part}"
        found[name].append(measure.detection(storm.tape, learner_id, happening.began_at, until))
    return {
        name: {"faults": len(values), **measure.summary([value for value in values if value is not None])}
        for name, values in sorted(found.items())
    }


def final_loss(record: Record) -> float | None:
    """Eval loss of the final global model, if the script evaluates it."""
    found = [
        line["metrics"]["eval_loss"]
        for lines in record.witnesses.values()
        for line in lines
        if line["kind"] == "evaluated" and line["is_global"] and "eval_loss" in line["metrics"]
    ]
    return float(statistics.mean(found)) if found else None


def grown(storm: Record) -> dict[str, tuple[int, int]]:
    """Descriptors and memory regions that those who lived through the storm hold more than before it."""
    return {
        name: (after.num_fds - before.num_fds, after.num_regions - before.num_regions)
        for name, before in storm.before.items()
        if (after := storm.after.get(name))
    }


def _fault(happening: Happening, began_at: float) -> dict[str, Any]:
    fault = happening.fault
    lasted = (happening.ended_at or happening.began_at) - happening.began_at
    return {
        "kind": fault.kind, "victim": str(fault.victim), "at_seconds": round(happening.began_at - began_at, 3),
        "seconds": round(lasted, 3), "detail": happening.detail, "missed": happening.missed,
    }  # fmt: skip


# ----------------------------------------------------------------------------------------------------------- for people


def render(report: Mapping[str, Any]) -> Group:
    """Tables for a terminal."""
    calm = report.get("calm") or {}
    main = Table(box=None, pad_edge=False, header_style="bold")
    for column, justify in (("", "left"), ("storm", "right"), ("without faults", "right")):
        main.add_column(column, justify=justify)  # type: ignore[arg-type]
    tokens, gaps, calm_gaps = report["tokens"], report["gaps"], calm.get("gaps", {})
    rows = [
        ("tokens merged in the window", _count(report["merged_in_window"]), _count(calm.get("merged_in_window"))),
        ("tokens trained, whole run", _count(tokens["trained"]), ""),
        ("tokens merged, whole run", _count(tokens["merged"]), _count(calm.get("merged"))),
        ("tokens lost with killed processes", _count(tokens["lost"]), ""),
        ("... overwritten / voided / held", " / ".join(_count(tokens[name]) for name in _PLACES[3:]), ""),
        ("goodput", _percent(report.get("goodput")), ""),
        ("... of what the faults leave", _percent(report.get("goodput_of_what_faults_leave")), ""),
        ("learner-seconds that the faults leave", _percent(report["share_left_by_faults"]), ""),
        ("between merges: median / p99 / longest", _three(gaps), _three(calm_gaps)),
        ("eval loss of the global model", _number(report["eval_loss"], 4), _number(calm.get("eval_loss"), 4)),
        ("share of the processor cores", _percent(report["cpu_share"]), _percent(calm.get("cpu_share"))),
    ]
    for row in rows:
        main.add_row(*row)
    parts: list[Any] = [main, Text()]
    parts += [_detection_table(report["detection"]), Text(), _rejoin_table(report["rejoin"])]
    if returns := report["first_merge_after_syncer"]:
        parts.append(Text("first merge after the syncer was back: " + ", ".join(_seconds(value) for value in returns)))
    counts = f"{len(report['faults'])} faults, {sum(fault['missed'] for fault in report['faults'])} of them hit nobody"
    parts.append(Text(counts))
    problems = report["problems"]
    parts += [Text(f"NOT GOOD: {text}", style="red") for text in problems]
    if not problems:
        parts.append(Text("Every token is accounted for; nothing was left behind.", style="green"))
    return Group(*parts)


def _detection_table(detection: Mapping[str, Mapping[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("the syncer noticed", "faults", "noticed", "median", "longest"):
        table.add_column(column, justify="left" if column == "the syncer noticed" else "right")
    for name, numbers in detection.items():
        table.add_row(
            name, str(numbers["faults"]), str(numbers["count"]), _seconds(numbers["median"]), _seconds(numbers["max"])
        )
    return table


def _rejoin_table(rejoin: Mapping[str, Mapping[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("a killed learner's way back", "restarts", "median", "longest"):
        table.add_column(column, justify="left" if "way" in column else "right")
    for name, numbers in rejoin.items():
        shown = name.replace("_", " ")
        table.add_row(shown, str(numbers["count"]), _seconds(numbers["median"]), _seconds(numbers["max"]))
    return table


def confidence(values: Iterable[float]) -> tuple[float, float]:
    """Mean and half-width of its 95 % confidence interval (Student's t)."""
    found = list(values)
    if len(found) < 2:
        return (found[0] if found else math.nan), math.nan
    half = _T_95.get(len(found) - 1, 1.96) * statistics.stdev(found) / math.sqrt(len(found))
    return statistics.mean(found), half


def _count(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"


def _three(numbers: Mapping[str, Any]) -> str:
    return " / ".join(_seconds(numbers.get(name)) for name in ("median", "p99", "max")) if numbers else ""
