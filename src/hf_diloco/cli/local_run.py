"""A syncer and its learners on one machine: started, watched, and all ended in the end."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

from hf_diloco.cli.processes import Child, clean_environment, count_gpus
from hf_diloco.cli.table import Display, count, learners, merged_of_trained, number, size, word
from hf_diloco.errors import DiLoCoError
from hf_diloco.syncer.run_directory import RunDirectory

_POLL_SECONDS = 0.25
_SYNCER_START_SECONDS = 180.0  # importing torch from a cold disk takes its time
_LEARNER_GRACE_SECONDS = 20.0
_SYNCER_GRACE_SECONDS = 300.0  # it writes a checkpoint and the model
_GUARD_SECONDS = 5.0
_LINKED = ("joining", "training", "idle", "finished")


class LocalRun:
    """One run on this machine.

    Args:
        directory: the run directory.
        num_learners: how many to start.
        script: path of the training script, and its arguments.
    """

    def __init__(self, directory: RunDirectory, num_learners: int, script: list[str]) -> None:
        self._directory = directory
        self._num_learners = num_learners
        self._script = script
        self._syncer: Child | None = None
        self._learners: list[Child] = []
        self._exit_codes: dict[int, int] = {}
        self._num_signals = 0
        self._num_signals_said = 0
        self._join: dict[str, str] = {}

    def run(self, display: Display, syncer_flags: list[str], num_shards: int, accelerate_config: Path | None) -> bool:
        """Start all, wait for the end, end all. Returns whether the run finished and every learner ended with 0.

        Raises:
            DiLoCoError: the syncer or a learner could not be started.
        """
        self._display = display
        handled = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {number: signal.signal(number, self._on_signal) for number in handled}
        try:
            try:
                address = self._start_syncer(syncer_flags)
                if address:
                    self._start_learners(address, num_shards, accelerate_config)
                    self._watch()
            finally:
                self._end_all()
            return self._summary()
        finally:
            for signal_number, handler in before.items():
                signal.signal(signal_number, handler)

    def _on_signal(self, signal_number: int, frame: FrameType | None) -> None:
        self._num_signals += 1

    # -------------------------------------------------------------------------------------------------------- starting

    def _start_syncer(self, flags: list[str]) -> str | None:
        """Start the syncer; its address, or None if we were told to stop before it had one."""
        command = [sys.executable, "-m", "hf_diloco.cli.main", "syncer", "--listen", "127.0.0.1:0"]
        self._syncer = Child(
            [*command, "--run-dir", str(self._directory.path), *flags],
            self._directory.logs / "syncer.log",
            {**clean_environment(), "PYTHONUNBUFFERED": "1"},
            grace_seconds=_SYNCER_GRACE_SECONDS,
        )
        self._display.message(f"Run directory {self._directory.path}")
        deadline = time.monotonic() + _SYNCER_START_SECONDS
        while not self._num_signals:
            address = self._directory.read_status().get("address")
            if isinstance(address, str):
                return address
            if self._syncer.poll() is not None:
                raise DiLoCoError(f"the syncer ended at once.\n{_shown_tail(self._syncer)}")
            if time.monotonic() > deadline:
                raise DiLoCoError(
                    f"the syncer has no address after {_SYNCER_START_SECONDS:.0f} s.\n{_shown_tail(self._syncer)}"
                )
            time.sleep(_POLL_SECONDS)
        return None

    def _start_learners(self, address: str, num_shards: int, accelerate_config: Path | None) -> None:
        num_gpus = count_gpus()
        launcher = [sys.executable, "-m", "accelerate.commands.launch", "--quiet", "--main_process_port", "0"]
        if accelerate_config:
            launcher += ["--config_file", str(accelerate_config)]
        else:
            launcher += ["--num_processes", "1", "--num_machines", "1", "--mixed_precision", "no"]
            launcher += ["--dynamo_backend", "no", *([] if num_gpus else ["--cpu"])]
        self._join = {
            "HF_DILOCO_SYNCER": address,
            "HF_DILOCO_TOKEN_FILE": str(self._directory.token),
            "HF_DILOCO_NUM_SHARDS": str(num_shards),
        }
        shared = clean_environment()
        num_threads = max(1, len(os.sched_getaffinity(0)) // self._num_learners)
        shared.setdefault("OMP_NUM_THREADS", str(num_threads))
        if 0 < num_gpus < self._num_learners:
            self._display.message(f"{self._num_learners} learners share {num_gpus} GPU(s)", style="yellow")
        for learner_id in range(self._num_learners):
            gpus = _gpus_of(learner_id, self._num_learners, num_gpus, all_of_them=accelerate_config is not None)
            own = {"HF_DILOCO_LEARNER_ID": str(learner_id), "PYTHONUNBUFFERED": "1"}
            child = Child(
                [*launcher, *self._script],
                self._directory.logs / f"learner-{learner_id}.log",
                {**shared, **self._join, **own, **({"CUDA_VISIBLE_DEVICES": gpus} if gpus else {})},
                grace_seconds=_LEARNER_GRACE_SECONDS,
                keeps_alive=self._syncer,  # which, if we die, ends after the learners
            )
            self._learners.append(child)
        self._display.message(
            f"Syncer at {address}; {self._num_learners} learners started, logs in {self._directory.logs}"
        )

    # -------------------------------------------------------------------------------------------------------- watching

    def _watch(self) -> None:
        """Return when the run is over, one way or another, or we were told to stop."""
        assert self._syncer is not None
        while not self._num_signals:
            status = self._directory.read_status()
            self._display.update(status)
            self._note_ends()
            if self._syncer.poll() is not None:
                self._wait_for_learners_of_a_syncer_that_ended()
                return
            if len(self._exit_codes) == self._num_learners and not self._anybody_left(status):
                self._wait_for_syncer()
                return
            time.sleep(_POLL_SECONDS)

    def _note_ends(self) -> None:
        """Say of each learner that has ended how it did."""
        for learner_id, child in enumerate(self._learners):
            code = child.poll()
            if code is None or learner_id in self._exit_codes:
                continue
            self._exit_codes[learner_id] = code
            if code == 0 or self._num_signals:
                self._display.message(f"Learner {learner_id} has ended ({_meaning(code)}).")
                continue
            again = {**self._join, "HF_DILOCO_LEARNER_ID": str(learner_id)}
            line = " ".join(f"{name}={shlex.quote(value)}" for name, value in again.items())
            self._display.message(
                f"Learner {learner_id} died ({_meaning(code)}); the others go on. {_shown_tail(child)}\n"
                f"To start it again: {line} accelerate launch {shlex.join(self._script)}",
                style="red",
            )

    def _anybody_left(self, status: dict[str, Any]) -> bool:
        """A learner that was started by hand may still be there; or the syncer is about to end by itself."""
        return any(word(learner.get("state")) in _LINKED for learner in learners(status))

    def _wait_for_syncer(self) -> None:
        """All learners are gone: a run that is finishing gets the time for it."""
        assert self._syncer is not None
        patience = time.monotonic() + 3.0
        while time.monotonic() < patience and not self._num_signals and self._syncer.poll() is None:
            status = self._directory.read_status()
            if status.get("state") in ("finishing", "finished"):
                patience = max(patience, time.monotonic() + _SYNCER_GRACE_SECONDS)
            time.sleep(_POLL_SECONDS)

    def _wait_for_learners_of_a_syncer_that_ended(self) -> None:
        assert self._syncer is not None
        code = self._syncer.poll()
        if code != 0:
            self._display.message(
                f"The syncer died ({_meaning(code or 0)}); the learners are told to stop. {_shown_tail(self._syncer)}",
                style="red",
            )
            return
        while len(self._exit_codes) < self._num_learners and not self._num_signals:
            self._note_ends()  # they evaluate, save, and end by themselves
            time.sleep(_POLL_SECONDS)

    # ---------------------------------------------------------------------------------------------------------- ending

    def _end_all(self) -> None:
        """Learners first, then the syncer; nothing is left when this returns."""
        if any(child.poll() is None for child in self._learners):
            seconds = f"{_LEARNER_GRACE_SECONDS:.0f}"
            self._display.message(f"Stopping the learners (SIGTERM; what is left after {seconds} s is killed) ...")
        for child in self._learners:
            child.stop()
        for child in self._learners:
            self._wait(child)
        self._note_ends()
        if self._syncer is not None:
            if self._syncer.poll() is None:
                self._display.message("Stopping the syncer; it writes the values it has ...")
            self._syncer.stop()
            self._wait(self._syncer)

    def _wait(self, child: Child) -> None:
        deadline = time.monotonic() + child.grace_seconds + _GUARD_SECONDS
        while not child.wait(_POLL_SECONDS):
            if self._num_signals > max(1, self._num_signals_said):
                self._num_signals_said = self._num_signals
                seconds = max(0.0, deadline - time.monotonic())
                self._display.message(f"Still stopping; at most {seconds:.0f} s more ...")
            if time.monotonic() >= deadline:
                child.kill()
        child.kill()  # if its guard was killed, others of its group may be there

    def _summary(self) -> bool:
        """Say how it went; True if all is well."""
        assert self._syncer is not None
        status = self._directory.read_status()
        self._display.update(status, now=True)
        finished = self._syncer.poll() == 0
        failed = {learner_id: code for learner_id, code in self._exit_codes.items() if code != 0}
        mean = number(status.get("mean_participants"))
        lines = [
            f"The run {'has finished' if finished else 'was stopped before its end'}: outer step "
            f"{count(status.get('outer_step'))} of {count(status.get('total_steps'))}, "
            f"{count(status.get('merges'))} merges, mean participants {'-' if mean is None else f'{mean:.2f}'}",
            f"received {size(status.get('bytes_received'))}, sent {size(status.get('bytes_sent'))}",
        ]
        for learner in learners(status):
            name = count(learner.get("learner_id"))
            lines.append(f"learner {name}: tokens merged / trained {merged_of_trained(learner)}")
        for learner_id, code in failed.items():
            lines.append(
                f"learner {learner_id} did not end well: {_meaning(code)}; see {self._learners[learner_id].log}"
            )
        lines.append(f"model: {self._directory.model}" if self._directory.model.is_dir() else "model: none")
        good = finished and not failed and len(self._exit_codes) == self._num_learners
        self._display.message("\n".join(lines), style="green" if good else "red")
        return good


def _gpus_of(learner_id: int, num_learners: int, num_gpus: int, *, all_of_them: bool) -> str | None:
    """CUDA_VISIBLE_DEVICES of one learner: one GPU, or its even part of ``all_of_them``."""
    if not num_gpus:
        return None
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    names = visible[:num_gpus] or [str(index) for index in range(num_gpus)]
    if not all_of_them or num_gpus < num_learners:
        return names[learner_id % len(names)]
    share = len(names) // num_learners
    return ",".join(names[learner_id * share : (learner_id + 1) * share])


def _meaning(code: int) -> str:
    """An exit code in words; 128 + n is signal n."""
    try:
        return f"exit code {code}" if code <= 128 else f"killed by {signal.Signals(code - 128).name}"
    except ValueError:
        return f"exit code {code}"


def _shown_tail(child: Child) -> str:
    tail = child.log_tail()
    indented = "\n".join(f"  | {line}" for line in tail.splitlines()) if tail else "  | (nothing)"
    return f"The last lines of {child.log}:\n{indented}"
