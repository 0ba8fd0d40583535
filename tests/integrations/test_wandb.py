"""Weights & Biases, offline: each learner is a run of its own, and those of one script are a group."""

import pytest
from test_trainer_details import METRICS
from test_transformers_run import Run

pytestmark = pytest.mark.long


def test_what_is_logged(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="wandb is not installed: pip install -e '.[dev-long]'")
    for name, value in {"MODE": "offline", "DIR": str(tmp_path), "SILENT": "true", "RUN_GROUP": ""}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    monkeypatch.delenv("WANDB_RUN_GROUP")
    run = Run(tmp_path)
    try:
        run.train(run.trainer(0, max_steps=6, report_to="wandb"))
        assert (wandb.run.group, wandb.run.name) == ("out", "out-learner-0")
        assert {f"train/{name}" for name in METRICS} <= set(wandb.run.summary.keys())
        assert list(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
    finally:
        run.syncer.stop()
        wandb.teardown()
