"""How a run starts, and how its clock makes fragments due, rule by rule."""

import pytest
from rounds_by_hand import FIRST, Syncer, finish_round

from hf_diloco.core import events as ev

pytestmark = pytest.mark.fast


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
