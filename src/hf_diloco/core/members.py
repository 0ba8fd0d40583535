"""What the syncer knows of each learner."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from hf_diloco.core.messages import RoundId, Version
from hf_diloco.core.pace import Average, RoundsConfig

IDLE_SECONDS = 30.0  # no inner step for this long ...
IDLE_STEPS = 10  # ... or for this many of its usual steps, whichever is longer: not waited for


@dataclass
class HeldFragment:
    """What one learner holds of one fragment."""

    version: Version | None = None  # the last one it applied
    in_flight: Version | None = None  # sent to it and not yet acknowledged
    full_needed: bool = False  # the next publication to it must be the full value
    asked_round: RoundId | None = None  # the round it was last asked for, if its answer has not come ...
    asked_at: float = 0.0  # ... and when
    merged_update: str | None = None  # id of its last update that was merged ...
    merged_version: Version | None = None  # ... and the version that this made


@dataclass
class Member:
    """One learner, from its first Hello on."""

    learner_id: int
    incarnation: str
    fragments: list[HeldFragment]
    linked: bool = True
    left: bool = False  # took leave for good
    linked_at: float = 0.0  # when its link was last up anew
    absent_since: float = 0.0  # when it was last seen to go, if not linked
    training: bool = False  # the start gate was opened for it
    stop_sent: bool = False
    finished: bool = False  # waits for the final values
    released: bool = False
    released_at: float = 0.0
    global_step: int = 0
    steps: int = 0
    step_seconds: float = 1.0
    progressed_at: float | None = None  # when it last reported a new inner step
    to_merge: set[int] = field(default_factory=set)  # it is leaving: fragments of which it may hold unmerged steps
    leaving_at: float = math.inf  # when it said so
    return_trip_seconds: Average = field(default_factory=Average)

    @property
    def healed(self) -> bool:
        """It holds some value of every fragment."""
        return None not in [held.version for held in self.fragments]

    def idle_at(self) -> float | None:
        """When it will count as idle if it makes no step before; None if it never will, or never made one."""
        if self.finished or self.to_merge or self.progressed_at is None:
            return None
        return self.progressed_at + max(IDLE_SECONDS, IDLE_STEPS * self.step_seconds)

    def present(self, now: float) -> bool:
        """Linked, healed and making progress (or waiting, at its end or to leave): counted, asked, waited for."""
        if not (self.linked and self.healed and self.training) or self.released:
            return False
        idle_at = self.idle_at()
        return self.finished or bool(self.to_merge) or (idle_at is not None and now < idle_at)

    def hangs(self, now: float) -> bool:
        """Its link is up and it holds a model, but it neither makes steps nor waits at its end or to leave."""
        waits = self.finished or self.to_merge or self.released
        return self.linked and self.healed and not waits and not self.present(now)

    def may_be_asked(self, fragment_index: int) -> bool:
        """It has applied every version of this fragment that merged it."""
        held = self.fragments[fragment_index]
        return held.merged_version is None or (held.version is not None and held.version >= held.merged_version)

    def state(self, now: float) -> str:
        """One word for people: joining, training, idle, finished, absent or left."""
        if self.left:
            return "left"
        if not self.linked:
            return "absent"
        if not (self.healed and self.training):
            return "joining"
        if self.finished:
            return "finished"
        idle_at = self.idle_at()
        return "idle" if idle_at is not None and now >= idle_at else "training"


class Members(dict[int, Member]):
    """All learners that were ever let in, by id."""

    def __init__(self, config: RoundsConfig) -> None:
        super().__init__()
        self._min_quorum, self._timeout = config.min_quorum, config.link_timeout_seconds

    def present(self, now: float) -> list[Member]:
        """Learners that are counted, asked and waited for."""
        return [member for member in self.values() if member.present(now)]

    def pace_setter(self, now: float) -> Member | None:
        """The one with the K-th largest g of those present (the smallest, if they are fewer): that g is the clock."""
        present = sorted(self.present(now), key=lambda member: -member.global_step)
        return present[min(self._min_quorum, len(present)) - 1] if present else None

    def pace_seconds(self, now: float) -> float:
        """Inner step time of the learner that sets the pace."""
        pace_setter = self.pace_setter(now)
        return pace_setter.step_seconds if pace_setter else 1.0

    def may_return(self, now: float) -> set[int]:
        """Learners whose link was lost so lately that the end of the run waits for them."""
        return {
            member.learner_id
            for member in self.values()
            if not member.linked and not member.left and member.training and now < member.absent_since + self._timeout
        }

    def linked(self, learner_ids: set[int]) -> set[int]:
        """Those of them whose link is up."""
        return {learner_id for learner_id in learner_ids if self[learner_id].linked}

    def deadlines(self) -> list[float]:
        """When somebody will be idle, or has been away or released for too long."""
        deadlines = []
        for member in self.values():
            if (idle_at := member.idle_at()) is not None and member.linked:
                deadlines.append(idle_at)
            if not member.linked and not member.left:
                deadlines.append(member.absent_since + self._timeout)
            if member.released and not member.left:
                deadlines.append(member.released_at + self._timeout)
        return deadlines
