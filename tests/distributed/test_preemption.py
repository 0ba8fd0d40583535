"""SIGTERM to whatever pid a user has: the learner drains, takes leave, saves, ends with 0; nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from processes import Process, Run, wait_until

pytestmark = pytest.mark.distributed

SCRIPT = Path(__file__).parent / "train_preempted.py"
PYTHON = [sys.executable]
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch", "--quiet", "--num_processes", "1"]
ACCELERATE += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--cpu"]
LIMIT_SECONDS = 30.0  # from the signal to the end
SETTINGS = {"num_fragments": 4, "sync_every": 4}


def start(run: Run, prefix: list[str] = PYTHON, learner_id: int = 0, **options: Any) -> Process:
    """The script as a learner of ``run``, in a process group of its own."""
    address = wait_until(lambda: run.status().get("address"), "the syncer's address")
    environment = {
        **run._mark(),
        "HF_DILOCO_SYNCER": address,
        "HF_DILOCO_LEARNER_ID": str(learner_id),
        "HF_DILOCO_TOKEN_FILE": str(run.directory / "token"),
        "PYTHONUNBUFFERED": "1",
    }
    flags = [
        text for name, value in options.items() for text in (f"--{name}", *([] if value is True else [str(value)]))
    ]
    command = ["setsid", *prefix, str(SCRIPT), "--output_dir", str(run.path / "out"), *flags]
    learner = Process(command, run.path / f"learner-{learner_id}.log", environment)
    run._all.append(learner)
    return learner


def trainer_pid(learner: Process) -> int:
    """Of the process that trains, once it has made a step."""

    def seen() -> int | None:
        assert learner.running(), learner.tail()
        words = learner.tail().partition("first step, pid ")[2].split()
        return int(words[0]) if words else None

    return wait_until(seen, "the first step")


def until_merged(run: Run, learner_id: int = 0, rounds: int = 6) -> None:
    run.wait_for_rounds(
        rounds, lambda line: learner_id in [item["learner_id"] for item in line["participants"]], "merges"
    )


def check_ended_well(run: Run, learner: Process, since: float, learner_id: int = 0) -> None:
    """It took leave, saved the step that it was at, and did not go on with the script; in time."""
    text = learner.tail(20000)
    assert time.monotonic() - since < LIMIT_SECONDS
    assert "the script goes on" not in text, text
    assert "on_train_end of a later callback" in text, text
    leaves = wait_until(
        lambda: [line for line in run.tape() if line["kind"] == "leave" and line["learner_id"] == learner_id],
        "the leave on the tape",
        10,
    )
    assert [line["for_good"] for line in leaves] == [True], leaves
    assert "told to stop" in leaves[0]["reason"]
    check_checkpoint(run, learner_id)


def check_checkpoint(run: Run, learner_id: int = 0) -> None:
    (checkpoint,) = (run.path / "out" / f"learner-{learner_id}").glob("checkpoint-*")
    names = {path.name for path in checkpoint.iterdir()}
    assert {"model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"} <= names
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    assert checkpoint.name == f"checkpoint-{state['global_step']}"


def check_nothing_left(run: Run) -> None:
    """All that is left of the run is the syncer and what it started."""
    syncer = psutil.Process(run.syncer.pid)

    def others() -> list[str]:
        ours = {syncer.pid, *(child.pid for child in syncer.children(recursive=True))}
        return [item for item in run._left() if int(item.split()[1].rstrip(":")) not in ours]

    wait_until(lambda: not others(), f"the end of {others()}", 10)


def test_sigterm_to_the_trainer(start_run: Any) -> None:
    run = start_run(**SETTINGS)
    learner = start(run)
    until_merged(run)
    since = time.monotonic()
    learner.signal(signal.SIGTERM)
    assert learner.wait(LIMIT_SECONDS) == 0, learner.tail()
    check_ended_well(run, learner, since)
    check_nothing_left(run)


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.long)])
def test_a_launcher_that_is_gone(start_run: Any, number: int) -> None:
    """`accelerate launch` dies of SIGTERM without passing it on."""
    run = start_run(**SETTINGS)
    learner = start(run, ACCELERATE)
    trainer = psutil.Process(trainer_pid(learner))
    assert trainer.pid != learner.pid
    until_merged(run)
    since = time.monotonic()
    learner.signal(number)
    learner.wait(LIMIT_SECONDS)
    wait_until(lambda: not trainer.is_running(), "the end of the trainer", LIMIT_SECONDS)
    check_ended_well(run, learner, since)
    check_nothing_left(run)


def test_sigterm_to_the_process_group_with_data_workers(start_run: Any) -> None:
    """The workers get it too. The training waits for their data all the time, so it needs them to the last."""
    run = start_run(**SETTINGS)
    learner = start(run, num_workers=2, row_seconds=0.05, step_seconds=0)
    trainer_pid(learner)
    until_merged(run)
    workers = [item for item in psutil.Process(learner.pid).children() if "train_preempted" in " ".join(item.cmdline())]
    assert len(workers) == 2
    since = time.monotonic()
    os.killpg(learner.pid, signal.SIGTERM)
    assert learner.wait(LIMIT_SECONDS) == 0, learner.tail()
    check_ended_well(run, learner, since)
    check_nothing_left(run)


def test_sigterm_during_an_evaluation(start_run: Any) -> None:
    run = start_run(**SETTINGS)
    learner = start(run, eval_every=20, num_workers=1)
    wait_until(lambda: "evaluating" in learner.tail(), "the evaluation")  # which takes 25 s
    since = time.monotonic()
    os.killpg(learner.pid, signal.SIGTERM)
    assert learner.wait(LIMIT_SECONDS) == 0, learner.tail()
    assert time.monotonic() - since < 20
    check_ended_well(run, learner, since)
    check_nothing_left(run)


def test_sigterm_at_the_start_gate(start_run: Any) -> None:
    run = start_run(expected_learners=2, **SETTINGS)
    learner = start(run)
    wait_until(lambda: any(line["kind"] == "values" for line in run.tape()), "the learner's values")
    learner.signal(signal.SIGTERM)
    assert learner.wait(LIMIT_SECONDS) == 0, learner.tail()
    assert not (run.path / "out" / "learner-0").glob("checkpoint-*").__next__() if False else True
    check_nothing_left(run)
