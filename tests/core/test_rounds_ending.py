"""How a run comes to its end, rule by rule."""

import pytest
from rounds_by_hand import FIRST, Syncer, asked, finish_round

from hf_diloco.core import events as ev

pytestmark = pytest.mark.fast


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


@pytest.mark.parametrize("has_trained", [True, False])
def test_a_learner_that_hangs_does_not_hold_up_the_end_for_ever(has_trained):
    syncer = Syncer(2, finish_wait_seconds=60, linger_seconds=0)
    if not has_trained:
        syncer.join(1, incarnation="b").heal(1)
    syncer.now = 40.0
    syncer.step(0, 20, finished=True)
    assert syncer.tick(100.0).rounds.phase == "draining"
    drain(syncer, 0)
    syncer.now = 110.0
    syncer.tell(ev.Saved()).lose(0, for_good=True)
    assert syncer.wakes_at == 710.0
    assert not syncer.rounds.settled(709.9)
    assert syncer.rounds.settled(710.0)
    assert syncer.rounds.done(710.0)


def test_one_that_hung_and_comes_back_with_what_it_had_gets_the_final_values():
    syncer = Syncer(2, finish_wait_seconds=60, link_timeout_seconds=10)
    held = tuple(syncer.rounds.current)
    syncer.lose(1)
    syncer.now = 40.0
    syncer.step(0, 20, finished=True)
    drain(syncer, 0)
    syncer.tell(ev.Saved()).lose(0, for_good=True)
    assert syncer.rounds.done(100.0)
    syncer.now = 101.0
    assert not syncer.join(1, held=held).rounds.done(700.9)
    assert syncer.wakes_at == 701.0
    assert syncer.acknowledge(1).got(ev.Release) == [ev.Release(learner_id=1)]


@pytest.mark.parametrize("finished", [True, False])
def test_who_does_not_hang_is_waited_for_until_it_has_the_final_values(finished):
    syncer = Syncer(2, finish_wait_seconds=60)
    syncer.now = 40.0
    syncer.step(0, 20, finished=True)
    syncer.tick(100.0)
    drain(syncer, 0)
    syncer.tell(ev.Saved()).lose(0, for_good=True)
    syncer.now = 699.0
    syncer.step(1, 10, finished=finished)
    assert not syncer.rounds.settled(700.0)


def test_a_lost_release_is_said_again():
    syncer = Syncer(1)
    syncer.step(0, 20, finished=True)
    drain(syncer, 0)
    syncer.tell(ev.Saved()).lose(0)
    assert syncer.join(0, held=tuple(syncer.rounds.current)).got(ev.Release) == [ev.Release(learner_id=0)]


def test_the_syncer_stays_for_latecomers_as_long_as_it_was_told():
    syncer = Syncer(1, linger_seconds=30, link_timeout_seconds=10)
    syncer.step(0, 20, finished=True)
    drain(syncer, 0)
    syncer.now = 5.0
    syncer.tell(ev.Saved()).lose(0, for_good=True)
    assert syncer.rounds.settled(5.0)
    assert syncer.wakes_at == 35.0, "30 seconds from when the values were on disk"
    assert not syncer.rounds.done(34.9)
    assert syncer.rounds.done(35.0)


def test_a_latecomer_that_is_there_is_served_beyond_that_time():
    syncer = Syncer(1, linger_seconds=30)
    syncer.step(0, 20, finished=True)
    drain(syncer, 0)
    syncer.tell(ev.Saved()).lose(0, for_good=True)
    syncer.now = 29.0
    syncer.join(0, incarnation="b")
    assert not syncer.tick(31.0).rounds.done(31.0)
    assert syncer.acknowledge(0).got(ev.Release) == [ev.Release(learner_id=0)]
    assert not syncer.got(ev.StartTraining)
    assert syncer.lose(0, for_good=True).rounds.done(31.0)
