"""A syncer and its learners on one machine: started, watched, and all ended in the end."""

from __future__ import annotations

import math
import os
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from hf_diloco.cli.guard import stop_signals
from hf_diloco.cli.launchers import Launcher
from hf_diloco.cli.notices import Notices
from hf_diloco.cli.processes import Child, clean_environment
from hf_diloco.cli.supervised import Supervised, meaning, shown_tail
from hf_diloco.cli.table import Display, count, learners, merged_of_trained, number, size, start_gate, word
from hf_diloco.errors import DiLoCoError
from hf_diloco.syncer.run_directory import RunDirectory

_POLL_SECONDS = 0.25
_SYNCER_START_SECONDS = 180.0  # importing torch from a cold disk takes its time
_SYNCER_GRACE_SECONDS = 300.0  # it writes a checkpoint and the model
_SYNCER_RESTARTS = 10  # in a row, also where learners are not started again: the run would be lost with it
_GUARD_SECONDS = 5.0
_DRAIN_SHARE = 1 / 3  # of the learners' grace time; the rest is for the end of a step, and to save
_SAME_REQUEST_SECONDS = 1.0  # terminals and service managers may send two kinds of signal at once
_LINKED = ("joining", "training", "idle", "finished")


class LocalRun:
    """One run on this machine.

    Args:
        directory: the run directory.
        launchers: how each learner is started.
        script: path of the training script, and its arguments.
        grace_seconds: from SIGTERM to SIGKILL of the learners, when we are told to stop.
        max_restarts: in a row, of each learner; and of the syncer, if it is more than a few.
    """

    def __init__(
        self,
        directory: RunDirectory,
        launchers: Sequence[Launcher],
        script: list[str],
        *,
        grace_seconds: float = 30.0,
        max_restarts: int = 0,
    ) -> None:
        self._directory = directory
        self._shown = shorter(directory.path)
        self._notices = Notices(directory.tape)
        self._launchers, self._script = launchers, script
        self._grace_seconds, self._max_restarts = grace_seconds, max_restarts
        self._syncer: Supervised | None = None
        self._learners: list[Supervised] = []
        self._had_ended = False
        self._num_signals = 0
        self._signalled_at = -math.inf
        self._join: dict[str, str] = {}

    def run(self, display: Display, syncer_flags: list[str], num_shards: int) -> bool:
        """Start all, wait for the end, end all. Returns whether the run finished and every learner ended with 0.

        Raises:
            DiLoCoError: the syncer or a learner could not be started.
        """
        self._display = display
        before = {number: signal.signal(number, self._on_signal) for number in stop_signals()}
        try:
            try:
                address = self._start_syncer(syncer_flags)
                if address:
                    self._start_learners(address, num_shards)
                    self._watch()
            finally:
                self._end_all()
            return self._had_ended or self._summary()
        finally:
            for signal_number, handler in before.items():
                signal.signal(signal_number, handler)

    def _on_signal(self, signal_number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if now - self._signalled_at > _SAME_REQUEST_SECONDS:
            self._num_signals += 1
            self._signalled_at = now

    # -------------------------------------------------------------------------------------------------------- starting

    def _start_syncer(self, flags: list[str]) -> str | None:
        """Start the syncer; its address, or None if we were told to stop before it had one, or the run had ended."""
        command = [sys.executable, "-m", "hf_diloco.cli.main", "syncer", "--run-dir", str(self._directory.path)]
        child = Child(
            [*command, "--listen", "127.0.0.1:0", *flags],
            self._directory.logs / "syncer.log",
            {**clean_environment(), "PYTHONUNBUFFERED": "1"},
            grace_seconds=_SYNCER_GRACE_SECONDS,
        )
        self._syncer = Supervised(
            "The syncer",
            child,
            max(self._max_restarts, _SYNCER_RESTARTS),
            only_after_signals=True,
            command=lambda: [*command, "--listen", self._join["HF_DILOCO_SYNCER"], *flags],
        )
        self._display.message(f"Run directory {self._shown}")
        deadline = time.monotonic() + _SYNCER_START_SECONDS
        while not self._num_signals:
            address = self._directory.read_status().get("address")
            if isinstance(address, str):
                return address
            if child.poll() == 0:  # the run had ended before
                self._had_ended = True
                self._display.message(shown_tail(child))
                return None
            if child.poll() is not None:
                raise DiLoCoError(f"the syncer ended at once.\n{shown_tail(child)}")
            if time.monotonic() > deadline:
                raise DiLoCoError(
                    f"the syncer has no address after {_SYNCER_START_SECONDS:.0f} s.\n{shown_tail(child)}"
                )
            time.sleep(_POLL_SECONDS)
        return None

    def _start_learners(self, address: str, num_shards: int) -> None:
        assert self._syncer is not None
        self._join = {
            "HF_DILOCO_SYNCER": address,
            "HF_DILOCO_TOKEN_FILE": str(self._directory.token),
            "HF_DILOCO_NUM_SHARDS": str(num_shards),
            "HF_DILOCO_DRAIN_SECONDS": f"{_DRAIN_SHARE * self._grace_seconds:g}",
        }
        num_processes = sum(launcher.num_processes for launcher in self._launchers)
        shared = {**clean_environment(), "PYTHONUNBUFFERED": "1"}
        shared.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // num_processes)))
        gpus = [gpu for launcher in self._launchers for gpu in launcher.gpus]
        if len(set(gpus)) < len(gpus):
            self._display.message(f"The learners share {len(set(gpus))} GPU(s).", style="yellow")
        for learner_id, launcher in enumerate(self._launchers):
            child = Child(
                [sys.executable, "-m", "accelerate.commands.launch", "--quiet", *launcher.words, *self._script],
                self._directory.logs / f"learner-{learner_id}.log",
                {**shared, **self._join, "HF_DILOCO_LEARNER_ID": str(learner_id), **launcher.environment},
                grace_seconds=self._grace_seconds,
                keeps_alive=self._syncer.child,  # which, if we die, ends after the learners
            )
            self._learners.append(Supervised(f"Learner {learner_id}", child, self._max_restarts))
        several = f" of {num_processes} processes in all" if num_processes > len(self._learners) else ""
        self._display.message(
            f"Syncer at {address}; {len(self._learners)} learners{several} started, logs in {self._shown / 'logs'}"
        )

    # -------------------------------------------------------------------------------------------------------- watching

    def _watch(self) -> None:
        """Return when the run is over, one way or another, or we were told to stop."""
        assert self._syncer is not None
        while not self._num_signals:
            status = self._status()
            self._display.update(status)
            self._look()
            if self._syncer.exit_code is not None:
                self._wait_for_learners_of_a_syncer_that_ended()
                return
            if self._all_learners_ended() and not self._anybody_left(status):
                self._wait_for_syncer()
                return
            time.sleep(_POLL_SECONDS)

    def _look(self) -> None:
        """Say what the syncer warns of and how each process ended that did; start it again if it is to be."""
        assert self._syncer is not None
        self._tell_notices()
        if text := self._syncer.look():
            self._display.message(text, style="yellow" if self._syncer.exit_code is None else "")
        texts = [learner.look() for learner in self._learners]  # all of them, to know whether any is left
        for learner_id, text in enumerate(texts):
            if text is None:
                continue
            lost = self._learners[learner_id].exit_code not in (None, 0) and not self._num_signals
            what_now = f"\n{self._what_without(learner_id)}" if lost else ""
            self._display.message(text + what_now, style="red" if lost else "")

    def _tell_notices(self) -> None:
        for notice in self._notices.new():
            self._display.message(notice, style="yellow")

    def _what_without(self, learner_id: int) -> str:
        """How it goes on without this learner."""
        if self._all_learners_ended():
            return "No learner of this launch is left; without others, started by hand, the run ends here."
        launcher = self._launchers[learner_id]
        again = {**self._join, "HF_DILOCO_LEARNER_ID": str(learner_id), **launcher.environment}
        line = " ".join(f"{name}={shlex.quote(value)}" for name, value in again.items())
        others = "The others go on."
        if gate := start_gate(self._directory.read_status()):
            others = f"The run has not begun: it is waiting{gate}. Ctrl-C ends it."
        return f"{others} To start it again: {line} {launcher.by_hand} {shlex.join(self._script)}"

    def _all_learners_ended(self) -> bool:
        return all(learner.exit_code is not None for learner in self._learners)

    def _status(self) -> dict[str, Any]:
        """What the syncer says of the run, and how often we have started whom again."""
        status = self._directory.read_status()
        if self._max_restarts:
            status["syncer_restarts"] = self._syncer.num_restarts if self._syncer else 0
            for learner in learners(status):
                learner_id = learner.get("learner_id")
                if isinstance(learner_id, int) and 0 <= learner_id < len(self._learners):
                    learner["restarts"] = self._learners[learner_id].num_restarts
        return status

    def _anybody_left(self, status: dict[str, Any]) -> bool:
        """A learner that was started by hand may still be there; or the syncer is about to end by itself."""
        return any(word(learner.get("state")) in _LINKED for learner in learners(status))

    def _wait_for_syncer(self) -> None:
        """All learners are gone: a run that is finishing gets the time for it."""
        assert self._syncer is not None
        patience = time.monotonic() + 3.0
        while time.monotonic() < patience and not self._num_signals and self._syncer.exit_code is None:
            if self._directory.read_status().get("state") in ("finishing", "finished"):
                patience = max(patience, time.monotonic() + _SYNCER_GRACE_SECONDS)
            time.sleep(_POLL_SECONDS)
            self._look()

    def _wait_for_learners_of_a_syncer_that_ended(self) -> None:
        assert self._syncer is not None
        if self._syncer.exit_code != 0:
            self._display.message("Without a syncer the learners are told to stop.", style="red")
            return
        self._call_off_restarts()
        while not self._all_learners_ended() and not self._num_signals:
            self._look()  # they evaluate, save, and end by themselves
            time.sleep(_POLL_SECONDS)

    def _call_off_restarts(self) -> None:
        """Who was being started again when the run ended would look for its syncer in vain."""
        states = {row.get("learner_id"): row.get("state") for row in learners(self._directory.read_status())}
        for learner_id, learner in enumerate(self._learners):
            if learner.waits or (learner.num_restarts and states.get(learner_id) == "absent"):
                learner.call_off()
                self._display.message(f"{learner.name} was not back before the run had ended.")
            else:
                learner.settle()

    # ---------------------------------------------------------------------------------------------------------- ending

    def _end_all(self) -> None:
        """Learners first, then the syncer; nothing is left when this returns."""
        if self._syncer is not None:
            self._syncer.settle()
        running = [learner for learner in self._learners if learner.child.poll() is None]
        if running:
            self._display.message(
                f"Stopping the learners: they ship what they have and save, for at most {self._grace_seconds:.0f} s "
                "(Ctrl-C ends them at once) ..."
            )
        self._stop(self._learners)
        if self._syncer is not None:
            if self._syncer.child.poll() is None:
                self._display.message("Stopping the syncer; it writes the values it has ...")
            self._stop([self._syncer])
        self._tell_notices()  # of its last moments

    def _stop(self, children: list[Supervised]) -> None:
        """Stop these and wait for their end; at once if we are told so again."""
        for item in children:
            item.child.stop()
        num_signals = self._num_signals
        for item in children:
            deadline = time.monotonic() + item.child.grace_seconds + _GUARD_SECONDS
            while not item.child.wait(_POLL_SECONDS):
                if self._num_signals > num_signals:
                    num_signals = self._num_signals
                    for other in children:
                        other.child.stop_at_once()
                if time.monotonic() >= deadline:
                    item.child.kill()
            item.child.kill()  # if its guard was killed, others of its group may be there
        for item in children:
            if item.exit_code is None:
                item.settle()
                self._display.message(f"{item.name} has ended ({meaning(item.exit_code or 0)}).")
            item.child.close()

    def _summary(self) -> bool:
        """Say how it went; True if all is well."""
        assert self._syncer is not None
        status = self._status()
        self._display.update(status, now=True)
        finished = self._syncer.exit_code == 0
        failed = [learner for learner in self._learners if learner.exit_code != 0 and not learner.called_off]
        mean = number(status.get("mean_participants"))
        outer_step, total_steps = number(status.get("outer_step")), number(status.get("total_steps"))
        is_short = outer_step is not None and total_steps is not None and outer_step < total_steps
        lines = [
            f"The run {'has finished' if finished else 'was stopped before its end'}: outer step "
            f"{count(status.get('outer_step'))} of {count(status.get('total_steps'))}, "
            f"{count(status.get('merges'))} merges, mean participants {'-' if mean is None else f'{mean:.2f}'}",
            f"received {size(status.get('bytes_received'))}, sent {size(status.get('bytes_sent'))}",
        ]
        for learner in learners(status):
            name = count(learner.get("learner_id"))
            lines.append(f"learner {name}: tokens merged / trained {merged_of_trained(learner)}")
        if finished and is_short:
            lines.append(
                "It ended before its last step, as the training of a learner did (epochs or data that ran out, early "
                "stopping): see the warnings in the learners' logs."
            )
        if self._learners and not learners(status) and not failed and not self._num_signals:
            lines.append(
                "No learner ever joined the run: the scripts ended without it. A script joins by DiLoCoCallback() in "
                "the callbacks of its Trainer, whose train() it calls, or by `with DiLoCo(...) as diloco:` around its "
                "loop."
            )
        for item in failed:
            lines.append(f"{item.name.lower()} did not end well: {meaning(item.exit_code or 0)}; see {item.child.log}")
        lines.append(f"model: {self._shown / 'model'}" if self._directory.model.is_dir() else "model: none")
        good = finished and not failed and len(self._learners) == len(self._launchers)
        as_told = self._num_signals > 0 and not failed
        self._display.message("\n".join(lines), style="green" if good else "yellow" if as_told else "red")
        return good


def shorter(path: Path) -> Path:
    """The same place, from the working directory or from the root, whichever takes fewer letters."""
    return Path(min(os.path.relpath(path), str(path.absolute()), key=len))
