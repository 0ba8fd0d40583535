"""Who gives optimizer state to whom. What they say to each other is passed on and not kept."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from hf_diloco.core import messages as ms
from hf_diloco.core.members import Member
from hf_diloco.errors import MessageError
from hf_diloco.links.base import SyncerLinks

logger = logging.getLogger(__name__)

_RETURN_SECONDS = 3.0  # a donor whose link was lost may be back within moments; one that died is not waited for


@dataclass
class _Donation:
    """One recipient that waits before its first step."""

    donor_id: int | None = None
    declined: set[int] = field(default_factory=set)  # donors that cannot, or whose state does not fit


class Donations:
    """Chooses donors and relays. At most one piece is under way for each recipient: it asks for the next.

    Args:
        members: the run's learners, as ``Rounds`` knows them at the moment.
        links: to send on.
    """

    def __init__(self, members: Callable[[], Mapping[int, Member]], links: SyncerLinks) -> None:
        self._members, self._links = members, links
        self._donations: dict[int, _Donation] = {}  # by recipient

    def take(self, learner_id: int, message: ms.StateMessage, payload: Tensor | None, now: float) -> None:
        """Handle a message about optimizer state.

        Raises:
            MessageError: it speaks for another learner, or a piece is too large.
        """
        if isinstance(message, ms.WantState):
            _require(message.recipient_id == learner_id, message, learner_id)
            donation = self._donations.setdefault(learner_id, _Donation())
            if donation.donor_id is None or not self._can_give(donation.donor_id, learner_id, donation, now):
                self._choose(learner_id, now)
            else:
                self._links.send([donation.donor_id], message)
        elif isinstance(message, ms.WantPiece):
            _require(message.recipient_id == learner_id, message, learner_id)
            if self._is_pair(message.donor_id, message.recipient_id):
                self._links.send([message.donor_id], message)
        elif isinstance(message, ms.StateOffer | ms.StatePiece):
            _require(message.donor_id == learner_id, message, learner_id)
            if payload is not None and payload.numel() > ms.STATE_PIECE_BYTES:
                raise MessageError(f"a piece of optimizer state has {payload.numel()} bytes")
            if self._is_pair(message.donor_id, message.recipient_id):
                self._links.send([message.recipient_id], message, payload)
        else:
            _require(learner_id in (message.donor_id, message.recipient_id), message, learner_id)
            self._on_no_state(message, now)

    def left(self, learner_id: int, now: float) -> None:
        """A learner is away: its recipients get another donor, which goes on where it stopped."""
        for recipient_id, donation in list(self._donations.items()):
            if donation.donor_id == learner_id:
                self._choose(recipient_id, now)
        member = self._members().get(learner_id)
        if member is None or member.left:
            self._donations.pop(learner_id, None)

    def end(self, recipient_id: int) -> None:
        """This learner has what it wanted, or wants it no more."""
        self._donations.pop(recipient_id, None)

    def _on_no_state(self, message: ms.NoState, now: float) -> None:
        if message.donor_id is None or not self._is_pair(message.donor_id, message.recipient_id):
            return
        donation = self._donations[message.recipient_id]
        donation.declined.add(message.donor_id)
        logger.info(
            "[syncer] learner %d gives no optimizer state to learner %d: %s",
            message.donor_id, message.recipient_id, message.reason,
        )  # fmt: skip
        self._choose(message.recipient_id, now)

    def _choose(self, recipient_id: int, now: float) -> None:
        donation = self._donations[recipient_id]
        able = [donor_id for donor_id in self._members() if self._can_give(donor_id, recipient_id, donation, now)]
        donation.donor_id = min(able, key=self._burden, default=None)
        if donation.donor_id is not None:
            self._links.send([donation.donor_id], ms.WantState(recipient_id=recipient_id))
        elif not self._may_return(recipient_id, donation, now):
            del self._donations[recipient_id]
            reason = "those who were asked could not give it" if donation.declined else "no healthy peer has any"
            self._links.send([recipient_id], ms.NoState(donor_id=None, recipient_id=recipient_id, reason=reason))

    def _can_give(self, donor_id: int, recipient_id: int, donation: _Donation, now: float) -> bool:
        """Healed, training, and merged since it came: a newcomer itself is no donor."""
        member = self._members().get(donor_id)
        return (
            member is not None
            and donor_id != recipient_id
            and donor_id not in donation.declined
            and member.present(now)
            and not member.finished
            and _was_merged(member)
        )

    def _may_return(self, recipient_id: int, donation: _Donation, now: float) -> bool:
        return any(
            not member.linked
            and not member.left
            and _was_merged(member)
            and now < member.absent_since + _RETURN_SECONDS
            for member in self._members().values()
            if member.learner_id != recipient_id and member.learner_id not in donation.declined
        )

    def _burden(self, donor_id: int) -> tuple[int, float, int]:
        """The one with the fewest recipients first, then the one whose steps are short: a piece takes a step."""
        num_recipients = sum(donation.donor_id == donor_id for donation in self._donations.values())
        return num_recipients, self._members()[donor_id].step_seconds, donor_id

    def _is_pair(self, donor_id: int, recipient_id: int) -> bool:
        donation = self._donations.get(recipient_id)
        return donation is not None and donation.donor_id == donor_id


def _was_merged(member: Member) -> bool:
    """This process of it was: what a restarted syncer knows may be of an earlier one."""
    return any((held.merged_update or "").partition("/")[0] == member.incarnation for held in member.fragments)


def _require(holds: bool, message: ms.Message, learner_id: int) -> None:
    if not holds:
        raise MessageError(f"learner {learner_id} sent a {type(message).__name__} of other learners")
