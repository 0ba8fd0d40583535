"""Learners that hold their model in a DeepSpeed engine, in one run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import Process, wait_until

from hf_diloco.syncer.run_directory import RunDirectory
from hf_diloco.syncer.saved_run import latest_run

pytestmark = [pytest.mark.distributed, pytest.mark.long, pytest.mark.timeout(600)]

SCRIPT = Path(__file__).parent / "train_deepspeed.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
SECONDS = 280.0
STAGES = {0: 2, 1: 3}  # by learner


def test_stage_2_and_stage_3_in_one_run(start_run: Any) -> None:
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: pip install -e '.[dev-deepspeed]'")
    run = start_run(expected_learners=2, num_fragments=4, sync_every=8, finish_wait_seconds=120)
    address = wait_until(lambda: run.status().get("address"), "the syncer's address")
    for learner_id, stage in STAGES.items():
        environment = {
            **run._mark(),
            "HF_DILOCO_SYNCER": address,
            "HF_DILOCO_LEARNER_ID": str(learner_id),
            "HF_DILOCO_TOKEN_FILE": str(run.directory / "token"),
        }
        flags = ["--stage", str(stage), "--data_seed", str(learner_id), "--result", str(run.path / str(learner_id))]
        learner = Process([*TORCHRUN, str(SCRIPT), *flags], run.path / f"learner-{learner_id}.log", environment)
        run.learners[learner_id] = learner
        run._all.append(learner)
    for learner in run.learners.values():
        assert learner.wait(SECONDS) == 0, learner.tail()
    assert run.syncer.wait(SECONDS) == 0, run.syncer.tail()
    together = [line for line in run.rounds() if len(line["participants"]) == 2]
    assert len(together) >= 8
    saved = latest_run(RunDirectory(run.directory, create=False)).tensors()
    for learner_id in STAGES:
        for rank in (0, 1):
            held = torch.load(run.path / f"{learner_id}.rank-{rank}.pt")
            assert held.keys() >= saved.keys()
            assert all(torch.equal(saved[name], held[name]) for name in saved), (learner_id, rank)
