"""SIGTERM to whatever pid a user has: the learner drains, takes leave, saves, ends with 0; nothing is left behind."""

from __future__ import annotations

import json
import os
import shutil
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
GUARD = [sys.executable, "-m", "hf_diloco.cli.main", "guard"]
CONTAINER = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
LIMIT_SECONDS = 30.0  # from the signal to the end
SETTINGS = {"num_fragments": 4, "sync_every": 4}

needs_namespaces = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="only root may make a pid namespace"
)


class Preempted:
    """The script as a learner, in a process group of its own, and what is to be seen of its end."""

    def __init__(self, run: Run, prefix: list[str] = PYTHON, learner_id: int = 0, **options: Any) -> None:
        self.run, self.learner_id = run, learner_id
        address = wait_until(lambda: run.status().get("address"), "the syncer's address")
        environment = {
            **run._mark(),
            "HF_DILOCO_SYNCER": address,
            "HF_DILOCO_LEARNER_ID": str(learner_id),
            "HF_DILOCO_TOKEN_FILE": str(run.directory / "token"),
            "PYTHONUNBUFFERED": "1",
        }
        flags = [text for name, value in options.items() for text in (f"--{name}", str(value))]
        command = ["setsid", *prefix, str(SCRIPT), "--output_dir", str(run.path / "out"), *flags]
        self.process = Process(command, run.path / f"learner-{learner_id}.log", environment)
        run._all.append(self.process)

    def until_merged(self, rounds: int = 6) -> None:
        def merged() -> bool:
            assert self.process.running(), self.process.tail()
            participants = [[item["learner_id"] for item in line["participants"]] for line in self.run.rounds()]
            return sum(self.learner_id in learner_ids for learner_ids in participants) >= rounds

        wait_until(merged, f"merges of learner {self.learner_id}")

    def trainer(self) -> psutil.Process:
        """The process that trains (of a container as it is seen from outside)."""
        for process in (psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)):
            if process.cmdline()[1:2] in ([str(SCRIPT)], ["-u"]) and "launch" not in process.cmdline():
                return process
        raise AssertionError(f"nobody trains:\n{self.process.tail()}")

    def check_end(self, since: float) -> None:
        """It took leave and saved the step that it was at, did not go on with the script, and left nothing."""
        self.check_nothing_left()
        assert time.monotonic() - since < LIMIT_SECONDS
        text = self.process.tail(20000)
        assert "the script goes on" not in text, text
        assert "on_train_end of a later callback" in text, text
        assert [line["for_good"] for line in self.leaves()] == [False], self.leaves()
        assert "told to stop" in self.leaves()[0]["reason"]
        account = self.account()
        assert account["tokens_merged"] + account["tokens_overwritten"] == account["tokens_trained"] > 0
        self.check_checkpoint()

    def leaves(self) -> list[dict[str, Any]]:
        def found() -> list[dict[str, Any]]:
            lines = [line for line in self.run.tape() if line["kind"] == "leave"]
            return [line for line in lines if line["learner_id"] == self.learner_id]

        return wait_until(found, "the leave on the tape", 10)

    def account(self) -> dict[str, Any]:
        """What the syncer says of it once it is away."""

        def away() -> dict[str, Any] | None:
            rows = {row["learner_id"]: row for row in self.run.status().get("learners", [])}
            return rows[self.learner_id] if rows[self.learner_id]["state"] == "absent" else None

        return wait_until(away, "the learner to be away", 10)

    def check_checkpoint(self) -> None:
        (checkpoint,) = self.checkpoints()
        names = {path.name for path in checkpoint.iterdir()}
        assert {"model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"} <= names
        state = json.loads((checkpoint / "trainer_state.json").read_text())
        assert checkpoint.name == f"checkpoint-{state['global_step']}"

    def checkpoints(self) -> list[Path]:
        return list((self.run.path / "out" / f"learner-{self.learner_id}").glob("checkpoint-*"))

    def check_nothing_left(self) -> None:
        def left() -> list[str]:
            found = []
            for process in psutil.process_iter():
                try:
                    mine = process.environ().get("HF_DILOCO_LEARNER_ID") == str(self.learner_id)
                    if mine and process.environ().get("HF_DILOCO_TEST_RUN") == str(self.run.path):
                        found.append(f"pid {process.pid}: {' '.join(process.cmdline())}")
                except psutil.Error:
                    continue
            return found

        wait_until(lambda: not left(), f"the end of {left()}", LIMIT_SECONDS)


@pytest.mark.long
def test_one_after_the_other(start_run: Any) -> None:
    """SIGTERM to the trainer; to `accelerate launch`, which dies of it; to a process group with data workers.

    The third waits for its workers all the time, so it needs them to the last. The others go on meanwhile.
    """
    run = start_run(expected_learners=3, **SETTINGS)
    alone, launched = Preempted(run), Preempted(run, ACCELERATE, learner_id=1)
    loading = Preempted(run, learner_id=2, num_workers=2, row_seconds=0.02, step_seconds=0)
    for learner in (alone, launched, loading):
        learner.until_merged()

    since = time.monotonic()
    alone.process.signal(signal.SIGTERM)
    assert alone.process.wait(LIMIT_SECONDS) == 0, alone.process.tail()
    alone.check_end(since)

    since = time.monotonic()
    launched.process.signal(signal.SIGTERM)
    launched.check_end(since)
    assert launched.process.wait() == -signal.SIGTERM

    workers = [child for child in loading.trainer().children() if str(SCRIPT) in child.cmdline()]
    assert len(workers) == 2
    since = time.monotonic()
    os.killpg(loading.process.pid, signal.SIGTERM)
    assert loading.process.wait(LIMIT_SECONDS) == 0, loading.process.tail()
    loading.check_end(since)


@pytest.mark.long
def test_when_the_launcher_is_killed(start_run: Any) -> None:
    learner = Preempted(start_run(**SETTINGS), ACCELERATE)
    learner.until_merged()
    since = time.monotonic()
    learner.process.kill()
    learner.check_end(since)


@pytest.mark.long
def test_during_an_evaluation_with_data_workers(start_run: Any) -> None:
    learner = Preempted(start_run(**SETTINGS), eval_every=20, eval_seconds=0.2, num_workers=1)
    wait_until(lambda: "evaluating" in learner.process.tail(), "the evaluation")  # which takes 100 s
    since = time.monotonic()
    os.killpg(learner.process.pid, signal.SIGTERM)
    assert learner.process.wait(LIMIT_SECONDS) == 0, learner.process.tail()
    learner.check_end(since)


@pytest.mark.long
def test_at_the_start_gate(start_run: Any) -> None:
    run = start_run(expected_learners=2, **SETTINGS)
    learner = Preempted(run)
    wait_until(lambda: any(line["kind"] == "values" for line in run.tape()), "the learner's values")
    since = time.monotonic()
    learner.process.signal(signal.SIGTERM)
    assert learner.process.wait(LIMIT_SECONDS) == 0, learner.process.tail()
    assert time.monotonic() - since < LIMIT_SECONDS
    assert not learner.checkpoints()
    assert [line["for_good"] for line in learner.leaves()] == [False]
    learner.check_nothing_left()


@pytest.mark.long
def test_while_it_waits_for_the_end_of_the_run(start_run: Any) -> None:
    """It has done all its steps, the other one is far behind."""
    run = start_run(expected_learners=2, total_steps=200, **SETTINGS)
    learner = Preempted(run, max_steps=200, step_seconds=0.01)
    other = Preempted(run, learner_id=1, max_steps=200, step_seconds=1.5)

    def waits() -> bool:
        assert learner.process.running(), learner.process.tail()
        return any(row["state"] == "finished" for row in run.status().get("learners", []))

    wait_until(waits, "the learner to be done")
    since = time.monotonic()
    learner.process.signal(signal.SIGTERM)
    assert learner.process.wait(LIMIT_SECONDS) == 0, learner.process.tail()
    learner.check_end(since)
    assert other.process.running()


@pytest.mark.long
def test_a_second_sigterm_ends_it_at_once(start_run: Any) -> None:
    """The first is noticed at the end of a step, which takes a minute."""
    learner = Preempted(start_run(**SETTINGS), step_seconds=60)
    wait_until(lambda: "first step" in learner.process.tail(), "the first step")
    learner.process.signal(signal.SIGTERM)
    with pytest.raises(AssertionError, match="did not end"):
        learner.process.wait(4)  # longer than the time for which a second one is taken for the same
    learner.process.signal(signal.SIGTERM)
    assert learner.process.wait(3) == -signal.SIGTERM
    learner.check_nothing_left()


@pytest.mark.long
def test_ctrl_c_is_a_keyboard_interrupt(start_run: Any) -> None:
    learner = Preempted(start_run(**SETTINGS), num_workers=1)
    learner.until_merged()
    os.killpg(learner.process.pid, signal.SIGINT)
    assert learner.process.wait(LIMIT_SECONDS) not in (0, None)
    assert "KeyboardInterrupt" in learner.process.tail()
    learner.check_nothing_left()


@pytest.mark.long
@pytest.mark.parametrize("whom", ["guard", "launcher", "group"])
def test_under_a_guard(start_run: Any, whom: str) -> None:
    learner = Preempted(start_run(**SETTINGS), [*GUARD, *ACCELERATE])
    learner.until_merged()
    guard = psutil.Process(learner.process.pid)
    (launcher,) = guard.children()
    since = time.monotonic()
    if whom == "group":  # as a service manager does
        for process in (guard, *guard.children(recursive=True)):
            process.terminate()
    else:
        (guard if whom == "guard" else launcher).terminate()
    assert learner.process.wait(LIMIT_SECONDS) == 0, learner.process.tail()
    learner.check_end(since)


@pytest.mark.long
@needs_namespaces
@pytest.mark.parametrize("prefix", [PYTHON, [*GUARD, *ACCELERATE]], ids=["python", "guard"])
def test_as_the_first_process_of_a_container(start_run: Any, prefix: list[str]) -> None:
    learner = Preempted(start_run(**SETTINGS), [*CONTAINER, *prefix])
    learner.until_merged()
    (first,) = psutil.Process(learner.process.pid).children()
    since = time.monotonic()
    first.terminate()
    assert learner.process.wait(LIMIT_SECONDS) == 0, learner.process.tail()
    learner.check_end(since)
