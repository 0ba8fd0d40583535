"""`hf-diloco launch` with learners of several processes, and of different kinds."""

from __future__ import annotations

import signal

import pytest
from launches import wait_until

pytestmark = [pytest.mark.distributed, pytest.mark.long, pytest.mark.timeout(1200)]

OUTER_JOB = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3", "MASTER_ADDR": "nowhere", "SLURM_PROCID": "3"}


@pytest.fixture
def configs(tmp_path):
    """Files of `accelerate config` for one process, and for two, on the CPU."""
    text = "compute_environment: LOCAL_MACHINE\ndistributed_type: '{}'\nuse_cpu: true\nnum_processes: {}\n"
    paths = (tmp_path / "one.yaml", tmp_path / "two.yaml")
    paths[0].write_text(text.format("NO", 1))
    paths[1].write_text(text.format("MULTI_CPU", 2))
    return paths


def test_learners_of_one_and_of_two_processes(launch, configs):
    files = [word for path in configs for word in ("--accelerate-config", path)]
    run = launch("--steps", 60, "--slow", options=tuple(files), **OUTER_JOB)
    assert run.wait(300) == 0, run.text()
    run.assert_nothing_left()
    output = run.output.read_text()
    assert "The run has finished" in output
    assert "2 learners of 3 processes in all started" in output
    for learner_id, world in ((0, 1), (1, 2)):
        log = (run.directory.logs / f"learner-{learner_id}.log").read_text()
        assert log.count(f"of learner {learner_id} of 2, world size {world}\n") == world
    tokens = [account["tokens_trained"] for account in run.accounts()]
    assert 1.5 * tokens[0] < tokens[1], "both processes of learner 1 are counted"
    assert all(
        account["tokens_merged"] + account["tokens_overwritten"] == account["tokens_trained"] > 0
        for account in run.accounts()
    )


def test_a_dead_rank_has_its_learner_started_again_and_a_signal_reaches_all_ranks(launch):
    run = launch("--steps", 100_000, "--slow", options=("--nproc-per-learner", 2, "--restart", "--grace-seconds", 120))
    run.until_training(seconds=300)
    assert len(run.trainers()) == 4
    before = run.joins(1)
    run.trainer(1, rank=1).kill()
    (again,) = wait_until(lambda: set(run.joins(1)) - set(before), "learner 1 to be back", 300)
    wait_until(lambda: any(again in update_id for update_id in run.merged()), "it to be merged", 300)
    assert len(set(run.joins(0))) == 1, "learner 0 goes on as if nothing had happened"
    assert len(run.trainers()) == 4
    run.process.send_signal(signal.SIGTERM)
    assert run.wait(240) == 1, run.text()
    run.assert_nothing_left()
    output = run.output.read_text()
    assert "Learner 1 is started again." in output
    last_words = {line["learner_id"]: line["reason"] for line in run.leaves()}  # learner 1 left twice
    for learner_id in (0, 1):
        assert "told to stop" in last_words[learner_id]
        assert f"Learner {learner_id} has ended (exit code 0)." in output, run.text()
        assert list((run.path / "out" / f"learner-{learner_id}").glob("checkpoint-*/optimizer.pt")), run.text()
