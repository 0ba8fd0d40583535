"""Accelerate loops in processes of their own."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import Process

from hf_diloco.syncer.run_directory import RunDirectory
from hf_diloco.syncer.saved_run import latest_run

pytestmark = [pytest.mark.distributed, pytest.mark.long, pytest.mark.timeout(900)]

SCRIPT = Path(__file__).parent / "train_loop.py"
STEPS = 60
SECONDS = 240  # of patience: several processes that import torch, on few cores


RANKS = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")


def start_loop(path: Path, name: str, environment: dict[str, str], *launcher: str, **options: Any) -> Process:
    flags = [text for key, value in options.items() for text in (f"--{key}", str(value))]
    command = [sys.executable, *launcher, str(SCRIPT), "--result", str(path / name), *flags]
    return Process(command, path / f"{name}.log", environment)


def test_told_to_stop_it_saves_and_goes_on_from_there(start_run: Any) -> None:
    run = start_run(num_fragments=4, sync_every=4, total_steps=120)
    options = {"max_steps": 120, "step_seconds": 0.02}
    first = start_loop(run.path, "loop", run.learner_environment(0), **options)
    run.learners[0] = first
    run.wait_for_rounds(4, lambda line: True, "merges")
    first.signal(signal.SIGTERM)
    assert first.wait(SECONDS) == 0, first.tail()
    assert "its checkpoint is saved in" in first.tail()
    assert not (run.path / "loop.0.pt").exists()
    trained = run.status()["learners"][0]["tokens_trained"]

    run.learners[0] = again = start_loop(run.path, "loop", run.learner_environment(0), **options)
    assert again.wait(SECONDS) == 0, again.tail()
    assert run.syncer.wait(SECONDS) == 0, run.syncer.tail()
    result = torch.load(run.path / "loop.0.pt")
    saved = latest_run(RunDirectory(run.directory, create=False)).tensors()
    assert all(torch.equal(result["values"][name], saved[name]) for name in saved)
    assert 0 < result["updates"] < 120
    states = [line for line in run.tape() if line["kind"] == "state"]
    assert [(line["source"], line["reason"]) for line in states][-1] == ("own", "")
    (account,) = run.status()["learners"]
    assert account["tokens_trained"] == trained + result["tokens"]
    assert account["tokens_merged"] == pytest.approx(account["tokens_trained"], abs=1)


def flat(values: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([values[name].flatten().double() for name in sorted(values)])


@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "zero2", "zero3"])
def test_one_learner_of_two_ranks_is_the_plain_loop(start_run: Any, tmp_path: Path, kind: str) -> None:
    if kind.startswith("zero"):
        pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: pip install -e '.[dev-long]'")
    plain = start_loop(tmp_path, "plain", {}, *RANKS, max_steps=STEPS, kind=kind)
    assert plain.wait(SECONDS) == 0, plain.tail()
    run = start_run(num_fragments=4, sync_every=4, outer_lr=1.0, outer_momentum=0.0, wire_format="fp32")
    learner = start_loop(run.path, "learner", run.learner_environment(0), *RANKS, max_steps=STEPS, kind=kind)
    try:
        assert learner.wait(SECONDS) == 0, learner.tail()
    finally:
        if learner.running():
            learner.kill()
    assert run.syncer.wait(SECONDS) == 0, run.syncer.tail()

    ours = [torch.load(run.path / f"learner.{rank}.pt") for rank in (0, 1)]
    theirs = torch.load(tmp_path / "plain.0.pt")
    saved = latest_run(RunDirectory(run.directory, create=False)).tensors()
    for result in ours:
        assert all(torch.equal(result["values"][name], saved[name]) for name in saved)
        assert result["updates"] == STEPS
        assert result["rates"] == theirs["rates"]
    assert all(torch.equal(ours[0]["state"][name], saved[name]) for name in saved), "accelerator.get_state_dict"
    movement = flat(theirs["values"]) - flat(theirs["start"])
    assert float((flat(ours[0]["values"]) - flat(theirs["values"])).norm()) <= 1e-4 * float(movement.norm())
    (account,) = run.status()["learners"]
    assert account["steps"] == STEPS
    assert account["tokens_trained"] == sum(result["tokens"] for result in ours)
    assert account["tokens_merged"] == pytest.approx(account["tokens_trained"], abs=1)


def test_deepspeed_learners_of_two_stages_in_one_run(start_run: Any) -> None:
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: pip install -e '.[dev-long]'")
    run = start_run(expected_learners=2, num_fragments=4, sync_every=8, finish_wait_seconds=120)
    for learner_id, kind in enumerate(("zero2", "zero3")):
        run.learners[learner_id] = learner = start_loop(
            run.path, kind, run.learner_environment(learner_id), *RANKS,
            kind=kind, data_seed=learner_id, max_steps=40, step_seconds=0.1,
        )  # fmt: skip
        run._all.append(learner)
    for learner in run.learners.values():
        assert learner.wait(SECONDS) == 0, learner.tail()
    assert run.syncer.wait(SECONDS) == 0, run.syncer.tail()
    together = [line for line in run.rounds() if len(line["participants"]) == 2]
    assert len(together) >= 8
    saved = latest_run(RunDirectory(run.directory, create=False)).tensors()
    for kind in ("zero2", "zero3"):
        for rank in (0, 1):
            held = torch.load(run.path / f"{kind}.{rank}.pt")["values"]
            assert all(torch.equal(saved[name], held[name]) for name in saved), (kind, rank)
