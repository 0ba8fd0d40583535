"""What the world of the protocol tests knows of its learners, and of each merge."""

from dataclasses import dataclass, field

from hf_diloco.core import events as ev
from hf_diloco.core.messages import RoundId, Version


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
    first_unmerged: int = 0
    shipped: Shipped | None = None


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
    started: bool = False
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


@dataclass(frozen=True)
class Merge:
    """One merge, for the assertions of the traces."""

    time: float
    action: ev.MergeRound
    phase: str

    @property
    def learner_ids(self) -> set[int]:
        return {learner_id for learner_id, _ in self.action.participants}
