"""What a learner keeps of each fragment."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from hf_diloco.core.fragments import Fragment
from hf_diloco.core.messages import Ask, RoundId, Version
from hf_diloco.learner.snapshots import Snapshot


@dataclass(frozen=True)
class OpenAsk:
    """An ask that waits for the next step boundary."""

    ask: Ask
    arrived_at: float


@dataclass(frozen=True)
class Cut:
    """What the training thread took at a step boundary, to be encoded and sent."""

    ask: Ask
    snapshot: Snapshot
    anchor: Tensor
    anchor_version: Version
    steps: int
    tokens: int
    held_seconds: float
    start: int  # which start of the fragment it was cut from


@dataclass(frozen=True)
class Shipped:
    """An update that was sent and may yet be merged; kept to be sent again, and to be taken out when it was."""

    update_id: str
    round: RoundId
    payload: Tensor  # encoded anchor - value
    wire_format: str
    steps: int
    tokens: int
    anchor: Version


@dataclass(frozen=True)
class Prepared:
    """A publication, decoded and checked, to be applied at the next step boundary."""

    version: Version
    published: Tensor  # the new anchor
    correction: Tensor | None  # to be added to the live value; None: the live value is overwritten
    merged: Shipped | None  # our update that is part of it
    start_over: bool = False  # the anchor again: the syncer took none of our updates


@dataclass
class LocalFragment:
    """One fragment at the learner; guarded by the exchange's lock."""

    fragment: Fragment
    anchor: Tensor | None = None  # flat fp32: the published value it last applied
    version: Version | None = None  # of the anchor
    cutting: bool = False  # an update was cut and is being encoded: as good as shipped
    shipped: Shipped | None = None
    ready: Prepared | None = None
    start: int = 0  # how often it has started over
    asked_at: int | None = None  # the learner's step when it was first asked for on this link since its last merge
    accounted_steps: int = field(default=0)  # steps and tokens merged, or given up, so far
    accounted_tokens: int = field(default=0)
