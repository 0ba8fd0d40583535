"""Child processes of ``hf-diloco launch``, each in a session of its own under a guard."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from hf_diloco.cli.output import last_lines, new_output
from hf_diloco.errors import DiLoCoError

_TAIL_LINES = 15

# What the job that hf-diloco launch itself runs in may have set for its ranks; it would mislead a learner, a world of
# its own.
_OUTER_JOB = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
    "ROLE_WORLD_SIZE", "ROLE_NAME", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "MPI_LOCALNRANKS", "MPI_LOCALRANKID",
    "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_TASKS_PER_NODE",
    "SLURM_NTASKS_PER_NODE", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE", "SLURM_GTIDS",
)  # fmt: skip
_OUTER_PREFIXES = (
    "TORCHELASTIC_", "PET_", "OMPI_COMM_WORLD_", "MV2_COMM_WORLD_", "PMI_", "PMIX_", "PALS_", "HF_DILOCO_",
)  # fmt: skip


class Child:
    """One command, its log, and its leash: the pipe whose end stops it.

    Args:
        command: program and arguments.
        log: gets standard output and error; if it cannot be written, the command goes on all the same.
        environment: of the command.
        grace_seconds: from :meth:`stop` to SIGKILL.
        keeps_alive: another child that does not see the end of its own leash before this one is gone.

    Raises:
        DiLoCoError: the log cannot be written, or no process can be started.
    """

    def __init__(
        self,
        command: list[str],
        log: Path,
        environment: Mapping[str, str],
        *,
        grace_seconds: float,
        keeps_alive: Child | None = None,
    ) -> None:
        self.log = log
        self.grace_seconds = grace_seconds
        self._command, self._environment = command, dict(environment)
        self._leash: int
        self._leash_end, self._leash = os.pipe()
        self._kept_alive = [keeps_alive._leash] if keeps_alive else []
        self._output = -1
        try:
            self._start("wb")
        except DiLoCoError:
            self.stop()
            self.close()
            raise

    def _start(self, mode: str) -> None:
        guard = [sys.executable, "-m", "hf_diloco.cli.guard", str(self.grace_seconds), *self._command]
        self.close()
        try:
            self._output = new_output()
            with self.log.open(mode) as log:
                self._guard = subprocess.Popen(
                    guard,
                    stdin=self._leash_end,
                    stdout=log,
                    stderr=self._output,
                    env=self._environment,
                    start_new_session=True,
                    pass_fds=self._kept_alive,
                )
        except OSError as error:
            raise DiLoCoError(f"{self._command[0]} could not be started with the log {self.log}: {error}") from error
        self.started_at = time.monotonic()

    def restart(self, command: list[str] | None = None) -> None:
        """Start it again after its end, with the same log and on the same leash.

        Args:
            command: from now on; default: as before.

        Raises:
            DiLoCoError: it cannot be started.
        """
        self.kill()
        self._command = command or self._command
        self._start("ab")

    def poll(self) -> int | None:
        """The exit code of the command (128 + n: killed by signal n) when all its processes are gone; else None."""
        code = self._guard.poll()
        return 128 - code if code is not None and code < 0 else code

    def stop(self) -> None:
        """SIGTERM to its processes, SIGKILL to those left after the grace time. Returns at once. Idempotent."""
        for end in (self._leash, self._leash_end):
            if end >= 0:
                os.close(end)
        self._leash = self._leash_end = -1

    def stop_at_once(self) -> None:
        """SIGKILL to all its processes, after :meth:`stop`."""
        if self._guard.poll() is None:
            self._guard.send_signal(signal.SIGTERM)  # a guard that has been told already takes it like that

    def wait(self, timeout_seconds: float) -> bool:
        """Whether all its processes are gone, at the latest after ``timeout_seconds``."""
        try:
            self._guard.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        """SIGKILL to its whole process group, if its guard does not answer or was killed itself."""
        code = self._guard.poll()
        if code is not None and code >= 0:
            return  # the guard has seen the last of them
        try:
            os.killpg(self._guard.pid, signal.SIGKILL)
        except ProcessLookupError:
            return

    def last_lines(self) -> str:
        """What it has printed last since it was started, whether or not that is in the log. Not after :meth:`close`."""
        return last_lines(self._output, _TAIL_LINES)

    def close(self) -> None:
        """Forget what it has printed; the log has it. Idempotent."""
        if self._output >= 0:
            os.close(self._output)
        self._output = -1


def clean_environment() -> dict[str, str]:
    """This process's environment without what an outer job has set for its own ranks."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in _OUTER_JOB and not name.startswith(_OUTER_PREFIXES)
    }


def names_of_gpus() -> list[str]:
    """The GPUs that torch can use here, as CUDA_VISIBLE_DEVICES names them; asked in another process, to stay small."""
    if not (Path("/dev/nvidia0").exists() or Path("/dev/nvidiactl").exists() or Path("/dev/kfd").exists()):
        return []
    question = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
    answer = subprocess.run(question, capture_output=True, text=True, timeout=300, check=False)
    num_gpus = int(answer.stdout) if answer.returncode == 0 else 0
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return visible[:num_gpus] or [str(index) for index in range(num_gpus)]
