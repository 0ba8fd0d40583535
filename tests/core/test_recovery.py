"""Which values a run goes on from after its syncer died, rule by rule."""

import pytest

from hf_diloco.core import events as ev
from hf_diloco.core.messages import RoundId, Version
from hf_diloco.core.recovery import REPORT_SECONDS, Recovery

pytestmark = pytest.mark.fast

OLD, MID, NEW = Version(1, 4), Version(1, 8), Version(1, 12)


class Restarted:
    """A recovery and a clock, with the events in short form. The checkpoint holds two fragments of version OLD."""

    def __init__(self, known=(0, 1), vouched=({MID, NEW}, {MID, NEW})):
        self.recovery, self.now, self.actions = Recovery([OLD, OLD], known, vouched), 0.0, []
        self.tell(ev.Tick())

    def tell(self, event):
        self.actions = self.recovery.handle(event, self.now)
        assert isinstance(self.actions[-1], ev.WaitUntil)
        return self

    def join(self, who, *held):
        return self.tell(ev.Joined(learner_id=who, incarnation="a", global_step=20, held=held))

    def lose(self, who, for_good=False):
        return self.tell(ev.Left(learner_id=who, for_good=for_good))

    def hand_back(self, who, fragment, version, refused=False):
        return self.tell(ev.HandedBack(learner_id=who, fragment_index=fragment, version=version, refused=refused))

    def tick(self, time):
        self.now = time
        return self.tell(ev.Tick())

    @property
    def asked(self):
        return [
            (action.learner_id, action.fragment_index, action.version)
            for action in self.actions
            if isinstance(action, ev.RequestHandBack)
        ]

    @property
    def ended(self):
        return any(isinstance(action, ev.EndRecovery) for action in self.actions)

    @property
    def wakes_at(self):
        return self.actions[-1].time

    @property
    def held(self):
        return self.recovery.held


def test_it_ends_when_all_known_learners_have_reported():
    world = Restarted()
    assert not world.join(0, OLD, OLD).ended
    assert world.join(1, OLD, OLD).ended
    assert world.held == [OLD, OLD]


def test_strangers_are_not_waited_for_but_heard():
    world = Restarted(known=(0,))
    assert world.join(7, MID, OLD).asked == [(7, 0, MID)]
    assert not world.join(0, OLD, OLD).ended  # everybody has reported, but a newer value is on its way
    assert world.hand_back(7, 0, MID).ended
    assert world.held == [MID, OLD]


def test_a_learner_that_took_leave_is_not_waited_for():
    assert not Restarted().join(0, OLD, OLD).ended
    assert Restarted().join(0, OLD, OLD).lose(1, for_good=True).ended
    assert not Restarted().join(0, OLD, OLD).lose(1).ended


def test_nobody_is_known():
    recovery = Recovery([OLD], (), [set()])
    actions = recovery.handle(ev.Tick(), 0.0)
    assert actions == [ev.EndRecovery(), ev.WaitUntil(time=None)]


def test_without_any_report_it_waits_for_ever():
    world = Restarted()
    assert world.wakes_at is None
    assert not world.tick(1000.0).ended


def test_the_others_have_five_seconds_from_the_first_report_on():
    world = Restarted(known=(0, 1, 2)).tick(100.0).join(0, OLD, OLD)
    assert world.wakes_at == 100.0 + REPORT_SECONDS == 105.0
    world.now = 103.0
    assert not world.join(1, OLD, OLD).ended  # a second report gives no new time
    assert world.wakes_at == 105.0
    assert not world.tick(104.9).ended
    assert world.tick(105.0).ended
    assert world.wakes_at is None


def test_the_newest_value_of_each_fragment_is_handed_back():
    world = Restarted().join(0, MID, NEW)
    assert world.asked == [(0, 0, MID), (0, 1, NEW)]
    assert world.join(1, MID, MID).asked == []  # no newer than what is on its way
    assert not world.hand_back(0, 0, MID).ended
    assert world.hand_back(0, 1, NEW).ended
    assert world.held == [MID, NEW]


def test_a_newer_report_while_one_is_asked_for():
    world = Restarted().join(0, MID, OLD)
    assert world.join(1, NEW, OLD).asked == [(1, 0, NEW)]
    assert not world.hand_back(0, 0, MID).ended  # not the one that is waited for
    assert world.held == [MID, OLD]  # but newer than what there was: the holder of the other one may yet die
    assert world.hand_back(1, 0, NEW).ended
    assert world.held == [NEW, OLD]


def test_a_newer_report_after_a_value_was_handed_back():
    world = Restarted().join(0, MID, OLD).hand_back(0, 0, MID)
    assert world.join(1, NEW, OLD).asked == [(1, 0, NEW)]
    assert world.hand_back(1, 0, NEW).ended
    assert world.held == [NEW, OLD]


def test_it_does_not_end_before_what_was_asked_for_has_come():
    world = Restarted().join(0, MID, OLD)
    assert not world.tick(60.0).ended
    assert world.hand_back(0, 0, MID).ended


def test_a_holder_that_dies_before_it_hands_back():
    world = Restarted(known=(0, 1, 2)).join(0, NEW, OLD).join(1, MID, OLD)
    assert world.asked == []
    assert world.lose(0).asked == [(1, 0, MID)]  # the next best
    assert world.hand_back(1, 0, MID).held == [MID, OLD]
    assert world.join(0, NEW, OLD).asked == [(0, 0, NEW)]  # it is back in time
    world.hand_back(0, 0, NEW)
    assert world.join(2, OLD, OLD).ended
    assert world.held == [NEW, OLD]


def test_the_only_holder_dies():
    world = Restarted().join(1, OLD, OLD).join(0, NEW, OLD)
    assert not world.ended
    assert not world.lose(0).ended  # perhaps only its link was lost
    assert world.tick(REPORT_SECONDS).ended
    assert world.held == [OLD, OLD]


def test_the_only_holder_loses_its_link_for_a_moment():
    world = Restarted().join(1, OLD, OLD).join(0, NEW, OLD).lose(0)
    world.now = REPORT_SECONDS - 0.1
    assert world.join(0, NEW, OLD).asked == [(0, 0, NEW)]
    world.now = REPORT_SECONDS + 0.1
    assert world.hand_back(0, 0, NEW).ended
    assert world.held == [NEW, OLD]


def test_a_run_that_had_ended_is_not_waited_for_when_nobody_comes():
    recovery = Recovery([OLD], (0, 1), [set()], ended=True)
    assert recovery.handle(ev.Tick(), 10.0) == [ev.WaitUntil(time=10.0 + REPORT_SECONDS)]
    assert recovery.handle(ev.Tick(), 10.0 + REPORT_SECONDS)[0] == ev.EndRecovery()


def test_a_holder_whose_link_was_lost_is_asked_again():
    world = Restarted().join(0, NEW, OLD)
    assert world.join(0, NEW, OLD).asked == [(0, 0, NEW)]  # the loss of its old link was not even noticed
    world.lose(0)
    assert world.join(0, NEW, OLD).asked == [(0, 0, NEW)]


def test_a_holder_that_comes_back_as_a_new_process_holds_nothing():
    world = Restarted().join(0, NEW, OLD).lose(0).join(0)
    assert world.asked == []
    assert world.join(1, OLD, OLD).ended
    assert world.held == [OLD, OLD]


def test_what_is_refused_is_not_asked_for_again_at_the_same_learner():
    world = Restarted().join(0, NEW, OLD)
    assert world.hand_back(0, 0, NEW, refused=True).asked == []
    assert world.join(0, NEW, OLD).asked == []
    assert world.join(1, NEW, OLD).asked == [(1, 0, NEW)]
    assert world.hand_back(1, 0, NEW).ended
    assert world.held == [NEW, OLD]


def test_after_a_refusal_another_one_is_asked():
    world = Restarted(known=(0, 1, 2)).join(0, NEW, OLD).join(1, MID, OLD)
    assert world.hand_back(0, 0, NEW, refused=True).asked == [(1, 0, MID)]


def test_versions_that_the_tape_does_not_know_are_not_taken():
    world = Restarted(vouched=({MID}, {MID}))
    assert world.join(0, NEW, MID).asked == [(0, 1, MID)]
    world.hand_back(0, 1, MID)
    assert world.join(1, Version(9, 9), OLD).ended
    assert world.held == [OLD, MID]


def test_versions_order_by_incarnation_first():
    stamped = Version(2, 4)  # an old value that the syncer in between went on from
    world = Restarted(vouched=({MID, NEW, stamped}, set()))
    world.join(0, NEW, OLD)
    assert world.join(1, stamped, OLD).asked == [(1, 0, stamped)]


def test_a_report_of_another_layout_hands_nothing_back():
    world = Restarted().join(0, NEW)
    assert world.asked == []
    assert world.join(1).ended


def test_what_is_refused_or_older_or_nowhere_changes_nothing():
    world = Restarted().join(0, NEW, OLD)
    for who, fragment, version in ((1, 0, NEW), (0, 1, MID), (0, 0, MID)):  # not asked for, nor good
        assert not world.hand_back(who, fragment, version, refused=True).ended
    assert world.held == [OLD, OLD]
    assert world.hand_back(0, 0, NEW).held == [NEW, OLD]
    assert world.hand_back(0, 0, MID).held == [NEW, OLD]
    assert world.hand_back(0, 7, NEW).held == [NEW, OLD]


def test_an_older_value_is_kept_when_the_holder_of_the_newer_one_dies():
    world = Restarted().join(0, MID, OLD).join(1, NEW, OLD).hand_back(0, 0, MID).lose(0).lose(1)
    assert world.tick(REPORT_SECONDS).ended
    assert world.held == [MID, OLD]


def test_late_reports_change_nothing():
    world = Restarted().join(0, OLD, OLD).tick(REPORT_SECONDS)
    assert world.ended
    for event in (ev.Joined(learner_id=1, incarnation="a", global_step=30, held=(NEW, NEW)), ev.Tick()):
        world.tell(event)
        assert world.actions == [ev.WaitUntil(time=None)]
    assert world.hand_back(1, 0, NEW).held == [OLD, OLD]


def test_events_of_rounds_change_nothing():
    world = Restarted()
    answer = ev.Answered(
        learner_id=0, round=RoundId(1, 1), fragment_index=0, update_id="u", steps=1, weight=1.0, anchor=OLD,
        held_seconds=0.0,
    )  # fmt: skip
    for event in (answer, ev.ValuesSupplied(), ev.Saved(), ev.Merged(round=RoundId(1, 1))):
        assert world.tell(event).actions == [ev.WaitUntil(time=None)]


def report(who, steps, finished=False):
    return ev.Reported(learner_id=who, global_step=steps, steps=steps, step_seconds=1.0, finished=finished)


def test_the_rounds_that_follow_are_told_what_linked_learners_have_said():
    world = Restarted().join(0, OLD, OLD)
    for event in (report(0, 5), ev.Leaving(learner_id=0), report(1, 7)):  # learner 1 is not linked
        world.tell(event)
    assert [type(event) for event in world.recovery.said()] == [ev.Joined, ev.Reported, ev.Leaving]
    world.lose(0)
    assert world.recovery.said() == []


def test_what_a_dead_process_had_said_is_not_taken_for_the_new_one():
    """Else its 500 steps would stand for the new process too, whose first 500 would not count as progress."""
    world = Restarted().join(0, OLD, OLD).tell(report(0, 500, finished=True)).join(0).tell(report(0, 1))
    world.join(1, OLD, OLD)
    assert world.ended
    assert [getattr(event, "steps", None) for event in world.recovery.said()] == [None, None, 1]
