"""How the protocol's state machine behaves, rule by rule."""

import pytest

from hf_diloco.config import SyncerConfig
from hf_diloco.core import events as ev
from hf_diloco.core.messages import RoundId, Version
from hf_diloco.core.rounds import Rounds, grace_seconds

pytestmark = pytest.mark.fast

FIRST = Version(1, 0)


class Syncer:
    """A machine and a clock, with the events in short form."""

    def __init__(self, num_learners=0, **settings):
        settings = {"num_fragments": 2, "sync_every": 4, "expected_learners": max(num_learners, 1), **settings}
        self.rounds, self.now, self.actions = Rounds(SyncerConfig(**settings)), 0.0, []
        if num_learners:
            for who in range(num_learners):
                self.join(who)
            self.tell(ev.ValuesSupplied())
            for who in range(num_learners):
                while not self.rounds.members[who].healed:  # not all fragments are sent at once
                    self.heal(who)
            for who in range(num_learners):
                self.step(who, 1)

    def tell(self, event):
        self.actions = self.rounds.handle(event, self.now)
        return self

    def got(self, *kinds):
        return [action for action in self.actions if isinstance(action, kinds)]

    def tick(self, time):
        self.now = time
        return self.tell(ev.Tick())

    @property
    def wakes_at(self):
        return self.actions[-1].time

    def join(self, who, incarnation="a", held=(), g=0):
        return self.tell(ev.Joined(learner_id=who, incarnation=incarnation, global_step=g, held=held))

    def lose(self, who, for_good=False):
        return self.tell(ev.Left(learner_id=who, for_good=for_good))

    def acknowledge(self, who, fragment=None):
        """Whatever is on its way to it (of one fragment) has been applied."""
        for index, held in enumerate(self.rounds.members[who].fragments):
            if held.in_flight and fragment in (None, index):
                self.tell(ev.Acknowledged(learner_id=who, fragment_index=index, version=held.in_flight))
        return self

    heal = acknowledge

    def step(self, who, g, finished=False, step_seconds=1.0):
        steps = self.rounds.members[who].steps + (not finished)
        return self.tell(
            ev.Reported(learner_id=who, global_step=g, steps=steps, step_seconds=step_seconds, finished=finished)
        )

    def open_round(self, fragment):
        return self.rounds.open_rounds[fragment].id

    def answer(self, who, round, fragment=0, steps=4, anchor=None, update_id=None, **more):
        return self.tell(
            ev.Answered(
                learner_id=who,
                round=round,
                fragment_index=fragment,
                update_id=update_id or f"{who}/{round.number}",
                steps=steps,
                weight=float(steps),
                anchor=anchor or self.rounds.current[fragment],
                held_seconds=0.0,
                **more,
            )
        )

    def merge_all(self):
        """Every merge that is under way is done."""
        for round in list(self.rounds.open_rounds.values()):
            if not round.collecting:
                self.tell(ev.Merged(round=round.id))
        return self


def asked(syncer):
    return [(action.fragment_index, action.learner_ids) for action in syncer.got(ev.AskUpdates)]


def at_first_round(num_learners=2, **settings):
    """Fragment 0 is due (at t = 4), everybody is asked."""
    syncer = Syncer(num_learners, **settings)
    syncer.step(0, 2)
    for who in range(1, num_learners):
        syncer.step(who, 4)
    syncer.step(0, 4)
    round = syncer.rounds.open_rounds[0]
    assert set(round.asked_at) == set(range(num_learners))
    if 1 in syncer.rounds.open_rounds:  # of no interest here
        finish_round(syncer, 1, range(num_learners))
    return syncer, round.id


def finish_round(syncer, fragment, who, steps=4):
    round = syncer.open_round(fragment)
    for learner_id in who:
        syncer.answer(learner_id, round, fragment, steps=steps)
    syncer.merge_all()
    for learner_id in who:
        syncer.acknowledge(learner_id)


# ------------------------------------------------------------------------------------------------------- the start


def test_the_first_learner_is_asked_for_the_values():
    syncer = Syncer().join(3)
    assert syncer.got(ev.RequestValues, ev.Publish) == [ev.RequestValues(learner_id=3)]
    syncer.tell(ev.ValuesSupplied())
    assert [action.base for action in syncer.got(ev.Publish)] == [None, None]


def test_the_next_one_is_asked_if_the_supplier_dies():
    syncer = Syncer().join(3)
    assert not syncer.join(5).got(ev.RequestValues)
    assert syncer.lose(3).got(ev.RequestValues) == [ev.RequestValues(learner_id=5)]
    assert syncer.tell(ev.ValuesSupplied()).got(ev.Publish)


def test_a_supplier_that_comes_back_on_a_new_link_is_asked_again():
    syncer = Syncer().join(3).join(3)
    assert syncer.got(ev.RequestValues) == [ev.RequestValues(learner_id=3)]


def test_nobody_trains_before_the_expected_learners_are_healed():
    syncer = Syncer(expected_learners=2).join(0).tell(ev.ValuesSupplied())
    assert not syncer.heal(0).got(ev.StartTraining)
    assert not syncer.join(1).got(ev.StartTraining)
    assert not syncer.acknowledge(1, 0).got(ev.StartTraining)
    assert [action.learner_id for action in syncer.acknowledge(1, 1).got(ev.StartTraining)] == [0, 1]


def test_the_start_gate_opens_when_the_time_is_up():
    syncer = Syncer(expected_learners=2, start_timeout_seconds=60).join(0)
    syncer.now = 5.0
    syncer.tell(ev.ValuesSupplied()).heal(0)
    assert syncer.wakes_at == 65.0
    assert not syncer.tick(64.9).got(ev.StartTraining)
    assert syncer.tick(65.0).got(ev.StartTraining) == [ev.StartTraining(learner_id=0)]


def test_who_joins_later_trains_as_soon_as_it_is_healed():
    syncer = Syncer(1).join(1)
    assert not syncer.got(ev.StartTraining)
    assert syncer.heal(1).got(ev.StartTraining) == [ev.StartTraining(learner_id=1)]


def test_a_lost_start_is_said_again():
    syncer = Syncer().join(0).tell(ev.ValuesSupplied()).heal(0)
    assert syncer.got(ev.StartTraining)
    syncer.lose(0)
    assert syncer.join(0, held=(FIRST, FIRST)).got(ev.StartTraining) == [ev.StartTraining(learner_id=0)]


def test_a_newcomer_has_few_full_fragments_under_way():
    syncer = Syncer(1, num_fragments=8, sync_every=8).join(1)
    assert len(syncer.got(ev.Publish)) == 4
    syncer.tell(ev.Acknowledged(learner_id=1, fragment_index=0, version=FIRST))
    assert [action.fragment_index for action in syncer.got(ev.Publish)] == [4]


# ------------------------------------------------------------------------------------------------- clock and due rule


@pytest.mark.parametrize(("num_fragments", "sync_every"), [(24, 24), (8, 24), (5, 12), (6, 4), (1, 7)])
def test_fragment_p_is_due_at_floor_p_h_over_p(num_fragments, sync_every):
    syncer = Syncer(1, num_fragments=num_fragments, sync_every=sync_every, max_open_rounds=num_fragments)
    for fragment in list(syncer.rounds.open_rounds):
        finish_round(syncer, fragment, [0])  # due at t = 1
    due = {}
    for g in range(2, 2 * sync_every + 2):
        for action in syncer.step(0, g).got(ev.AskUpdates):
            due.setdefault(g, []).append(action.fragment_index)
            syncer.answer(0, action.round, action.fragment_index).merge_all().acknowledge(0)
    for g in range(sync_every, 2 * sync_every):
        expected = [p for p in range(num_fragments) if p * sync_every // num_fragments == g % sync_every]
        assert sorted(due.get(g, [])) == expected, g


@pytest.mark.parametrize(("min_quorum", "t"), [(1, 9), (2, 6), (3, 3)])
def test_t_is_the_kth_largest_global_step(min_quorum, t):
    syncer = Syncer(3, min_quorum=min_quorum)
    syncer.step(0, 3).step(1, 9).step(2, 6)
    assert syncer.rounds.outer_step == t
    syncer.lose(1)  # the fastest is gone: t must not go back
    assert syncer.rounds.outer_step >= t


def test_k_is_lowered_to_those_present_and_t_never_goes_back():
    syncer = Syncer(2, min_quorum=2)
    syncer.step(0, 9)
    assert syncer.rounds.outer_step == 1
    assert syncer.lose(1).rounds.outer_step == 9
    syncer.join(1, held=(FIRST, FIRST), g=5).step(1, 6)
    assert syncer.rounds.outer_step == 9


def test_t_jumping_over_several_periods_makes_each_fragment_due_once():
    syncer = Syncer(1)
    syncer.step(0, 23)
    assert [(round.fragment_index, round.outer_step) for round in syncer.rounds.open_rounds.values()] == [
        (0, 20),
        (1, 22),
    ]


def test_due_again_while_queued_keeps_its_place_and_takes_the_newer_step():
    syncer = Syncer(1, num_fragments=4, sync_every=4, max_open_rounds=1)
    syncer.step(0, 4)
    first = next(iter(syncer.rounds.open_rounds))
    syncer.step(0, 11)  # the others are queued, each of them twice
    order = [first]
    while len(order) < 5:
        fragment = next(iter(syncer.rounds.open_rounds))
        finish_round(syncer, fragment, [0])
        order.append(next(iter(syncer.rounds.open_rounds)))
    assert order == [1, 2, 3, 0, 1]
    assert [version.outer_step for version in syncer.rounds.current] == [8, 1, 10, 11]


def test_a_fragment_whose_round_is_open_does_not_hold_up_the_others():
    syncer = Syncer(1, num_fragments=2, sync_every=4, max_open_rounds=2)
    syncer.step(0, 4)
    slow = syncer.open_round(0)
    finish_round(syncer, 1, [0])
    for g in (6, 10, 14):
        syncer.step(0, g)
        finish_round(syncer, 1, [0])
        assert syncer.open_round(0) == slow
    assert syncer.rounds.current[1].outer_step == 14


def test_at_most_so_many_rounds_are_open():
    syncer = Syncer(1, num_fragments=6, sync_every=6, max_open_rounds=3, overlap_steps=2)
    syncer.step(0, 6)
    assert len(syncer.rounds.open_rounds) == 2  # tau, as long as nothing is known of the network
    syncer.now += 30.0
    finish_round(syncer, next(iter(syncer.rounds.open_rounds)), [0])
    syncer.step(0, 12)
    assert len(syncer.rounds.open_rounds) == 3


# ------------------------------------------------------------------------------------------------------------ rounds


def test_a_round_closes_at_once_when_all_have_answered():
    syncer, round = at_first_round(2)
    assert not syncer.answer(0, round).got(ev.MergeRound)
    (merge,) = syncer.answer(1, round).got(ev.MergeRound)
    assert merge.participants == ((0, f"0/{round.number}"), (1, f"1/{round.number}"))
    assert (merge.version, merge.num_asked) == (Version(1, 4), 2)
    assert not syncer.got(ev.CloseRound)


def test_a_round_closes_when_the_others_have_left():
    syncer, round = at_first_round(3)
    syncer.answer(0, round)
    assert not syncer.lose(1).got(ev.MergeRound)
    assert syncer.lose(2).got(ev.MergeRound)


def test_the_grace_window_opens_at_the_quorum_and_is_at_least_a_step_and_a_return_trip():
    syncer, round = at_first_round(3, min_quorum=2)
    syncer.rounds.members[2].return_trip_seconds.value = 1.5
    syncer.now = 2.0
    assert not syncer.answer(0, round).got(ev.MergeRound)
    syncer.tick(20.0)
    for who in range(3):
        seconds = (1.0, 1.0, 3.0)[who]
        assert not syncer.step(who, 5, step_seconds=seconds).got(ev.MergeRound)  # one is not a quorum of two
    syncer.now = 30.0
    syncer.answer(1, round)
    assert syncer.rounds.open_rounds[0].grace_seconds == 4.5
    assert syncer.wakes_at <= 34.5
    assert not syncer.tick(34.4).got(ev.MergeRound)
    syncer.tick(34.5)
    (merge,) = syncer.got(ev.MergeRound)
    assert len(merge.participants) == 2
    assert (merge.quorum_seconds, merge.grace_seconds) == (30.0, 4.5)
    assert syncer.got(ev.CloseRound) == [ev.CloseRound(learner_ids=(2,), round=round, fragment_index=0)]


def test_the_grace_window_is_never_longer_than_its_maximum():
    syncer, round = at_first_round(2, max_grace_seconds=2.5)
    syncer.rounds.members[1].step_seconds = 300.0
    syncer.answer(0, round)
    assert syncer.rounds.open_rounds[0].grace_seconds == 2.5


def test_the_quorum_is_lowered_when_a_learner_leaves():
    syncer, round = at_first_round(3, min_quorum=3)
    syncer.answer(0, round).answer(1, round)
    assert syncer.lose(2).got(ev.MergeRound)


def test_the_quorum_counts_an_answer_whose_sender_has_left():
    syncer, round = at_first_round(3, min_quorum=3)
    syncer.answer(0, round).answer(1, round).lose(0)
    assert syncer.rounds.open_rounds[0].quorum_at == 0.0  # two answers; two of those asked are present
    (merge,) = syncer.tick(9.0).got(ev.MergeRound)
    assert [who for who, _ in merge.participants] == [0, 1]


def test_answers_without_steps_do_not_count_towards_the_quorum():
    syncer, round = at_first_round(3, min_quorum=1)
    syncer.answer(0, round, steps=0)
    assert syncer.rounds.open_rounds[0].quorum_at is None
    assert not syncer.tick(20.0).got(ev.MergeRound)
    syncer.answer(1, round)
    assert syncer.rounds.open_rounds[0].quorum_at == 20.0


def test_a_round_closes_below_the_quorum_when_all_have_answered():
    syncer, round = at_first_round(2, min_quorum=2)
    (merge,) = syncer.answer(0, round).answer(1, round, steps=0).got(ev.MergeRound)
    assert [who for who, _ in merge.participants] == [0]


def test_a_round_without_weight_is_discarded():
    syncer, round = at_first_round(2)
    before = list(syncer.rounds.current)
    syncer.answer(0, round, steps=0).answer(1, round, steps=0)
    assert syncer.got(ev.DiscardRound) == [ev.DiscardRound(round=round, fragment_index=0)]
    assert not syncer.got(ev.MergeRound, ev.Publish)
    assert syncer.rounds.current == before


def test_a_late_answer_enters_no_round_and_its_sender_is_told():
    syncer, round = at_first_round(2, max_grace_seconds=0)
    assert syncer.answer(0, round).got(ev.MergeRound)
    (rejected,) = syncer.answer(1, round).got(ev.RejectUpdate)
    assert (rejected.learner_id, rejected.round, rejected.fragment_index) == (1, round, 0)
    syncer.merge_all()
    (rejected,) = syncer.answer(1, round).got(ev.RejectUpdate)
    assert not syncer.got(ev.AcceptUpdate)


def test_a_refused_update_is_an_answer_without_weight():
    syncer, round = at_first_round(2)
    syncer.answer(0, round, refused=True)
    assert syncer.got(ev.RejectUpdate)
    assert not syncer.got(ev.AcceptUpdate)
    (merge,) = syncer.answer(1, round).got(ev.MergeRound)
    assert [who for who, _ in merge.participants] == [1]


def test_an_answer_sent_twice_is_ignored_whenever_it_comes():
    syncer, round = at_first_round(2, max_grace_seconds=5)
    kinds = (ev.AcceptUpdate, ev.RejectUpdate, ev.MergeRound)
    assert not syncer.answer(0, round).answer(0, round).got(*kinds)  # while the round is open
    syncer.answer(1, round)
    assert not syncer.answer(0, round).got(*kinds)  # while it is merged: "rejected" would have it merged once more
    syncer.merge_all()
    assert not syncer.answer(0, round).got(*kinds)  # and after


def test_an_answer_that_was_not_asked_for_is_rejected():
    syncer, round = at_first_round(2)
    syncer.join(2)
    assert syncer.answer(2, round).got(ev.RejectUpdate)
    assert not syncer.got(ev.AcceptUpdate)


def test_the_same_incarnation_is_asked_again_after_a_lost_link():
    syncer, round = at_first_round(3)
    held = tuple(syncer.rounds.current)
    syncer.lose(1)
    assert asked(syncer.join(1, held=held)) == [(0, (1,))]
    assert syncer.answer(1, round).got(ev.AcceptUpdate)


def test_it_is_not_asked_again_if_its_answer_is_here():
    syncer, round = at_first_round(3)
    held = tuple(syncer.rounds.current)
    syncer.answer(1, round).lose(1)
    assert asked(syncer.join(1, held=held)) == []
    assert not syncer.answer(0, round).got(ev.MergeRound)
    (merge,) = syncer.answer(2, round).got(ev.MergeRound)
    assert len(merge.participants) == 3


def test_a_new_link_without_word_of_the_old_ones_end_is_asked_again_too():
    syncer, _ = at_first_round(2)
    assert asked(syncer.join(1, held=tuple(syncer.rounds.current))) == [(0, (1,))]


def test_a_new_incarnation_replaces_the_old_one():
    syncer, round = at_first_round(2)
    syncer.join(1, incarnation="b", g=4)
    assert not asked(syncer)  # it holds nothing
    assert syncer.rounds.members[1].steps == 0
    assert syncer.answer(0, round).got(ev.MergeRound)  # nobody waits for it


def test_an_unhealed_newcomer_is_never_asked_nor_merged():
    syncer, round = at_first_round(2)
    syncer.join(2).acknowledge(2, 0)
    syncer.step(2, 500)
    assert not asked(syncer)
    assert syncer.rounds.outer_step == 4
    syncer.answer(2, round)
    assert not syncer.got(ev.AcceptUpdate)


def test_who_needs_a_full_value_is_not_asked_until_it_has_it():
    syncer = Syncer(2)
    syncer.tell(ev.FullNeeded(learner_id=1, fragment_index=1)).step(0, 4)
    assert set(syncer.rounds.open_rounds[0].asked_at) == {0}
    assert (0, (1,)) in asked(syncer.acknowledge(1, 1))


def test_who_is_healed_but_has_made_no_step_is_not_counted():
    syncer, _ = at_first_round(2)
    syncer.join(2).heal(2)
    assert not asked(syncer)
    assert asked(syncer.step(2, 5)) == [(0, (2,))]  # its first step: asked while the round is open


def test_an_idle_learner_is_neither_waited_for_nor_counted():
    syncer, round = at_first_round(2, min_quorum=2)
    syncer.now = 29.0
    syncer.step(0, 5).answer(0, round)
    assert syncer.wakes_at == 30.0
    assert not syncer.tick(29.9).got(ev.MergeRound)
    assert syncer.tick(30.0).got(ev.MergeRound)
    assert syncer.rounds.outer_step == 5  # K is 1 by now
    syncer.merge_all().acknowledge(0)
    assert (0, (0,)) in asked(syncer.step(0, 8))
    syncer.acknowledge(1)
    syncer.now = 50.0
    assert (0, (1,)) in asked(syncer.step(1, 5))  # until its next step


def test_slow_steps_do_not_make_a_learner_idle():
    syncer = Syncer(1)
    syncer.step(0, 2, step_seconds=20.0)
    assert syncer.tick(199.0).rounds.present(199.0)
    assert not syncer.tick(200.0).rounds.present(200.0)


def test_who_was_merged_is_not_asked_again_before_it_has_applied_that_version():
    syncer, round = at_first_round(2, max_grace_seconds=0)
    syncer.answer(0, round).merge_all()  # 1 was late
    syncer.step(0, 8).step(1, 8)
    assert (0, (1,)) in asked(syncer) or set(syncer.rounds.open_rounds[0].asked_at) == {1}
    assert (0, (0,)) in asked(syncer.acknowledge(0, 0))


def test_a_publication_names_what_is_in_it_and_which_round_is_over():
    syncer, round = at_first_round(2)
    syncer.answer(0, round, update_id="x").answer(1, round, steps=0).merge_all()
    (publication,) = [action for action in syncer.got(ev.Publish) if action.fragment_index == 0]
    assert publication.learner_ids == (0, 1)
    assert (publication.version, publication.base) == (Version(1, 4), FIRST)
    assert (0, "x") in publication.merged_updates
    assert publication.closed_round == round


def test_no_value_is_sent_while_the_next_one_is_merged():
    # The round is closed, and whoever merges may have replaced the value already: it would go out as the one before.
    syncer, round = at_first_round(2)
    syncer.answer(0, round).answer(1, round)
    syncer.lose(0).join(0, held=(Version(0, 0), syncer.rounds.current[1]))
    assert syncer.got(ev.Publish) == []
    publications = syncer.merge_all().got(ev.Publish)
    assert {publication.version for publication in publications} == {Version(1, 4)}
    assert {who for publication in publications for who in publication.learner_ids} == {0, 1}


def test_who_joins_as_a_round_closes_is_not_sent_the_value_before_it():
    # The grace window ends without a tick: the event that comes first is a learner that is to be sent the value.
    syncer, round = at_first_round(3)
    syncer.lose(2).answer(0, round)
    assert syncer.open_round(0) == round
    syncer.now = 1000.0
    syncer.join(2)
    assert [action.round for action in syncer.got(ev.MergeRound)] == [round]
    assert all(publication.fragment_index != 0 for publication in syncer.got(ev.Publish))


def test_one_publication_of_a_fragment_is_under_way_and_the_next_skips_what_was_missed():
    syncer, round = at_first_round(2, max_grace_seconds=0)
    syncer.answer(0, round).merge_all().acknowledge(0)
    for g in (8, 12):  # learner 1 acknowledges nothing
        syncer.step(0, g)
        finish_round(syncer, 0, [0])
    (publication,) = [action for action in syncer.acknowledge(1, 0).got(ev.Publish) if 1 in action.learner_ids]
    assert (publication.version, publication.base) == (Version(1, 12), None)


def test_what_did_not_fit_is_sent_in_full():
    syncer, round = at_first_round(2)
    syncer.answer(0, round).answer(1, round).merge_all()
    (publication,) = syncer.tell(ev.FullNeeded(learner_id=1, fragment_index=0)).got(ev.Publish)
    assert (publication.learner_ids, publication.version, publication.base) == ((1,), Version(1, 4), None)


def test_overwrite_refuses_an_update_from_before_the_previous_value():
    syncer, round = at_first_round(2, on_arrival="overwrite", max_grace_seconds=0)
    syncer.answer(0, round).merge_all().acknowledge(0).acknowledge(1)
    for g in (8, 12):
        syncer.step(0, g).step(1, g)
        newest = syncer.open_round(0)
        if g == 8:
            finish_round(syncer, 0, [0])
            syncer.acknowledge(1)
    syncer.answer(1, newest, anchor=FIRST)
    assert syncer.got(ev.RejectUpdate)
    assert not syncer.got(ev.AcceptUpdate)
    assert 1 in syncer.rounds.open_rounds[0].answered
    (publication,) = syncer.got(ev.Publish)
    assert (publication.learner_ids, publication.version, publication.base) == ((1,), Version(1, 8), None)
    assert 1 in {member.learner_id for member in syncer.rounds.present(0.0)}
    assert syncer.answer(0, newest, anchor=Version(1, 4)).got(ev.AcceptUpdate)[0].stale_anchor


# --------------------------------------------------------------------------------------------------------- finishing


def drain(syncer, *who, steps=2):
    """Everybody answers all last rounds."""
    for _ in range(10):
        for fragment, round in list(syncer.rounds.open_rounds.items()):
            for learner_id in sorted(round.asked_at.keys() - round.answered):
                syncer.answer(learner_id, round.id, fragment, steps=steps)
        syncer.merge_all()
        for learner_id in who:
            syncer.acknowledge(learner_id)


def test_when_all_have_finished_everything_is_merged_once_more_saved_and_given_out():
    syncer = Syncer(2)
    syncer.step(0, 20, finished=True)
    assert syncer.rounds.phase == "training"
    syncer.step(1, 20, finished=True)
    assert syncer.rounds.phase == "draining"
    drain(syncer, 0, 1)
    assert syncer.rounds.phase == "saving"
    assert [version.outer_step for version in syncer.rounds.current] == [21, 21]
    assert syncer.tell(ev.Saved()).got(ev.Release) == [ev.Release(learner_id=0), ev.Release(learner_id=1)]
    assert not syncer.rounds.done(syncer.now)
    syncer.lose(0, for_good=True)
    assert syncer.lose(1, for_good=True).rounds.done(syncer.now)


def test_nobody_is_released_before_the_values_are_on_disk():
    syncer = Syncer(1)
    syncer.step(0, 20, finished=True)
    released = []
    for fragment in (0, 1):
        syncer.answer(0, syncer.open_round(fragment), fragment).merge_all()
        released += syncer.got(ev.Release)
    saves = len(syncer.got(ev.SaveFinal))
    syncer.acknowledge(0)
    assert (released, syncer.got(ev.Release)) == ([], [])
    assert saves + len(syncer.got(ev.SaveFinal)) == 1
    assert syncer.tell(ev.Saved()).got(ev.Release)


def test_who_still_trains_is_told_to_stop_after_finish_wait():
    syncer = Syncer(2, finish_wait_seconds=20)
    syncer.now = 5.0
    syncer.step(0, 20, finished=True)
    assert syncer.wakes_at == 25.0
    syncer.now = 24.0
    assert not syncer.step(1, 9).got(ev.StopTraining)
    assert syncer.tick(25.0).got(ev.StopTraining) == [ev.StopTraining(learner_id=1)]
    assert syncer.rounds.phase == "training"  # it comes to its next boundary first
    assert not syncer.step(1, 10).got(ev.StopTraining)
    assert syncer.step(1, 10, finished=True).rounds.phase == "draining"


def test_a_finished_learner_is_never_idle():
    syncer = Syncer(2, finish_wait_seconds=500)
    syncer.step(0, 20, finished=True)
    for g in range(2, 20):
        syncer.now += 10.0
        syncer.step(1, g)
    assert {member.learner_id for member in syncer.rounds.present(syncer.now)} == {0, 1}


def test_an_idle_learner_is_waited_for_until_finish_wait_is_over():
    syncer = Syncer(2, finish_wait_seconds=60)
    syncer.now = 40.0  # 1 has been evaluating for 40 seconds
    syncer.step(0, 20, finished=True)
    assert syncer.rounds.phase == "training"
    assert syncer.tick(99.0).rounds.phase == "training"
    assert syncer.tick(100.0).rounds.phase == "draining"
    assert syncer.got(ev.StopTraining) == [ev.StopTraining(learner_id=1)]


def at_last_rounds(num_learners, **settings):
    """Everybody has finished, the rounds that were open are over, the last ones are not."""
    syncer = Syncer(num_learners, **settings)
    for who in range(num_learners):
        syncer.step(who, 20, finished=True)
    while any(not round.final for round in syncer.rounds.open_rounds.values()):
        fragment = next(index for index, round in syncer.rounds.open_rounds.items() if not round.final)
        finish_round(syncer, fragment, range(num_learners))
    assert sorted(syncer.rounds.open_rounds) == [0, 1]
    return syncer


def test_a_learner_that_dies_while_all_finish_is_waited_for_until_its_time_out():
    syncer = at_last_rounds(2, link_timeout_seconds=10)
    syncer.now = 3.0
    syncer.lose(1)
    for fragment in (0, 1):
        assert not syncer.answer(0, syncer.open_round(fragment), fragment).got(ev.MergeRound)
    assert syncer.wakes_at == 13.0
    assert len(syncer.tick(13.0).got(ev.MergeRound)) == 2
    assert syncer.merge_all().rounds.phase == "saving"


def test_one_that_comes_back_in_time_is_merged_in_the_last_rounds():
    syncer = at_last_rounds(2, link_timeout_seconds=10)
    held = tuple(syncer.rounds.current)
    syncer.lose(1)
    syncer.now = 3.0
    assert sorted(asked(syncer.join(1, held=held))) == [(0, (1,)), (1, (1,))]


def test_the_last_rounds_wait_for_everybody_beyond_any_grace():
    syncer = at_last_rounds(2, max_grace_seconds=0)
    syncer.answer(0, syncer.open_round(0))
    assert not syncer.tick(500.0).got(ev.MergeRound)
    assert syncer.answer(1, syncer.open_round(0)).got(ev.MergeRound)


def test_absent_learners_do_not_hold_up_the_end():
    syncer = Syncer(2, link_timeout_seconds=10)
    syncer.lose(1)
    syncer.now = 9.0
    syncer.step(0, 20, finished=True)
    assert syncer.rounds.phase == "training"
    assert syncer.tick(10.0).rounds.phase == "draining"


def test_the_run_ends_when_all_that_had_finished_are_dead():
    syncer = Syncer(2, finish_wait_seconds=60)
    syncer.step(0, 20, finished=True).lose(0).lose(1)
    assert syncer.tick(59.0).rounds.phase == "training"
    assert syncer.tick(60.0).rounds.phase == "saving"
    assert syncer.tell(ev.Saved()).rounds.done(60.0)


def test_the_run_goes_on_waiting_when_all_have_died_before_the_end():
    syncer = Syncer(1).lose(0)
    assert syncer.tick(10_000.0).rounds.phase == "training"
    syncer.join(0, incarnation="b").heal(0)
    assert asked(syncer.step(0, 4))


def test_last_rounds_in_which_nobody_has_anything_do_not_keep_the_run():
    syncer = Syncer(1)
    syncer.step(0, 20, finished=True)
    drain(syncer, 0, steps=0)
    assert syncer.rounds.phase == "saving"
    assert syncer.rounds.current == [FIRST, FIRST]


def test_when_everybody_takes_leave_early_the_run_ends():
    syncer = Syncer(2)
    syncer.lose(0, for_good=True)
    assert syncer.rounds.phase == "training"
    syncer.lose(1, for_good=True)
    assert syncer.rounds.phase == "saving"
    assert syncer.got(ev.SaveFinal)
    assert syncer.tell(ev.Saved()).rounds.done(syncer.now)


def finished_run():
    syncer = Syncer(1)
    syncer.step(0, 20, finished=True)
    drain(syncer, 0)
    return syncer.tell(ev.Saved()).lose(0, for_good=True)


def test_who_comes_after_the_end_gets_everything_and_is_released():
    syncer = finished_run()
    assert syncer.rounds.done(syncer.now)
    syncer.join(4)
    assert not syncer.rounds.done(syncer.now)
    assert [action.base for action in syncer.got(ev.Publish)] == [None, None]
    assert not syncer.got(ev.StartTraining)
    assert syncer.acknowledge(4).got(ev.Release) == [ev.Release(learner_id=4)]
    syncer.lose(4)  # whether it has heard of its release, nobody knows
    assert not syncer.rounds.done(syncer.now)
    assert syncer.rounds.done(syncer.now + syncer.rounds.config.link_timeout_seconds)


def test_a_released_learner_that_says_nothing_is_not_waited_for_long():
    syncer = Syncer(1, link_timeout_seconds=10)
    syncer.step(0, 20, finished=True)
    drain(syncer, 0)
    syncer.tell(ev.Saved())
    assert syncer.wakes_at == 10.0
    assert not syncer.rounds.done(9.9)
    assert syncer.rounds.done(10.0)


def test_a_lost_release_is_said_again():
    syncer = Syncer(1)
    syncer.step(0, 20, finished=True)
    drain(syncer, 0)
    syncer.tell(ev.Saved()).lose(0)
    assert syncer.join(0, held=tuple(syncer.rounds.current)).got(ev.Release) == [ev.Release(learner_id=0)]


# --------------------------------------------------------------------------------------------------- pace, nonsense


@pytest.mark.parametrize(
    ("overlap_steps", "step", "quorum", "sync", "fraction", "most", "expected"),
    [
        (2, 1.0, 0.5, 0.25, 0.8, 10.0, 1.0),  # 0.8 * (2 - 0.75)
        (2, 1.0, 1.5, 0.5, 0.8, 10.0, 0.0),  # no slack
        (2, 1.0, 3.0, 2.0, 0.8, 10.0, 0.0),  # negative slack
        (4, 10.0, 1.0, 1.0, 0.8, 10.0, 10.0),  # 30.4, capped
        (1, 2.0, 0.0, 0.0, 1.0, 10.0, 2.0),
    ],
)
def test_grace_seconds_are_equation_3(overlap_steps, step, quorum, sync, fraction, most, expected):
    assert grace_seconds(
        step_seconds=step,
        quorum_seconds=quorum,
        sync_seconds=sync,
        overlap_steps=overlap_steps,
        grace_fraction=fraction,
        max_grace_seconds=most,
    ) == pytest.approx(expected)


def test_h_as_measured_grows_when_rounds_cannot_keep_up():
    syncer = Syncer(1, num_fragments=1, sync_every=4, max_open_rounds=1)
    assert syncer.rounds.effective_sync_every == 4
    for g in (4, 12, 20, 28, 36):  # each second one finds the round still open
        syncer.step(0, g).step(0, g + 4)
        finish_round(syncer, 0, [0])
        if 0 in syncer.rounds.open_rounds:
            finish_round(syncer, 0, [0], steps=0)
    assert syncer.rounds.effective_sync_every > 5


@pytest.mark.parametrize(
    "event",
    [
        ev.Left(learner_id=9, for_good=True),
        ev.ValuesSupplied(),
        ev.Reported(learner_id=9, global_step=99, steps=9, step_seconds=1.0, finished=True),
        ev.Merged(round=RoundId(7, 7)),
        ev.Acknowledged(learner_id=0, fragment_index=77, version=FIRST),
        ev.Acknowledged(learner_id=0, fragment_index=0, version=Version(1, 99)),
        ev.FullNeeded(learner_id=0, fragment_index=-1),
        ev.Saved(),
    ],
)
def test_senseless_events_change_nothing(event):
    syncer, round = at_first_round(2)
    t = syncer.rounds.outer_step
    assert len(syncer.tell(event).actions) == 1
    assert (syncer.rounds.outer_step, syncer.open_round(0)) == (t, round)


def test_a_step_of_no_time_at_all_does_not_raise():
    syncer, round = at_first_round(1, max_open_rounds=2)
    syncer.now = 5.0
    syncer.answer(0, round).merge_all().acknowledge(0)
    syncer.step(0, 9, step_seconds=5e-324)
    assert len(syncer.rounds.open_rounds) <= 2
