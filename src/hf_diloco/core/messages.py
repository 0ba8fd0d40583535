"""What learners and syncer tell each other.

Each message is a frozen dataclass; :mod:`hf_diloco.core.message_json` turns it into JSON-able values and back. Some
messages travel with a payload (one uint8 tensor); their docstring says what is in it. Within a direction, messages
with a payload (an empty one counts) keep their order; those without may overtake them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

WIRE_FORMATS = ("fp32", "bf16", "int8", "int4")  # of updates and publications; core.codec knows them
STATE_PIECE_BYTES = 4 << 20  # most that one StatePiece carries: what a donor copies at one step boundary


class Version(NamedTuple):
    """A value of one fragment: which syncer incarnation made it, at which outer step."""

    incarnation: int
    outer_step: int


class RoundId(NamedTuple):
    """One round: the syncer incarnation that opened it and its number there."""

    incarnation: int
    number: int


# ---------------------------------------------------------------------------------------------- learner -> syncer


@dataclass(frozen=True, kw_only=True)
class Hello:
    """The first message on every new link."""

    incarnation: str  # one per learner process and run; a lost link keeps it
    host: str  # where the learner runs, and its pid, for messages to people
    shapes: tuple[tuple[str, tuple[int, ...]], ...]  # canonical name and shape of each trainable tensor
    averaged: tuple[str, ...]  # those of them that are merged by plain average (embeddings)
    constants_digest: str  # frozen parameters and persistent buffers, hashed
    total_steps: int | None  # what this learner's training script says; None: whatever the syncer says
    steps_from_epochs: bool = (
        False  # ... worked out from epochs and its own shard: good for the first learner, no demand
    )
    num_shards: int | None  # over how many shards its data set is split; None: not split by us
    library_version: str  # hf_diloco.__version__
    global_step: int  # g of this learner in this run; 0 for a new process
    held: tuple[Version, ...]  # version of each fragment it holds; empty for a new process
    shard: int | None = None  # it reads or would begin with; None: its shard is its own affair


@dataclass(frozen=True, kw_only=True)
class SupplyFragment:
    """One fragment's initial value. Payload: fp32."""

    fragment_index: int


@dataclass(frozen=True, kw_only=True)
class SupplyConstant:
    """One frozen parameter or persistent buffer. Payload: its bytes."""

    name: str
    dtype: str  # as in "float32"
    shape: tuple[int, ...]
    is_running: bool = False  # a running statistic of a batch norm: this value will not do for the final model


@dataclass(frozen=True, kw_only=True)
class Statistic:
    """One buffer that training has changed, as it is when a learner ends or takes leave. Payload: its bytes."""

    name: str
    dtype: str  # as in "float32"
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class SupplyFile:
    """One file that belongs beside the weights: config.json, tokenizer files. Payload: its bytes."""

    name: str


@dataclass(frozen=True, kw_only=True)
class Supplied:
    """All initial values, constants and files have been sent. Payload: empty (it keeps its place in the order)."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a learner is; sent at most some tens of times a second."""

    global_step: int  # g
    steps: int  # inner steps done by this process
    tokens: int  # tokens trained by this process
    step_seconds: float  # its usual time for an inner step
    loss: float | None = None  # the last training loss it logged
    finished: bool = False  # it has reached total_steps, or was told to stop, and waits for the final values
    data_digest: tuple[int, ...] = ()  # a few hashes of the examples it has read (core.data_digest), if there is news
    tokens_overwritten: int = 0  # tokens of local progress that were overwritten, mean over the fragments


@dataclass(frozen=True, kw_only=True)
class WantShard:
    """The learner has read this shard of the training set to its end: which is next?"""

    shard: int
    num_passes: int  # that this process has ended, this one too: the answer has the same


@dataclass(frozen=True, kw_only=True)
class Update:
    """A learner's answer to :class:`Ask`. Payload: the encoded ``anchor - value``; empty if ``steps`` is 0."""

    round: RoundId
    fragment_index: int
    update_id: str  # learner incarnation and round: the same update, sent again, has the same id
    steps: int  # inner steps in this update: those not merged before
    tokens: int
    anchor: Version  # what the difference was taken from
    wire_format: str
    held_seconds: float  # from the arrival of the ask to the step boundary that answered it


@dataclass(frozen=True, kw_only=True)
class Applied:
    """A publication is in the learner's model."""

    fragment_index: int
    version: Version
    digest: str  # computed by the learner, from what it holds


@dataclass(frozen=True, kw_only=True)
class NeedFull:
    """A publication did not fit what the learner holds (or its digest was wrong): send the full value."""

    fragment_index: int


@dataclass(frozen=True, kw_only=True)
class HandedBack:
    """The published value that the learner holds, for a syncer that came back. Payload: fp32."""

    fragment_index: int
    version: Version


@dataclass(frozen=True, kw_only=True)
class SavedCheckpoint:
    """The learner has saved its own checkpoint, as :class:`SaveCheckpoint` wanted."""

    outer_step: int  # of the SaveCheckpoint
    path: str  # on the learner's machine


@dataclass(frozen=True, kw_only=True)
class Leaving:
    """The learner trains no more and is about to leave: merge what it has, soon."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class Goodbye:
    """The learner takes leave. Payload: empty (it keeps its place in the order)."""

    reason: str
    for_good: bool = True  # False: it is expected to be started again, so the run does not end without it


@dataclass(frozen=True, kw_only=True)
class StateTaken:
    """What a learner that begins in the middle of the run has for its inner optimizer."""

    source: str  # "own" (Trainer's checkpoint), "peer", or "warm-up" (nothing: its learning rate is warmed up instead)
    reason: str  # why it is not a better one; empty if it is the best
    donor_ids: tuple[int, ...] = ()  # whose pieces it took
    num_pieces: int = 0
    size_bytes: int = 0
    waited_seconds: float = 0.0


# ------------------------------------------------------------------------- learner <-> learner, through the syncer
# Optimizer state on its way from a donor to a recipient. The syncer chooses the donor and passes these on.


@dataclass(frozen=True, kw_only=True)
class WantState:
    """Recipient: offer me the state of your optimizer."""

    recipient_id: int


@dataclass(frozen=True, kw_only=True)
class StateOffer:
    """Donor: this is what I have."""

    donor_id: int
    recipient_id: int
    fingerprint: str  # of optimizer class, names, shapes, keys and dtypes: the recipient's must be the same
    without: tuple[str, ...]  # parameters that have no state at the donor: they have never had a gradient


@dataclass(frozen=True, kw_only=True)
class WantPiece:
    """Recipient: send me this piece. One at a time."""

    donor_id: int
    recipient_id: int
    piece_index: int


@dataclass(frozen=True, kw_only=True)
class StatePiece:
    """Donor: here it is, as of my last step boundary. Payload: its bytes."""

    donor_id: int
    recipient_id: int
    piece_index: int
    digest: str  # of the payload


@dataclass(frozen=True, kw_only=True)
class NoState:
    """It will not come from this donor (said by either of the two), or from nobody (said by the syncer)."""

    donor_id: int | None
    recipient_id: int
    reason: str


# ---------------------------------------------------------------------------------------------- syncer -> learner


@dataclass(frozen=True, kw_only=True)
class Welcome:
    """The learner is let in."""

    incarnation: int  # of the syncer
    num_fragments: int  # P
    sync_every: int  # H
    outer_step: int  # t
    total_steps: int
    on_arrival: str  # "carry" or "overwrite"
    local_mix: float  # alpha
    wire_format: str
    averaged: tuple[str, ...]
    expected_learners: int  # the run starts when so many hold the initial parameters ...
    start_timeout_seconds: float  # ... or so long after the first does


@dataclass(frozen=True, kw_only=True)
class SendValues:
    """The syncer has no parameters yet: send yours."""


@dataclass(frozen=True, kw_only=True)
class Refused:
    """The learner is not let in."""

    reason: str  # what differs, and what to do


@dataclass(frozen=True, kw_only=True)
class Start:
    """Enough learners are healed: train."""

    outer_step: int  # t by now


@dataclass(frozen=True, kw_only=True)
class LeaseShard:
    """Read this shard of the training set: nobody else does. The answer to WantShard, and to a Hello with a shard."""

    shard: int
    num_passes: int  # as in WantShard; 0 in the answer to a Hello


@dataclass(frozen=True, kw_only=True)
class Ask:
    """Send your update of this fragment at your next step boundary."""

    round: RoundId
    fragment_index: int


@dataclass(frozen=True, kw_only=True)
class HandBack:
    """The syncer died and came back with an older value than you hold: send yours."""

    fragment_index: int


@dataclass(frozen=True, kw_only=True)
class SaveCheckpoint:
    """Save your own checkpoint at your next step boundary: part of a checkpoint of the whole run."""

    outer_step: int


@dataclass(frozen=True, kw_only=True)
class UpdateRefused:
    """Your update must never be merged."""

    round: RoundId
    fragment_index: int
    reason: str
    start_over: bool  # too many in a row: give up your local progress, train on from the global parameters


@dataclass(frozen=True, kw_only=True)
class RoundClosed:
    """The round takes no more updates: an unanswered ask is void, an update that came late was not merged."""

    round: RoundId
    fragment_index: int


@dataclass(frozen=True, kw_only=True)
class Publication:
    """A new value of one fragment. Payload: encoded difference to ``base``, or the full fp32 value."""

    fragment_index: int
    version: Version
    base: Version | None  # None: the payload is the full value
    wire_format: str
    digest: str  # of the value after applying
    merged_updates: tuple[tuple[int, str], ...]  # by learner_id: its last update merged into this fragment
    closed_round: RoundId | None  # newest closed round of this fragment: an older unmerged update never will be
    num_participants: int = 0  # learners in the syncer's last merge


@dataclass(frozen=True, kw_only=True)
class Stop:
    """Stop training at your next step boundary and wait for the final values."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class Released:
    """The final values are on disk and you hold them: done."""

    outer_step: int


@dataclass(frozen=True, kw_only=True)
class Notice:
    """Something the user of this learner should read; shown as a warning."""

    text: str


StateMessage = WantState | StateOffer | WantPiece | StatePiece | NoState
Message = (
    Hello | SupplyFragment | SupplyConstant | SupplyFile | Supplied | Progress | Update | Applied | NeedFull
    | HandedBack | SavedCheckpoint | Leaving | Goodbye | Statistic
    | Welcome | SendValues | Refused | Start | Ask | HandBack | SaveCheckpoint | UpdateRefused
    | RoundClosed | Publication | Stop | Released | Notice
    | StateTaken | StateMessage | WantShard | LeaseShard
)  # fmt: skip
