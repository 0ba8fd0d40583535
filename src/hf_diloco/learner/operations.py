"""What is done to the model at a step boundary: planned by rank 0 of a learner, executed by all its ranks alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum

from torch import Tensor

from hf_diloco.learner.snapshots import Snapshot


class Kind(IntEnum):
    """Of an operation. Those with a payload get it before they are executed: the fragment's flat fp32 vector."""

    WELCOME = 1  # take over what the syncer told rank 0
    SUPPLY = 2  # read everything: the syncer has no parameters yet
    ADD = 3  # payload: the correction to add to the live value
    WRITE = 4  # payload: the published value, which replaces the live one
    MIX = 5  # payload: the published value, to be mixed with the live one
    CUT = 6  # read the fragment, for an update
    START_OVER = 7  # write the published values of all fragments
    KEEP_UP = 8  # the syncer's clock, as it is said on a new link

    @property
    def has_payload(self) -> bool:
        """Whether it comes with one."""
        return self in (Kind.ADD, Kind.WRITE, Kind.MIX)

    @property
    def concerns_all(self) -> bool:
        """Whether it concerns all fragments; else it is about one."""
        return not self.has_payload and self is not Kind.CUT


class Word(IntEnum):
    """What rank 0 says of the loop that all ranks are in."""

    GO_ON = 0
    STOP = 1  # training: it ends with this step
    DONE = 2  # waiting: it is over
    GIVE_UP = 3  # waiting: it is over, in vain
    FAILED = 4  # an error that rank 0 raises


@dataclass(eq=False)
class Operation:
    """One operation; the fields after ``outer_step`` are not the same on all ranks."""

    kind: Kind
    fragment_index: int = 0
    outer_step: int = 0  # of the version that it brings, or of the clock
    payload: Tensor | None = None
    done: Callable[[Snapshot | None], None] | None = None  # rank 0: settles accounts when it has been executed


@dataclass
class Plan:
    """A step boundary: as one rank sees it, or as all ranks agreed on it."""

    word: Word = Word.GO_ON
    save_wanted: int | None = None  # outer step of a checkpoint of the whole run
    operations: list[Operation] = field(default_factory=list)
    steps: int = 0  # inner steps since the last boundary; rank 0 says it
    tokens: int = 0  # trained in them
    interrupted: bool = False  # told to stop
