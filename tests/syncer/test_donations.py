"""Who may give optimizer state to whom, and that nothing else is passed on."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from hf_diloco.core import messages as ms
from hf_diloco.core.members import HeldFragment, Member
from hf_diloco.errors import MessageError
from hf_diloco.links.base import Received
from hf_diloco.links.in_process import InProcessHub, InProcessLearnerLink
from hf_diloco.syncer.donations import Donations

pytestmark = pytest.mark.fast

NOW = 1000.0
VERSION = ms.Version(1, 5)
EMPTY = torch.empty(0, dtype=torch.uint8)


def member(learner_id: int, **changes: Any) -> Member:
    """Healed, training, merged."""
    fragments = [HeldFragment(version=VERSION, merged_update="a/1.1") for _ in range(2)]
    return dataclasses.replace(Member(learner_id, "a", fragments, training=True, progressed_at=NOW), **changes)


class World:
    """Donations over links in this process; learner 9 is the newcomer."""

    def __init__(self, *members: Member) -> None:
        newcomer = member(9, progressed_at=None, fragments=[HeldFragment(version=VERSION) for _ in range(2)])
        self.members = {one.learner_id: one for one in (*members, newcomer)}
        self.hub = InProcessHub()
        self.hub.open()
        self.links = {learner_id: self.hub.connect(learner_id) for learner_id in self.members}
        self.donations = Donations(lambda: self.members, self.hub)
        for link in self.links.values():
            link.open()
            link.receive(0)
        for _ in self.links:
            self.hub.receive(0)

    def say(self, learner_id: int, message: ms.StateMessage, payload: torch.Tensor | None = None) -> None:
        self.donations.take(learner_id, message, payload, NOW)

    def heard(self, learner_id: int) -> list[ms.Message]:
        return list(messages(self.links[learner_id]))


def messages(link: InProcessLearnerLink) -> Any:
    while event := link.receive(0):
        if isinstance(event, Received):
            yield event.message


WANT = ms.WantState(recipient_id=9)
FITS_NOT = {"unhealed": {"fragments": [HeldFragment(version=VERSION, merged_update="a/1.1"), HeldFragment()]},
            "merged in an earlier life": {"incarnation": "b"},
            "not merged": {"fragments": [HeldFragment(version=VERSION) for _ in range(2)]},
            "not started": {"training": False}, "no step yet": {"progressed_at": None},
            "idle": {"progressed_at": NOW - 100}, "finished": {"finished": True},
            "left": {"linked": False, "left": True},
            "away for long": {"linked": False, "absent_since": NOW - 60}}  # fmt: skip


@pytest.mark.parametrize("changes", FITS_NOT.values(), ids=FITS_NOT)
def test_only_a_healthy_learner_gives(changes: dict[str, Any]) -> None:
    alone = World(member(0, **changes))
    alone.say(9, WANT)
    assert alone.heard(9) == [ms.NoState(donor_id=None, recipient_id=9, reason="no healthy peer has any")]
    assert alone.heard(0) == []
    beside = World(member(0, **changes), member(1))
    beside.say(9, WANT)
    assert beside.heard(1) == [WANT]
    assert beside.heard(9) == beside.heard(0) == []


def test_one_whose_link_was_lost_a_moment_ago_is_hoped_for() -> None:
    world = World(member(0, linked=False, absent_since=NOW - 1))
    world.say(9, WANT)
    assert world.heard(9) == []
    world.members[0].linked = True
    world.say(9, WANT)
    assert world.heard(0) == [WANT]


def test_donors_are_tried_one_after_the_other() -> None:
    world = World(member(0, step_seconds=2.0), member(1, step_seconds=1.0), member(2, step_seconds=3.0))
    world.say(9, WANT)
    assert world.heard(1) == [WANT]
    world.say(1, ms.NoState(donor_id=1, recipient_id=9, reason="it cannot"))
    assert world.heard(0) == [WANT]
    world.members[0].linked = False
    world.donations.left(0, NOW)
    assert world.heard(2) == [WANT]
    world.say(9, ms.NoState(donor_id=2, recipient_id=9, reason="it does not fit"))
    assert world.heard(9) == [
        ms.NoState(donor_id=None, recipient_id=9, reason="those who were asked could not give it")
    ]


def test_recipients_are_spread_over_the_donors() -> None:
    world = World(member(0), member(1), member(8, progressed_at=None))
    for learner_id in (8, 9):
        world.say(learner_id, ms.WantState(recipient_id=learner_id))
    assert [len(world.heard(learner_id)) for learner_id in (0, 1)] == [1, 1]


def test_only_what_a_pair_says_to_each_other_is_passed_on() -> None:
    world = World(member(0), member(1))
    world.say(9, WANT)
    assert world.heard(0) == [WANT]
    offer = ms.StateOffer(donor_id=0, recipient_id=9, fingerprint="f", without=())
    piece = ms.StatePiece(donor_id=0, recipient_id=9, piece_index=0, digest="d")
    want = ms.WantPiece(donor_id=0, recipient_id=9, piece_index=0)
    world.say(0, offer)
    world.say(9, want)
    world.say(0, piece, torch.zeros(8, dtype=torch.uint8))
    assert world.heard(9) == [offer, piece]
    assert world.heard(0) == [want]
    world.say(1, dataclasses.replace(offer, donor_id=1))
    world.say(1, dataclasses.replace(piece, donor_id=1), EMPTY)
    world.say(9, dataclasses.replace(want, donor_id=1))
    world.say(1, ms.NoState(donor_id=1, recipient_id=9, reason=""))
    world.donations.end(9)
    world.say(0, piece, EMPTY)
    world.say(9, want)
    assert world.heard(9) == world.heard(1) == world.heard(0) == []


@pytest.mark.parametrize(
    ("learner_id", "message", "payload"),
    [
        (1, WANT, None),
        (1, ms.StateOffer(donor_id=0, recipient_id=9, fingerprint="f", without=()), None),
        (1, ms.WantPiece(donor_id=0, recipient_id=9, piece_index=0), None),
        (1, ms.StatePiece(donor_id=0, recipient_id=9, piece_index=0, digest="d"), EMPTY),
        (1, ms.NoState(donor_id=0, recipient_id=9, reason=""), None),
        (0, ms.StatePiece(donor_id=0, recipient_id=9, piece_index=0, digest="d"),
         torch.zeros(ms.STATE_PIECE_BYTES + 1, dtype=torch.uint8)),
    ],
)  # fmt: skip
def test_who_speaks_for_others_or_sends_too_much_is_refused(
    learner_id: int, message: ms.StateMessage, payload: torch.Tensor | None
) -> None:
    world = World(member(0), member(1))
    world.say(9, WANT)
    with pytest.raises(MessageError):
        world.donations.take(learner_id, message, payload, NOW)
