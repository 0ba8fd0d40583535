"""Whole runs in virtual time, with the numbers that they must reach."""

from statistics import mean

import pytest
from rounds_learner import Speed
from rounds_world import World

from hf_diloco.config import SyncerConfig

pytestmark = pytest.mark.fast


def make_world(speeds, *, total_steps, seed=0, **settings):
    settings = {"num_fragments": 24, "sync_every": 24, "expected_learners": len(speeds), **settings}
    return World(SyncerConfig(**settings), speeds, total_steps=total_steps, seed=seed)


def steady_merges(world):
    """Those after the first two periods and before the last rounds."""
    warm = 2 * world.config.sync_every
    return [merge for merge in world.merges if merge.phase == "training" and merge.action.version.outer_step > warm]


def mean_participants(world):
    return mean(len(merge.learner_ids) for merge in steady_merges(world))


def share_of_merges(world, learner_id):
    return mean(learner_id in merge.learner_ids for merge in steady_merges(world))


def effective_sync_every(world):
    """Outer steps between two merges of one fragment, from the merges themselves."""
    last, gaps = {}, []
    for merge in steady_merges(world):
        fragment, outer_step = merge.action.fragment_index, merge.action.version.outer_step
        if fragment in last:
            gaps.append(outer_step - last[fragment])
        last[fragment] = outer_step
    return mean(gaps)


def merges_between(world, start, end):
    return [merge for merge in world.merges if start <= merge.time < end]


# --------------------------------------------------------------------------------------------------- return trips


@pytest.mark.parametrize("num_fragments", [24, 8])
@pytest.mark.parametrize("trip", [0.1, 0.5, 1.0, 2.0, 3.0, 5.0])
def test_return_trips_of_some_inner_steps(trip, num_fragments):
    speed = Speed(step_seconds=1.0, jitter=1.1, up_seconds=trip / 2, down_seconds=trip / 2, link_jitter=1.2)
    world = make_world([speed] * 4, total_steps=150, num_fragments=num_fragments)
    world.run(1000)
    world.check_everything_merged()
    assert mean_participants(world) >= 0.9 * 4
    shares = [share_of_merges(world, who) for who in range(4)]
    assert max(shares) - min(shares) <= 0.05
    assert effective_sync_every(world) <= 1.3 * 24
    assert world.rounds.effective_sync_every == pytest.approx(effective_sync_every(world), rel=0.1)


@pytest.mark.parametrize("slow_trip", [1.0, 3.0])
def test_one_learner_far_away(slow_trip):
    near, far = Speed(jitter=1.1), Speed(jitter=1.1, up_seconds=slow_trip / 2, down_seconds=slow_trip / 2)
    world = make_world([near, near, near, far], total_steps=200)
    world.run(1000)
    assert mean_participants(world) >= 0.9 * 4
    assert effective_sync_every(world) <= 1.3 * 24


@pytest.mark.parametrize("seed", range(3))
def test_two_processes_on_two_busy_cores(seed):
    speed = Speed(step_seconds=0.01, jitter=2.0, up_seconds=0.002, down_seconds=0.002, link_jitter=4.0)
    world = make_world([speed] * 2, total_steps=500, seed=seed, num_fragments=6)
    world.run(60)
    world.check_everything_merged()
    assert mean_participants(world) >= 0.9 * 2
    assert effective_sync_every(world) <= 1.3 * 24


def test_two_busy_processes_that_are_held_up_now_and_then():
    speed = Speed(step_seconds=0.01, jitter=2.0, up_seconds=0.002, down_seconds=0.002, link_jitter=4.0)
    world = make_world([speed] * 2, total_steps=500, num_fragments=6)
    for n in range(1, 25):
        world.at(n * 0.3, lambda who=n % 2: world.hang(who, 0.06))
    world.run(60)
    world.check_everything_merged()
    assert mean_participants(world) >= 0.9 * 2


# ----------------------------------------------------------------------------------------------- unequal learners


def test_one_of_two_is_four_times_slower():
    fast, slow = Speed(step_seconds=0.25), Speed(step_seconds=1.0)
    world = make_world([fast, slow], total_steps=400)
    world.run(300)
    world.check_everything_merged()
    assert mean_participants(world) >= 1.9
    assert all(world.merged_share(who) >= 0.95 for who in (0, 1))
    finished_at = world.learners[0].finished_at
    assert finished_at <= 400 * 0.25 * 1.02  # the fast one never waited ...
    steady = [merge for merge in steady_merges(world) if merge.time < finished_at]
    assert (steady[-1].time - steady[0].time) / (len(steady) - 1) == pytest.approx(0.25, rel=0.05)  # ... nor did merges
    assert world.learners[1].steps <= 105  # its clock follows the others': it ends when they do


def test_a_learner_beyond_the_longest_grace_is_merged_late_and_loses_nothing():
    world = make_world([Speed(step_seconds=0.25), Speed(step_seconds=2.0)], total_steps=400, max_grace_seconds=0.5)
    world.run(300)
    world.check_everything_merged()
    assert len(world.rejected) > 20  # it is late again and again
    assert share_of_merges(world, 1) < 0.8
    assert world.merged_share(1) == 1.0


# ------------------------------------------------------------------------------------------------- stops and jumps


def test_k_is_m_and_a_stopped_learner_comes_back_in_mid_round():
    world = make_world([Speed()] * 2, total_steps=150, min_quorum=2, link_timeout_seconds=10)
    world.at(60.2, lambda: world.stop(1, 6.0))
    world.run(400)
    world.check_everything_merged()
    assert not merges_between(world, 62.5, 66.0)  # K = 2: nothing without it
    assert len(merges_between(world, 66.0, 69.0)) >= 2
    assert mean_participants(world) == 2  # it was asked once, and its answer was in time


def test_k_is_m_and_a_stopped_learner_is_given_up_and_comes_back():
    world = make_world([Speed()] * 2, total_steps=150, min_quorum=2, link_timeout_seconds=10)
    world.at(60.2, lambda: world.stop(1, 30.0))
    world.run(400)
    world.check_everything_merged()
    assert not merges_between(world, 62.5, 70.0)
    alone = merges_between(world, 70.2, 90.0)
    assert len(alone) >= 18  # after the time-out the other one goes on, a fragment a step
    assert all(merge.learner_ids == {0} for merge in alone)
    assert all(merge.learner_ids == {0, 1} for merge in merges_between(world, 95.0, 140.0))


def test_t_jumps_by_five():
    world = make_world([Speed()] * 2, total_steps=150, sync_every=24)
    world.at(60.2, lambda: setattr(world.learners[0], "global_step", world.learners[0].global_step + 5))
    world.run(400)
    world.check_everything_merged()
    jumped = merges_between(world, 60.2, 70.0)
    outer_steps = [merge.action.version.outer_step for merge in jumped]
    assert outer_steps == list(range(outer_steps[0], outer_steps[0] + len(jumped)))  # each fragment once, none left out
    assert {merge.action.version.outer_step for merge in world.merges} >= set(range(24, 150))


def test_a_learner_late_twice_in_a_row_loses_nothing():
    near, far = Speed(jitter=1.05), Speed(jitter=1.05, up_seconds=5.0)
    world = make_world([near] * 2, total_steps=120, num_fragments=2, sync_every=12, max_grace_seconds=2)
    world.at(34.0, lambda: setattr(world.learners[1], "speed", far))
    world.at(60.0, lambda: setattr(world.learners[1], "speed", near))
    world.run(400)
    late = [action.fragment_index for action in world.rejected if action.learner_id == 1]
    assert late == [0, 1, 0, 1]
    assert all(merge.learner_ids == {0} for merge in merges_between(world, 36.0, 59.0))
    world.check_everything_merged()


def test_a_learner_that_misses_two_versions():
    world = make_world([Speed()] * 2, total_steps=150, num_fragments=4, sync_every=8, link_timeout_seconds=5)
    world.at(40.2, lambda: world.cut(1, 20.0))
    world.run_until(60.0)
    before = dict(world.merged_until)
    held = list(world.learners[1].fragments)
    missed = [world.rounds.current[f].outer_step - held[f].anchor.outer_step for f in range(4)]
    assert min(missed) >= 16
    world.run(400)
    world.check_everything_merged()
    key = (world.learners[1].incarnation, 0)
    assert before[key] <= 41
    assert world.merged_until[key] == world.learners[1].steps  # the steps of the silence too
    assert len(world.processes) == 2


def test_a_restarted_learner_loses_at_most_what_was_not_merged():
    world = make_world([Speed()] * 2, total_steps=150, link_timeout_seconds=5)
    world.at(60.2, lambda: world.crash(1, restart_after=8.0))
    world.run(400)
    died, back = world.processes[1], world.processes[2]
    assert (died.learner_id, back.learner_id) == (1, 1)
    for fragment in range(24):
        assert died.steps - world.merged_until[died.incarnation, fragment] <= 24 + 2
    world.check_everything_merged(0, 1)
    assert len(merges_between(world, 60.2, 70.0)) >= 9  # the other one's merges go on
    assert all(merge.learner_ids == {0, 1} for merge in merges_between(world, 75.0, 140.0))


def test_a_learner_in_a_long_evaluation_is_idle_then_back():
    world = make_world([Speed()] * 3, total_steps=200, min_quorum=3)
    world.at(60.2, lambda: world.hang(2, 50.0))
    world.run(600)
    world.check_everything_merged()
    assert not merges_between(world, 63.0, 89.0)  # K = 3: waited for until it counts as idle
    assert len(merges_between(world, 92.0, 110.0)) >= 16
    assert all(merge.learner_ids == {0, 1, 2} for merge in merges_between(world, 115.0, 180.0))


# ------------------------------------------------------------------------------------------------------ the end


def test_learners_finish_at_different_times_and_one_is_dead():
    speeds = [Speed(step_seconds=0.5), Speed(step_seconds=0.7), Speed(step_seconds=0.6)]
    world = make_world(speeds, total_steps=150, finish_wait_seconds=20, link_timeout_seconds=10)
    world.at(70.0, lambda: world.crash(2))
    world.run(200)
    first, last = sorted(world.learners[who].finished_at for who in (0, 1))
    assert first < last <= first + 20 + 0.7 + 0.1
    world.check_everything_merged(0, 1)
    assert all(world.learners[who].released for who in (0, 1))
    assert world.now <= last + 10  # nobody waited for the dead one


def test_finish_wait_bounds_a_straggler():
    world = make_world(
        [Speed(step_seconds=0.1), Speed(step_seconds=3.0)],
        total_steps=300,
        finish_wait_seconds=5,
        max_grace_seconds=1.0,
        sync_every=100,
        num_fragments=2,
    )
    world.run(200)
    first, last = (world.learners[who].finished_at for who in (0, 1))
    assert last <= first + 5 + 3.1
    world.check_everything_merged()


@pytest.mark.parametrize("on_arrival", ["carry", "overwrite"])
def test_overwrite_loses_what_was_in_flight_and_carry_does_not(on_arrival):
    speed = Speed(up_seconds=1.0, down_seconds=1.0, jitter=1.1)
    world = make_world([speed] * 2, total_steps=150, on_arrival=on_arrival)
    world.run(600)
    lost = sum(learner.steps_overwritten for learner in world.learners.values())
    assert (lost > 0) == (on_arrival == "overwrite")
    assert mean_participants(world) >= 1.8


# ------------------------------------------------------------------------------------------------------ leave taken


def left_at(world, learner_id):
    """When it was gone; all that it had done must be merged by then."""
    learner = world.learners[learner_id]
    while learner.alive:
        assert not world.done
        assert world.now < 1000, world.describe()
        world.run_until(world.now + 0.1)
    world.check_everything_merged(learner_id)
    return world.now


@pytest.mark.parametrize("num_learners", [1, 3])
def test_who_takes_leave_is_merged_at_once(num_learners):
    world = make_world([Speed()] * num_learners, total_steps=200, sync_every=100, num_fragments=4)
    world.at(120.2, lambda: world.take_leave(0))
    world.run_until(121.0)
    assert left_at(world, 0) <= 124.0
    world.run(600)


@pytest.mark.parametrize("before", ["evaluation", "lost link"])
def test_who_takes_leave_after_a_silence_is_merged(before):
    """It counted as idle, and takes no further step that would end that."""
    world = make_world([Speed()] * 2, total_steps=300, sync_every=100, num_fragments=4)
    world.at(60.2, lambda: world.hang(1, 50.0) if before == "evaluation" else world.cut(1, 50.0))
    world.at(61.2, lambda: world.take_leave(1))
    world.run_until(62.0)
    assert left_at(world, 1) <= 115.0
    world.run(600)


def test_who_takes_leave_while_the_syncer_is_dead_waits_for_the_next_one():
    world = make_world([Speed()] * 2, total_steps=300, sync_every=100, num_fragments=4)
    world.at(60.2, lambda: world.kill_syncer(40.0))
    world.at(61.2, lambda: world.take_leave(1))
    world.run_until(62.0)
    assert left_at(world, 1) <= 106.0
    world.run(600)


# --------------------------------------------------------------------------------------------- syncers that die


@pytest.mark.parametrize("down_seconds", [0.5, 45.0])
def test_learners_train_on_without_a_syncer_and_all_is_merged(down_seconds):
    world = make_world([Speed(jitter=1.1)] * 3, total_steps=200, num_fragments=8)
    world.at(60.2, lambda: world.kill_syncer(down_seconds))
    world.run(600)
    world.check_everything_merged()
    assert world.steps_given_up == 0
    assert not merges_between(world, 60.2, 60.2 + down_seconds)
    assert len(merges_between(world, 60.2 + down_seconds, 66.0 + down_seconds)) >= 2


def test_who_reports_too_late_gives_up_what_the_others_never_had():
    """It alone was merged for some time; then the syncer dies, and goes on from what the other one holds."""
    world = make_world([Speed()] * 2, total_steps=200, num_fragments=4, sync_every=4)
    world.at(60.2, lambda: world.cut(0, 10.0))
    world.at(70.0, lambda: world.kill_syncer(0.1, late={0: 0.5, 1: 20.0}))
    world.run(600)
    assert 8 <= world.steps_given_up / 4 <= 10
    world.check_everything_merged()


def test_a_syncer_that_dies_when_all_is_saved_ends_the_run():
    world = make_world([Speed()] * 2, total_steps=50, num_fragments=4, sync_every=4)
    while world.rounds.phase != "finished":
        world.run_until(world.now + 0.01)
    world.crash(1)
    world.kill_syncer(5.0)
    world.run(100)
    assert world.learners[0].released


def test_a_syncer_that_dies_when_everybody_has_gone_ends_the_run():
    world = make_world([Speed()] * 2, total_steps=50, num_fragments=4, sync_every=4)
    while not all(learner.released for learner in world.learners.values()):
        world.run_until(world.now + 0.001)
    world.kill_syncer(5.0)  # what they said at parting has not arrived
    world.run(100)
