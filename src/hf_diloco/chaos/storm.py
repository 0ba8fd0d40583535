"""Drives one run through its faults, and writes down all that is needed to judge it."""

from __future__ import annotations

import os
import resource
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hf_diloco.chaos import census
from hf_diloco.chaos.accounting import read_witness
from hf_diloco.chaos.faults import Fault
from hf_diloco.chaos.inject import Happening, Injector
from hf_diloco.chaos.measure import first_step, with_times
from hf_diloco.chaos.run import ChaosRun, Life
from hf_diloco.errors import DiLoCoError

_POLL_SECONDS = 0.05
_LOOK_SECONDS = 0.5
_SETTLED_SECONDS = 8.0  # after this long all that a start allocates is there
_RECOVERY_SECONDS = 120.0  # for every learner to be merged again after the last fault
_DYING_SECONDS = 10.0  # a launcher whose process was killed ends within this
_STILL_SECONDS = 180.0  # without a merge: the run will not end any more


@dataclass
class Record:
    """One run, with faults or without. Times are of the machine's monotonic clock."""

    num_learners: int
    began_at: float = 0.0  # first inner step
    ended_at: float = 0.0  # the window of the storm is over: no more faults
    happened: list[Happening] = field(default_factory=list)
    lives: list[Life] = field(default_factory=list)
    tape: list[dict[str, Any]] = field(default_factory=list)  # with `at`
    witnesses: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    before: dict[str, census.Holdings] = field(default_factory=dict)  # what those hold that live through it all
    after: dict[str, census.Holdings] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)  # processes after the end
    problems: list[str] = field(default_factory=list)  # that the run itself had
    cpu_share: float = 0.0  # of all cores, from the first start to the last end


class Storm:
    """One run, driven.

    Args:
        run: entered, not started.
        faults: what to do to it.
        seconds: how long after the first inner step the time of faults is over.
        say: told what happens, a line each.
        show: given the syncer's status, several times a second.
    """

    def __init__(
        self,
        run: ChaosRun,
        faults: Sequence[Fault],
        seconds: float,
        *,
        say: Callable[[str], None] = lambda _text: None,
        show: Callable[[dict[str, Any]], None] = lambda _status: None,
    ) -> None:
        self._run, self._seconds, self._say, self._show = run, seconds, say, show
        self._faults = deque(sorted(faults, key=lambda fault: (fault.at_seconds or 0.0, fault.at_step or 0)))
        self._injector = Injector(run)
        self._record = Record(num_learners=run.num_learners)
        self._status: dict[str, Any] = {}
        self._looked_at = 0.0
        self._seen_lives = 0

    def drive(self) -> Record:
        """From the start to the end of the run.

        Raises:
            DiLoCoError: it could not be started.
        """
        record, run = self._record, self._run
        wall_minus_monotonic = time.time() - time.monotonic()
        started_at, cpu_before = time.monotonic(), _cpu_seconds()
        run.start()
        self._wait_for_training()
        try:
            self._blow()
        finally:
            self._injector.end_all()
        record.ended_at = time.monotonic()
        self._recover()
        self._wait_for_the_end()
        record.left = [f"{one.part} of {one.learner_id} (pid {one.pid})" for one in run.left()]
        wall_seconds = time.monotonic() - started_at
        record.cpu_share = (_cpu_seconds() - cpu_before) / wall_seconds / (os.cpu_count() or 1)
        record.happened, record.lives = self._injector.happened, run.lives
        record.tape = with_times(run.tape(), wall_minus_monotonic)
        record.witnesses = self._witnesses()
        record.problems += _bad_ends(run, self._injector.happened)
        return record

    # ------------------------------------------------------------------------------------------------------------ parts

    def _wait_for_training(self) -> None:
        while (began_at := first_step(self._witnesses())) is None:
            self._tick()
            for life in self._run.lives:
                if life.exit_code:
                    raise DiLoCoError(f"{_who(life)} ended before the run began:\n{self._run.tail(life.learner_id)}")
        self._record.began_at = began_at

    def _blow(self) -> None:
        """Do the faults until the time is over, or the run is."""
        began_at = self._record.began_at
        while (seconds := time.monotonic() - began_at) < self._seconds and not self._run.is_over:
            self._tick()
            while self._faults and self._faults[0].is_due(seconds, int(self._status.get("outer_step") or 0)):
                happening = self._injector.begin(self._faults.popleft())
                self._say(f"{seconds:6.1f} s  {happening.fault} ({happening.detail})")
            if not self._record.before and seconds > _SETTLED_SECONDS and not self._injector.happened:
                self._record.before = self._holdings()

    def _recover(self) -> None:
        """Wait until every learner is merged again, then see what those who lived through it hold."""
        run, deadline = self._run, time.monotonic() + _RECOVERY_SECONDS
        settled_at: float | None = None
        num_before = len(run.rounds())
        while not run.is_over and time.monotonic() < deadline:
            self._tick()
            merged = {item["learner_id"] for line in run.rounds()[num_before:] for item in line["participants"]}
            if settled_at is None and len(merged) == run.num_learners:
                settled_at = time.monotonic()
            if settled_at is not None and time.monotonic() > settled_at + _SETTLED_SECONDS:
                self._record.after = self._holdings()
                return
        if not run.is_over:
            text = f"not every learner was merged again within {_RECOVERY_SECONDS:.0f} s of the last fault"
            self._record.problems.append(text)

    def _wait_for_the_end(self) -> None:
        run = self._run
        num_rounds, changed_at = 0, time.monotonic()
        while not (run.is_over and not run.running()):
            self._tick()
            if num_rounds != (num_rounds := len(run.rounds())):
                changed_at = time.monotonic()
            if time.monotonic() > changed_at + _STILL_SECONDS:
                self._record.problems.append(f"the run did not come to its end; {len(run.running())} learners run")
                return

    def _tick(self) -> None:
        self._run.tick()
        for happening in self._injector.tick():
            self._say(f"{time.monotonic() - self._record.began_at:6.1f} s  over: {happening.fault}")
        now = time.monotonic()
        if now >= self._looked_at + _LOOK_SECONDS:
            self._looked_at, self._status = now, self._run.status()
            self._show(self._status)
            for life in self._run.lives[self._seen_lives :]:
                if self._record.began_at:
                    self._say(f"{life.started_at - self._record.began_at:6.1f} s  {_who(life)} is started again")
            self._seen_lives = len(self._run.lives)
        time.sleep(_POLL_SECONDS)

    def _witnesses(self) -> dict[int, list[dict[str, Any]]]:
        return {who: read_witness(self._run.witness(who)) for who in range(self._run.num_learners)}

    def _holdings(self) -> dict[str, census.Holdings]:
        """Of those whose work does not end with a link."""
        return {
            f"{one.part} of {'the syncer' if one.learner_id is None else f'learner {one.learner_id}'}, pid {one.pid}":
            census.holdings(one.pid)
            for one in self._run.processes()
            if one.part not in ("courier", "gateway")
        }  # fmt: skip


def _who(life: Life) -> str:
    return "the syncer" if life.learner_id is None else f"learner {life.learner_id}"


def _bad_ends(run: ChaosRun, happened: Sequence[Happening]) -> list[str]:
    """Processes that failed by themselves: with another exit code than 0, and no fault had killed a part of them."""
    kills = [
        (happening.fault.victim.learner_id, happening.began_at)
        for happening in happened
        if happening.fault.kind in ("kill", "broken_checkpoint")
    ]
    found = []
    for life in run.lives:
        if life.exit_code is None or life.exit_code <= 0 or life.ended_at is None:
            continue
        if not any(who == life.learner_id and 0 <= life.ended_at - at < _DYING_SECONDS for who, at in kills):
            log = run.log(life.learner_id)
            found.append(f"{_who(life)} (pid {life.pid}) ended with exit code {life.exit_code}; see {log}")
    return found


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
