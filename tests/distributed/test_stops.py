"""Learners that stop or hang for a minute: until they are out a merge may take longer, afterwards nobody notices."""

from __future__ import annotations

import itertools
import signal
import statistics
from typing import Any

import pytest
from processes import Run, wait_until
from test_faults import ids

pytestmark = [pytest.mark.distributed, pytest.mark.long]

SETTINGS = {"num_fragments": 6, "sync_every": 6, "expected_learners": 3, "max_grace_seconds": 4}
PACE = {"step_seconds": 0.3, "max_steps": 500}
SLACK_SECONDS = 2.0  # several processes on few cores


def gaps(times: list[float]) -> list[float]:
    return [later - earlier for earlier, later in itertools.pairwise(times)]


def merge_times(run: Run, first: float, last: float) -> list[float]:
    return [line["seconds"] for line in run.rounds() if first <= line["seconds"] <= last]


def start(start_run: Any, **options: Any) -> tuple[Run, float]:
    """Three learners that merge together; and their usual gap between merges."""
    run = start_run(**SETTINGS)
    for learner_id in (0, 1, 2):
        run.start_learner(learner_id, **{**PACE, **(options if learner_id == 2 else {})})
    run.wait_for_rounds(20, lambda line: len(ids(line)) == 3, "merges of all three learners")
    times = [line["seconds"] for line in run.rounds() if len(ids(line)) == 3]
    return run, statistics.median(gaps(times))


def check_others(run: Run, out_at: float, back_at: float, usual: float, stopped_at: float) -> None:
    """Nobody else is held up: a little until the learner is out, not at all afterwards."""
    first_after = min(merge_times(run, out_at, back_at))
    before = gaps([stopped_at, *merge_times(run, stopped_at, first_after)])
    assert max(before) <= usual + SETTINGS["max_grace_seconds"] + SLACK_SECONDS
    after = gaps(merge_times(run, out_at + 1, back_at))
    assert len(after) > 20
    assert statistics.median(after) <= 2 * usual + 0.2
    assert max(after) <= usual + SLACK_SECONDS


def test_a_learner_that_is_stopped_for_a_minute(start_run: Any) -> None:
    run, usual = start(start_run)
    stopped_at = run.tape()[-1]["seconds"]
    run.learners[2].signal(signal.SIGSTOP)
    (out,) = wait_until(lambda: [line for line in run.tape() if line["kind"] == "leave"], "the learner to be out", 60)
    assert out["seconds"] - stopped_at < 10 + 5
    wait_until(lambda: run.tape()[-1]["seconds"] > stopped_at + 60, "a minute to pass")
    back_at = run.tape()[-1]["seconds"]
    check_others(run, out["seconds"], back_at, usual, stopped_at)
    run.learners[2].signal(signal.SIGCONT)
    count = len(run.rounds())
    wait_until(lambda: any(2 in ids(line) for line in run.rounds()[count:]), "the learner to be merged again")
    for learner in run.learners.values():
        assert learner.wait(300) == 0, learner.tail()
    assert run.syncer.wait() == 0
    for row in run.accounts().values():
        assert row["tokens_merged"] == row["tokens_trained"], row
        assert row["tokens_overwritten"] == 0


def test_a_learner_whose_training_hangs_is_idle(start_run: Any) -> None:
    """Its process lives and its link is up: a stuck collective, or a long evaluation."""
    run, usual = start(start_run, hang_at_step=40, hang_seconds=75)

    def state() -> str:
        return {row["learner_id"]: row["state"] for row in run.status()["learners"]}[2]

    wait_until(lambda: state() == "idle", "the learner to be idle", 90)
    idle_at = run.tape()[-1]["seconds"]
    wait_until(lambda: state() == "training", "the learner to train again", 120)
    back_at = run.tape()[-1]["seconds"]
    check_others(run, idle_at, back_at - 1, usual, idle_at)
    assert not any(2 in ids(line) for line in run.rounds() if idle_at + 1 < line["seconds"] < back_at - 2)
    for learner in run.learners.values():
        assert learner.wait(300) == 0, learner.tail()
    assert run.syncer.wait() == 0
    for row in run.accounts().values():
        assert row["tokens_merged"] == row["tokens_trained"], row
