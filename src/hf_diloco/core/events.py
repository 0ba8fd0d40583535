"""What the world tells :class:`~hf_diloco.core.rounds.Rounds` (events) and what it wants done (actions)."""

from __future__ import annotations

from dataclasses import dataclass

from hf_diloco.core.messages import RoundId, Version

# ---------------------------------------------------------------------------------------------------------- events


@dataclass(frozen=True, kw_only=True)
class Joined:
    """A learner's link is up and its Hello was accepted; also after every lost link."""

    learner_id: int
    incarnation: str
    global_step: int
    held: tuple[Version, ...]  # version of each fragment it holds; empty for a new process


@dataclass(frozen=True, kw_only=True)
class Left:
    """A learner's link is gone; ``for_good`` if it took leave."""

    learner_id: int
    for_good: bool


@dataclass(frozen=True, kw_only=True)
class ValuesSupplied:
    """The initial values are there, and on disk."""


@dataclass(frozen=True, kw_only=True)
class Reported:
    """A learner's progress report."""

    learner_id: int
    global_step: int
    steps: int  # inner steps of this process so far
    step_seconds: float
    finished: bool


@dataclass(frozen=True, kw_only=True)
class Answered:
    """A learner's answer to an ask arrived, with a payload that is sound unless ``refused``."""

    learner_id: int
    round: RoundId
    fragment_index: int
    update_id: str
    steps: int
    weight: float
    anchor: Version
    held_seconds: float  # from the ask's arrival at the learner to the step boundary that answered it
    refused: bool = False  # the payload must not be merged (not finite, wrong size): an answer without weight


@dataclass(frozen=True, kw_only=True)
class Merged:
    """The merge that was asked for is done; the new value can be published."""

    round: RoundId


@dataclass(frozen=True, kw_only=True)
class Acknowledged:
    """A learner has applied a publication."""

    learner_id: int
    fragment_index: int
    version: Version


@dataclass(frozen=True, kw_only=True)
class FullNeeded:
    """A publication did not fit what the learner holds."""

    learner_id: int
    fragment_index: int


@dataclass(frozen=True, kw_only=True)
class Leaving:
    """A learner trains no more and will leave when what it has is merged."""

    learner_id: int


@dataclass(frozen=True, kw_only=True)
class HandedBack:
    """A learner has sent the published value it was asked for, after a restart of the syncer."""

    learner_id: int
    fragment_index: int
    version: Version
    refused: bool = False  # it is not what the tape says of this version


@dataclass(frozen=True, kw_only=True)
class Saved:
    """The final values are on disk."""


@dataclass(frozen=True, kw_only=True)
class Tick:
    """Nothing happened but the passing of time."""


Event = (
    Joined | Left | ValuesSupplied | Reported | Answered | Merged | Acknowledged | FullNeeded | Leaving | HandedBack
    | Saved | Tick
)  # fmt: skip

# --------------------------------------------------------------------------------------------------------- actions


@dataclass(frozen=True, kw_only=True)
class RequestValues:
    """Ask this learner for the initial values."""

    learner_id: int


@dataclass(frozen=True, kw_only=True)
class StartTraining:
    """The start gate is open for this learner."""

    learner_id: int


@dataclass(frozen=True, kw_only=True)
class AskUpdates:
    """Ask these learners for their update of the fragment."""

    learner_ids: tuple[int, ...]
    round: RoundId
    fragment_index: int


@dataclass(frozen=True, kw_only=True)
class AcceptUpdate:
    """Add the answer that is being handled to the round's sum."""

    learner_id: int
    round: RoundId
    weight: float
    stale_anchor: bool  # its anchor is the published value before the current one


@dataclass(frozen=True, kw_only=True)
class RejectUpdate:
    """The answer that is being handled enters no round."""

    learner_id: int
    round: RoundId
    fragment_index: int
    reason: str
    refused: bool  # as the event said: not for coming late


@dataclass(frozen=True, kw_only=True)
class CloseRound:
    """Tell these learners (asked, not answered) that the round takes no more updates."""

    learner_ids: tuple[int, ...]
    round: RoundId
    fragment_index: int


@dataclass(frozen=True, kw_only=True)
class MergeRound:
    """Take the outer step with the round's sum; then hand back :class:`Merged`."""

    round: RoundId
    fragment_index: int
    version: Version
    participants: tuple[tuple[int, str], ...]  # learner_id and update_id
    num_asked: int
    quorum_seconds: float  # from opening to quorum
    grace_seconds: float  # from quorum to closing


@dataclass(frozen=True, kw_only=True)
class DiscardRound:
    """The round closed without any weight: no outer step, no new version."""

    round: RoundId
    fragment_index: int


@dataclass(frozen=True, kw_only=True)
class Publish:
    """Send the fragment's current value to these learners."""

    learner_ids: tuple[int, ...]
    fragment_index: int
    version: Version
    base: Version | None  # they hold this one, the stored difference fits; None: send the full value
    merged_updates: tuple[tuple[int, str], ...]
    closed_round: RoundId | None


@dataclass(frozen=True, kw_only=True)
class StopTraining:
    """Tell this learner to stop at its next step boundary and wait for the final values."""

    learner_id: int


@dataclass(frozen=True, kw_only=True)
class SaveFinal:
    """Make the published values the global ones and write them to disk; then hand back :class:`Saved`."""


@dataclass(frozen=True, kw_only=True)
class Release:
    """This learner holds the final values: it may go."""

    learner_id: int


@dataclass(frozen=True, kw_only=True)
class RequestHandBack:
    """Ask this learner for the published value that it holds; it is newer than ours."""

    learner_id: int
    fragment_index: int
    version: Version


@dataclass(frozen=True, kw_only=True)
class EndRecovery:
    """No newer value is to be expected: go on from those that there are."""


@dataclass(frozen=True, kw_only=True)
class WaitUntil:
    """Hand in :class:`Tick` at this time if nothing else happens before; always the last action."""

    time: float | None


Action = (
    RequestValues | StartTraining | AskUpdates | AcceptUpdate | RejectUpdate | CloseRound | MergeRound | DiscardRound
    | Publish | StopTraining | SaveFinal | Release | RequestHandBack | EndRecovery | WaitUntil
)  # fmt: skip
