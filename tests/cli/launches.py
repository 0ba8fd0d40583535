"""One `hf-diloco launch` with all its processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from hf_diloco.syncer.run_directory import RunDirectory
from hf_diloco.syncer.tape import read_tape

PATIENCE = 120.0
TRAIN = Path(__file__).parent / "launched.py"


def wait_until(condition: Callable[[], Any], what: str, seconds: float = PATIENCE) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {seconds:.0f} s in vain for {what}"
        time.sleep(0.05)
    return value


class Launch:
    """One `hf-diloco launch`; its processes are known by a variable that they inherit."""

    def __init__(
        self,
        path: Path,
        *words: object,
        options: tuple[object, ...] = (),
        prefix: tuple[str, ...] = (),
        terminal: int = subprocess.DEVNULL,
        **env: str,
    ) -> None:
        self.directory = RunDirectory(path / "run", create=True)
        self.output = path / "output.txt"
        command = [*prefix, sys.executable, "-m", "hf_diloco.cli.main", "launch", "--num-learners", "2"]
        command += ["--run-dir", str(self.directory.path), "--num-fragments", "4", "--sync-every", "4"]
        command += [*map(str, options), str(TRAIN), *map(str, words)]
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=terminal,
                cwd=path,
                env={**os.environ, "TEST_MARK_OF_LAUNCH": str(path), **env},
            )
        self.path = path

    def all_processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("TEST_MARK_OF_LAUNCH") == str(self.path):
                    found += [process] if process.status() != psutil.STATUS_ZOMBIE else []
            except psutil.Error:
                continue
        return found

    def trainers(self) -> list[psutil.Process]:
        """The training scripts themselves, below `accelerate launch`."""
        found = []
        for process in self.all_processes():
            try:
                words = process.cmdline()
            except psutil.Error:
                continue
            found += [process] if str(TRAIN) in words[1:3] else []
        return found

    def trainer(self, learner_id: int, rank: int = 0) -> psutil.Process:
        wanted = (str(learner_id), str(rank))
        environments = ((item, item.environ()) for item in self.trainers())
        return next(item for item, env in environments if (env["HF_DILOCO_LEARNER_ID"], env.get("RANK", "0")) == wanted)

    def joins(self, learner_id: int) -> list[str]:
        """Incarnations of a learner, one a join."""
        lines = [line for line in read_tape(self.directory.tape) if line["kind"] == "join"]
        return [line["incarnation"] for line in lines if line["learner_id"] == learner_id]

    def merged(self) -> list[str]:
        """Ids of all updates that were merged; they name the sender's incarnation."""
        rounds = [line for line in read_tape(self.directory.tape) if line["kind"] == "round"]
        return [item["update_id"] for line in rounds for item in line["participants"]]

    def leaves(self) -> list[dict[str, Any]]:
        return [line for line in read_tape(self.directory.tape) if line["kind"] == "leave"]

    def accounts(self) -> list[dict[str, Any]]:
        """What the syncer's status says of the two learners."""
        accounts = self.directory.read_status()["learners"]
        assert [account["learner_id"] for account in accounts] == [0, 1]
        return accounts

    def assert_drained_and_saved(self) -> None:
        """Both learners took leave when they were told to stop, saved, and ended with 0; then the syncer ended."""
        for learner_id in (0, 1):
            assert f"Learner {learner_id} has ended (exit code 0)." in self.output.read_text(), self.text()
            (checkpoint,) = (self.path / "out" / f"learner-{learner_id}").glob("checkpoint-*")
            assert (checkpoint / "optimizer.pt").exists()
        leaves = self.leaves()
        assert sorted(line["learner_id"] for line in leaves) == [0, 1]
        assert all("told to stop" in line["reason"] and not line["for_good"] for line in leaves)
        for account in self.accounts():
            assert account["tokens_merged"] + account["tokens_overwritten"] == account["tokens_trained"] > 0
        assert "was stopped before its end" in self.output.read_text()
        assert (self.directory.model / "model.safetensors").exists(), self.text()

    def until_training(self, num_learners: int = 2, seconds: float = PATIENCE) -> None:
        def training() -> bool:
            assert self.process.poll() is None, self.text()
            status = self.directory.read_status()
            states = [learner["state"] for learner in status.get("learners", [])]
            return states.count("training") == num_learners and (status.get("merges") or 0) >= 1

        wait_until(training, "training", seconds)

    def wait(self, seconds: float = PATIENCE) -> int:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it did not end in {seconds:.0f} s:\n{self.text()}") from None

    def text(self) -> str:
        return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}" for log in self.logs())

    def logs(self) -> list[Path]:
        """All that was printed."""
        return [self.output, *sorted(self.directory.logs.iterdir())]

    def assert_nothing_left(self, seconds: float = 5.0) -> None:
        deadline = time.monotonic() + seconds
        while left := self.all_processes():
            if time.monotonic() > deadline:
                shown = "\n".join(f"{process.pid} {process.cmdline()}" for process in left)
                raise AssertionError(f"left behind:\n{shown}\n{self.text()}")
            time.sleep(0.05)
