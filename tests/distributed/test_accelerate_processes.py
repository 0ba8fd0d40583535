"""Accelerate loops in processes of their own."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import Process, wait_until

from hf_diloco.syncer.run_directory import RunDirectory
from hf_diloco.syncer.saved_run import latest_run

pytestmark = [pytest.mark.distributed, pytest.mark.long]

SCRIPT = Path(__file__).parent / "train_loop.py"


def start_loop(path: Path, name: str, environment: dict[str, str], *launcher: str, **options: Any) -> Process:
    flags = [text for key, value in options.items() for text in (f"--{key}", str(value))]
    command = [sys.executable, *launcher, str(SCRIPT), "--result", str(path / name), *flags]
    return Process(command, path / f"{name}.log", environment)


def learner_environment(run: Any) -> dict[str, str]:
    return {
        "HF_DILOCO_SYNCER": wait_until(lambda: run.status().get("address"), "the syncer's address"),
        "HF_DILOCO_LEARNER_ID": "0",
        "HF_DILOCO_TOKEN_FILE": str(run.directory / "token"),
    }


def test_told_to_stop_it_saves_and_goes_on_from_there(start_run: Any) -> None:
    run = start_run(num_fragments=4, sync_every=4, total_steps=120)
    options = {"max_steps": 120, "step_seconds": 0.02}
    first = start_loop(run.path, "loop", learner_environment(run), **options)
    run.learners[0] = first
    run.wait_for_rounds(4, lambda line: True, "merges")
    first.signal(signal.SIGTERM)
    assert first.wait() == 0, first.tail()
    assert "its checkpoint is saved in" in first.tail()
    assert not (run.path / "loop.0.pt").exists()
    trained = run.status()["learners"][0]["tokens_trained"]

    run.learners[0] = again = start_loop(run.path, "loop", learner_environment(run), **options)
    assert again.wait() == 0, again.tail()
    assert run.syncer.wait() == 0, run.syncer.tail()
    result = torch.load(run.path / "loop.0.pt")
    saved = latest_run(RunDirectory(run.directory, create=False)).tensors()
    assert all(torch.equal(result["values"][name], saved[name]) for name in saved)
    assert 0 < result["updates"] < 120
    states = [line for line in run.tape() if line["kind"] == "state"]
    assert [(line["source"], line["reason"]) for line in states][-1] == ("own", "")
    (account,) = run.status()["learners"]
    assert account["tokens_trained"] == trained + result["tokens"]
    assert account["tokens_merged"] == pytest.approx(account["tokens_trained"], abs=1)
