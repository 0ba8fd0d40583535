"""Real syncers and learners for the tests: each a process (and its children), started, watched, killed by pid."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from hf_diloco.syncer.tape import read_tape

SCRIPT = Path(__file__).parent / "train_tiny.py"
SYNCER = ("-m", "hf_diloco.cli.main")
DEADLINE_SECONDS = 120.0


def wait_until(condition: Callable[[], Any], what: str, seconds: float = DEADLINE_SECONDS) -> Any:
    """The first true value of ``condition``, looked at every 50 ms; fails after the deadline, saying ``what``."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {seconds:.0f} s in vain for {what}")
        time.sleep(0.05)
    return value


class Process:
    """One child process with its output in a file."""

    def __init__(self, command: list[str], log: Path, environment: dict[str, str]) -> None:
        self.log = log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **environment},
            )  # fmt: skip
        self.pid = self._process.pid

    def running(self) -> bool:
        return self._process.poll() is None

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def wait(self, seconds: float = DEADLINE_SECONDS) -> int:
        """Its exit code; with the end of its output in the failure if it does not end."""
        try:
            return self._process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.log.name} did not end in {seconds:.0f} s:\n{self.tail()}") from None

    def tail(self, size: int = 4000) -> str:
        return self.log.read_text(errors="replace")[-size:]


class Run:
    """A syncer and its learners in ``path``; ``end`` kills what is left of them."""

    def __init__(self, path: Path, *, script: Path = SCRIPT, syncer: Sequence[str] = SYNCER, **settings: Any) -> None:
        self.path, self._script = path, script
        self.directory = path / "run"
        flags = [text for name, value in settings.items() for text in (f"--{name.replace('_', '-')}", str(value))]
        command = [sys.executable, *syncer, "syncer", "--listen", "127.0.0.1:0"]
        path.mkdir(parents=True, exist_ok=True)
        self._syncer_command = [*command, "--run-dir", str(self.directory), *flags]
        self.learners: dict[int, Process] = {}
        self._all: list[Process] = []
        self.start_syncer()

    def start_syncer(self, *flags: str) -> None:
        """The first one, or one that goes on after the last has ended."""
        self.syncer = Process([*self._syncer_command, *flags], self.path / "syncer.log", self._mark())
        self._all.append(self.syncer)

    def status(self) -> dict[str, Any]:
        path = self.directory / "status.json"
        assert self.syncer.running() or path.exists(), f"the syncer ended:\n{self.syncer.tail()}"
        return json.loads(path.read_text()) if path.exists() else {}

    def accounts(self) -> dict[int, dict[str, Any]]:
        """What the syncer's status says of each learner that was started."""
        rows = {row["learner_id"]: row for row in self.status()["learners"]}
        assert rows.keys() == self.learners.keys()
        return rows

    def tape(self) -> list[dict[str, Any]]:
        path = self.directory / "tape.jsonl"
        return read_tape(path) if path.exists() else []

    def rounds(self) -> list[dict[str, Any]]:
        return [line for line in self.tape() if line["kind"] == "round"]

    def learner_environment(self, learner_id: int, token: str | None = None) -> dict[str, str]:
        """What a learner of this run is started with."""
        return {
            **self._mark(),
            "HF_DILOCO_SYNCER": wait_until(lambda: self.status().get("address"), "the syncer's address"),
            "HF_DILOCO_LEARNER_ID": str(learner_id),
            "HF_DILOCO_TOKEN_FILE": token or str(self.directory / "token"),
        }

    def start_learner(
        self, learner_id: int, token: str | None = None, *, launcher: Sequence[str] = (), **options: Any
    ) -> Process:
        environment = self.learner_environment(learner_id, token)
        options = {"data_seed": learner_id, **options}
        name = f"learner-{learner_id}"
        learner = start_script(self.path, name, environment, script=self._script, launcher=launcher, **options)
        self.learners[learner_id] = learner
        self._all.append(learner)
        return learner

    def result(self, learner_id: int) -> dict[str, Any]:
        return json.loads((self.path / f"learner-{learner_id}.json").read_text())

    def wait_for_rounds(self, count: int, where: Callable[[dict[str, Any]], bool], what: str) -> None:
        """Until ``count`` rounds on the tape hold ``where``."""
        wait_until(lambda: self._alive() and sum(map(where, self.rounds())) >= count, what)

    def _alive(self) -> bool:
        for process in (self.syncer, *self.learners.values()):
            if not process.running() and process.wait() not in (0, -signal.SIGKILL):
                raise AssertionError(f"{process.log.name} failed:\n{process.tail()}")
        return True

    def _mark(self) -> dict[str, str]:
        """By this variable all processes of the run are known, also those whose parents are gone."""
        return {"HF_DILOCO_TEST_RUN": str(self.path)}

    def _left(self) -> dict[psutil.Process, str]:
        found = {}
        for process in psutil.process_iter():
            try:
                if process.environ().get("HF_DILOCO_TEST_RUN") == str(self.path):
                    found[process] = f"pid {process.pid}: {' '.join(process.cmdline())}"
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def end(self) -> None:
        """Kill what still runs; nothing else, helper of a helper, may outlive that."""
        for process in self._all:
            if process.running():
                process.kill()
        try:
            wait_until(lambda: not self._left(), f"the end of {list(self._left().values())}", 30)
        finally:
            for left in self._left():  # ranks whose launcher was killed, for example
                with contextlib.suppress(psutil.NoSuchProcess):
                    left.kill()


def start_script(
    path: Path,
    name: str,
    environment: dict[str, str],
    *,
    script: Path = SCRIPT,
    launcher: Sequence[str] = (),
    **options: Any,
) -> Process:
    """``script`` in a process of its own, or by a launcher; what it takes as ``--result`` is ``path/name.json``."""
    path.mkdir(parents=True, exist_ok=True)
    flags = [text for key, value in options.items() for text in (f"--{key}", str(value))]
    command = [*(launcher or [sys.executable]), str(script), "--output_dir", str(path / "out")]
    return Process([*command, "--result", str(path / f"{name}.json"), *flags], path / f"{name}.log", environment)
