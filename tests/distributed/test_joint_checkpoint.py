"""A checkpoint of the whole run, and everything started again from it after everything was killed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from processes import Run, wait_until

from hf_diloco.syncer.checkpoint import checkpoint_paths

pytestmark = [pytest.mark.distributed, pytest.mark.long]


def joint_checkpoints(run: Run) -> list[dict[str, Any]]:
    """Step and learners' paths of each that is whole, oldest first."""
    found = []
    for path in checkpoint_paths(run.directory / "joint"):
        index = json.loads((path / "checkpoint.json").read_text())
        found.append({"step": index["outer_step"], **index["meta"]["facts"]["learner_checkpoints"]})
    return found


def test_all_is_killed_and_starts_again_from_a_checkpoint_of_the_whole_run(start_run: Any) -> None:
    run = start_run(expected_learners=2, num_fragments=6, sync_every=6, save_every=20)
    for learner_id in (0, 1):
        run.start_learner(learner_id, step_seconds=0.1, max_steps=300)
    wait_until(lambda: len(joint_checkpoints(run)) >= 2, "two checkpoints of the whole run")
    for learner in run.learners.values():
        learner.kill()
    run.syncer.kill()
    first = joint_checkpoints(run)[0]
    for learner_id in ("0", "1"):
        state = json.loads((Path(first[learner_id]) / "trainer_state.json").read_text())
        assert (Path(first[learner_id]) / "optimizer.pt").exists()
        assert abs(state["global_step"] - first["step"]) <= 20

    run.start_syncer("--go-back-to", str(first["step"]))
    wait_until(lambda: run.status().get("pid") == run.syncer.pid, "the new syncer to listen")
    count = len(run.rounds())
    for learner_id in (0, 1):
        run.start_learner(learner_id, step_seconds=0.1, max_steps=300, resume_from=first[str(learner_id)])
    for learner_id in (0, 1):
        assert run.learners[learner_id].wait() == 0, run.learners[learner_id].tail()
    assert run.syncer.wait() == 0, run.syncer.tail()
    new_rounds = run.rounds()[count:]
    assert first["step"] < new_rounds[0]["version"][1] <= first["step"] + 20, "it did not go on from there"
    assert run.result(0)["digests"] == run.result(1)["digests"]
    assert f"resume_from_checkpoint='{first['0']}'" in run.syncer.tail(1_000_000)


def test_a_step_that_was_not_saved_is_wrong_use(start_run: Any) -> None:
    run = start_run(num_fragments=6, sync_every=6)
    run.start_learner(0, max_steps=30)
    assert run.syncer.wait() == 0
    run.start_syncer("--go-back-to", "20")
    assert run.syncer.wait() == 2
    assert "no checkpoint of the whole run at step 20; there is none (see --save-every)" in run.syncer.tail()
