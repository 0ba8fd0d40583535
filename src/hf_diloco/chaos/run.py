"""A run that faults can be done to: a syncer and learners as processes, behind a proxy, started again when killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from hf_diloco.chaos import census, clock
from hf_diloco.chaos.proxy import Proxy
from hf_diloco.errors import DiLoCoError
from hf_diloco.syncer.run_directory import RunDirectory

_START_SECONDS = 180.0
_POLL_SECONDS = 0.05
_AGAIN_SECONDS = 1.0  # a supervisor's pause after a process that ended by itself
_END_SECONDS = 10.0
_ISLAND_PORT = 29600  # in a learner's own network: anything will do
_TAIL_BYTES = 2000


@dataclass
class Life:
    """One process of the run that was started by us, from start to end; times are of the monotonic clock."""

    learner_id: int | None  # None: the syncer
    pid: int
    started_at: float
    ended_at: float | None = None
    exit_code: int | None = None  # -n: killed by signal n


class ChaosRun:
    """One run. Use as a context manager: nothing of it is left afterwards.

    Args:
        path: a directory; the run directory, logs and witnesses go there.
        script: the training script and its arguments.
        num_learners: learners 0 to this, exclusive.
        settings: flags of ``hf-diloco syncer``.
        islands: give each learner a network of its own, so that its network can fail.
        clocks: let wall clocks jump.
        accelerate_config: start learners through ``accelerate launch`` with this file.
        restarts: start a process that was killed, or failed, again.

    Raises:
        DiLoCoError: something that is needed is not there.
    """

    def __init__(
        self,
        path: Path,
        script: Sequence[str],
        num_learners: int,
        settings: Sequence[str] = (),
        *,
        islands: bool = True,
        clocks: bool = False,
        accelerate_config: Path | None = None,
        restarts: bool = True,
    ) -> None:
        self.path, self.num_learners = path, num_learners
        path.mkdir(parents=True, exist_ok=True)
        self.directory = RunDirectory(path / "run")
        self.mark = uuid.uuid4().hex
        self.proxy = Proxy()
        self.lives: list[Life] = []
        self._script, self._settings = list(script), list(settings)
        self._islands, self._accelerate_config = islands, accelerate_config
        self._clock_library = clock.build(path) if clocks else None
        self._restarts = restarts
        self._processes: dict[int | None, subprocess.Popen[bytes]] = {}
        self._current: dict[int | None, Life] = {}
        self._again_at: dict[int | None, float] = {}
        self._address: str | None = None
        self._tape: list[dict[str, Any]] = []
        self._tape_bytes = 0

    def __enter__(self) -> ChaosRun:
        self.proxy.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restarts = False
        try:
            self._kill_all()
        finally:
            self.proxy.__exit__()

    # ---------------------------------------------------------------------------------------------------- what is there

    def status(self) -> dict[str, Any]:
        """The syncer's last ``status.json``."""
        return self.directory.read_status()

    def tape(self) -> list[dict[str, Any]]:
        """The event tape so far; only what is new is read."""
        if self.directory.tape.exists():
            with self.directory.tape.open("rb") as file:
                file.seek(self._tape_bytes)
                whole, end, _ = file.read().rpartition(b"\n")
            self._tape_bytes += len(whole + end)
            self._tape += [json.loads(line) for line in whole.split(b"\n") if line]
        return self._tape

    def rounds(self) -> list[dict[str, Any]]:
        """The merges on it."""
        return [line for line in self.tape() if line["kind"] == "round"]

    def witness(self, learner_id: int) -> Path:
        """Where this learner's witness writes; see :mod:`hf_diloco.chaos.witness`."""
        return self.path / f"witness-{learner_id}.jsonl"

    def clock(self, learner_id: int | None) -> Path:
        """By this file the wall clock of a learner, or of the syncer, is set."""
        return self.path / f"clock-{'syncer' if learner_id is None else learner_id}"

    def processes(self) -> list[census.Process]:
        """All processes of the run."""
        return census.processes(self.mark)

    def process(self, learner_id: int | None) -> census.Process | None:
        """The process that was started for this learner, or for the syncer (None), if it lives."""
        life = self._current.get(learner_id)
        return next((one for one in self.processes() if life and one.pid == life.pid), None)

    def log(self, learner_id: int | None) -> Path:
        """Output of this learner's processes, or of the syncer's."""
        return self.directory.logs / ("syncer.log" if learner_id is None else f"learner-{learner_id}.log")

    @property
    def is_over(self) -> bool:
        """The syncer has come to the end of the run."""
        life = self._current.get(None)
        return life is not None and life.exit_code == 0

    # --------------------------------------------------------------------------------------------------------- starting

    def start(self) -> None:
        """Start the syncer, then the learners; returns when all are started, not yet training.

        Raises:
            DiLoCoError: one of them could not be started.
        """
        self._start_syncer()
        deadline = time.monotonic() + _START_SECONDS
        while not isinstance(address := self.status().get("address"), str):
            self._look(None)
            if self._current[None].ended_at is not None or time.monotonic() > deadline:
                raise DiLoCoError(f"the syncer did not start:\n{self.tail(None)}")
            time.sleep(_POLL_SECONDS)
        self._address = address
        host, _, port = address.rpartition(":")
        self.proxy.aim(host, int(port))
        for learner_id in range(self.num_learners):
            self.start_learner(learner_id)

    def _start_syncer(self) -> None:
        listen = self._address or "127.0.0.1:0"
        command = [sys.executable, "-m", "hf_diloco.cli.main", "syncer", "--listen", listen]
        command += ["--run-dir", str(self.directory.path), *self._settings]
        self._start(None, command, {"PYTHONUNBUFFERED": "1"})

    def start_learner(self, learner_id: int) -> None:
        """Start this learner, in a network of its own if the run has such.

        Raises:
            DiLoCoError: it cannot have one.
        """
        assert self._address is not None
        where = f"127.0.0.1:{_ISLAND_PORT}" if self._islands else self._address
        environment = {
            "HF_DILOCO_SYNCER": where,
            "HF_DILOCO_LEARNER_ID": str(learner_id),
            "HF_DILOCO_TOKEN_FILE": str(self.directory.token),
            "HF_DILOCO_NUM_SHARDS": str(self.num_learners),
            "PYTHONUNBUFFERED": "1",
        }
        witness = ["-m", "hf_diloco.chaos.witness", str(self.witness(learner_id)), *self._script]
        command = [sys.executable, *witness]
        if self._accelerate_config:
            command = [sys.executable, "-m", "accelerate.commands.launch", "--quiet", "--main_process_port", "0"]
            command += ["--config_file", str(self._accelerate_config), *witness]
        if not self._islands:
            self._start(learner_id, command, environment)
            return
        environment |= {"HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": "lo"}  # there is nothing but the syncer
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                island = ["-m", "hf_diloco.chaos.island", str(theirs.fileno()), str(_ISLAND_PORT)]
                self._start(learner_id, [sys.executable, *island, *command], environment, pass_fds=[theirs.fileno()])
            ours.settimeout(_START_SECONDS)
            _, fds, _, _ = socket.recv_fds(ours, 1, 1)
        if fds:
            self.proxy.serve(learner_id, socket.socket(fileno=fds[0]))
        elif self._processes[learner_id].wait() >= 0:  # killed meanwhile: it will be started again
            raise DiLoCoError(f"learner {learner_id} could not be started:\n{self.tail(learner_id)}")

    def _start(
        self, learner_id: int | None, command: list[str], environment: Mapping[str, str], pass_fds: Sequence[int] = ()
    ) -> None:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("HF_DILOCO_")}
        inherited.setdefault("OMP_NUM_THREADS", "1")
        if self._clock_library:
            environment = {**environment, **clock.environment(self._clock_library, self.clock(learner_id))}
        with self.log(learner_id).open("ab") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**inherited, **environment, census.MARK: self.mark},
                pass_fds=pass_fds,
                start_new_session=True,
            )
        self._processes[learner_id] = process
        life = Life(learner_id, process.pid, time.monotonic())
        self._current[learner_id] = life
        self.lives.append(life)

    # --------------------------------------------------------------------------------------------------------- watching

    def tick(self) -> None:
        """Take note of processes that ended, and start again what has to be. Call it often."""
        for learner_id in list(self._processes):
            self._look(learner_id)
        for learner_id, again_at in list(self._again_at.items()):
            if self.is_over or not self._restarts:
                self._again_at.clear()
            elif time.monotonic() >= again_at:
                del self._again_at[learner_id]
                if learner_id is None:
                    self._start_syncer()
                else:
                    self.start_learner(learner_id)

    def _look(self, learner_id: int | None) -> None:
        life, code = self._current[learner_id], self._processes[learner_id].poll()
        if code is None or life.ended_at is not None:
            return
        life.ended_at, life.exit_code = time.monotonic(), code
        if code != 0 and self._restarts and not self.is_over:
            # killed: at once. Failed by itself: a moment later
            self._again_at[learner_id] = life.ended_at + (0.0 if code < 0 else _AGAIN_SECONDS)

    def wait(self, seconds: float) -> bool:
        """Go on until the run is over and every learner has ended; False if that took too long."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.tick()
            if self.is_over and all(life.ended_at is not None for life in self._current.values()):
                return True
            time.sleep(_POLL_SECONDS)
        return False

    def running(self) -> list[int]:
        """Learners whose process lives."""
        return [who for who, life in self._current.items() if who is not None and life.ended_at is None]

    def tail(self, learner_id: int | None) -> str:
        """The end of a log."""
        path = self.log(learner_id)
        return path.read_text(errors="replace")[-_TAIL_BYTES:] if path.exists() else ""

    # ----------------------------------------------------------------------------------------------------------- ending

    def left(self, seconds: float = _END_SECONDS) -> list[census.Process]:
        """What still runs of a run that is over, after it has had this long to go away."""
        deadline = time.monotonic() + seconds
        while (found := self.processes()) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        return found

    def _kill_all(self) -> None:
        deadline = time.monotonic() + _END_SECONDS
        while (found := self.processes()) and time.monotonic() < deadline:
            for one in found:
                one.signal(signal.SIGKILL)
            time.sleep(_POLL_SECONDS)
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_SECONDS)
