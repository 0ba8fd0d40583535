"""What the world of the protocol tests knows of its learners, and of each merge."""

from dataclasses import dataclass, field

from hf_diloco.core import events as ev
from hf_diloco.core.messages import RoundId, Version

Value = dict[str, int]  # of each learner process: up to which of its inner steps it is in there


@dataclass(frozen=True, kw_only=True)
class Speed:
    """How fast one learner and its link are; times are drawn between 1 and ``jitter`` times these."""

    step_seconds: float = 1.0
    jitter: float = 1.0
    up_seconds: float = 0.01
    down_seconds: float = 0.01
    link_jitter: float = 1.0


@dataclass
class Shipped:
    """The update of one fragment that may still be merged."""

    update_id: str
    round: RoundId
    first: int
    last: int  # exclusive
    anchor: Version


@dataclass
class Holding:
    """One fragment at one learner."""

    anchor: Version | None = None
    value: Value = field(default_factory=dict)  # of the anchor
    first_unmerged: int = 0
    shipped: Shipped | None = None


@dataclass(frozen=True)
class Publication:
    """What a syncer sends: what is to be done, and the value, or the two between which the sent difference lies."""

    action: ev.Publish
    value: Value
    base: Value | None


@dataclass
class Learner:
    """One learner process (a restarted one is another)."""

    learner_id: int
    number: int
    speed: Speed
    fragments: list[Holding]
    alive: bool = True
    linked: bool = False
    link: int = 0  # number of the current link: what belongs to an older one is lost
    cut_until: float = 0.0  # no link before
    started: bool = False
    leaving: bool = False
    said_on: int = -1  # the link on which it said so
    stopping: bool = False
    finished: bool = False
    released: bool = False
    frozen_until: float = 0.0
    global_step: int = 0
    steps: int = 0
    steps_overwritten: int = 0
    reported_at: float = -1.0
    finished_at: float | None = None
    inbox: list[object] = field(default_factory=list)
    asks: list[tuple[ev.AskUpdates, float]] = field(default_factory=list)
    closed: set[RoundId] = field(default_factory=set)

    @property
    def incarnation(self) -> str:
        return f"{self.learner_id}.{self.number}"

    @property
    def link_is_lost(self) -> bool:
        """Also while the syncer has not noticed."""
        return not (self.alive and self.linked)

    @property
    def waits(self) -> bool:
        """It takes no inner steps any more (or not yet): messages are handled as they come."""
        return not self.started or self.finished or self.leaving

    @property
    def all_merged(self) -> bool:
        return all(holding.first_unmerged == self.steps for holding in self.fragments)


@dataclass(frozen=True)
class Merge:
    """One merge, for the assertions of the traces."""

    time: float
    action: ev.MergeRound
    phase: str

    @property
    def learner_ids(self) -> set[int]:
        return {learner_id for learner_id, _ in self.action.participants}
