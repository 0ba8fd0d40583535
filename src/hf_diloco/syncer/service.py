"""The syncer: serves links, lets learners in, and keeps one :class:`~hf_diloco.syncer.run.Run` going."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

from hf_diloco.config import SyncerConfig, config_to_dict
from hf_diloco.core import events as ev
from hf_diloco.core import messages as ms
from hf_diloco.core.rounds import Rounds
from hf_diloco.errors import ConfigError, DiLoCoError, MessageError
from hf_diloco.links.base import LinkDown, LinkEvent, Received, SyncerLinks
from hf_diloco.syncer.history import History
from hf_diloco.syncer.model_card import run_facts
from hf_diloco.syncer.roster import Terms, fragments_misfit
from hf_diloco.syncer.run import Run
from hf_diloco.syncer.run_directory import RunDirectory
from hf_diloco.syncer.saved_run import SavedRun, joint_run, last_incarnation, latest_run, put_newer_aside
from hf_diloco.syncer.tape import Tape

logger = logging.getLogger(__name__)

_STATUS_EVERY_SECONDS = 1.0
_CLOSE_DRAIN_SECONDS = 5.0


class Syncer:
    """One run's syncer. ``run`` blocks until the run is over (and for latecomers), or ``stop`` was called.

    Args:
        config: the run's settings.
        links: the ends of all links; opened and closed by ``run``.
        run_directory: where the tape, the checkpoints and the model go; a run that is there already is gone on with.
        go_back_to: outer step of a checkpoint of the whole run (``save_every``), to go on from that instead of from
            the newest values.

    Raises:
        DiLoCoError: the run that is there cannot be gone on with.
        ConfigError: there is no such checkpoint to go back to.
    """

    def __init__(
        self,
        config: SyncerConfig,
        links: SyncerLinks,
        run_directory: RunDirectory,
        *,
        go_back_to: int | None = None,
    ) -> None:
        self.config = config
        self._links = links
        self._directory = run_directory
        self._stopping = threading.Event()
        self._start = time.monotonic()
        self._goes_back = go_back_to is not None
        self._saved = latest_run(run_directory) if go_back_to is None else joint_run(run_directory, go_back_to)
        self._history: History | None = None  # since the checkpoint; read once, a tape can be long
        if self._saved is None:
            before, self.has_ended = last_incarnation(run_directory.tape), False
        else:
            self._history = self._saved.history(run_directory.tape, go_back=self._goes_back)
            before, self.has_ended = self._history.incarnation, self._history.finished
        self._incarnation = before + 1
        self._tape: Tape  # from `run` on
        self._run: Run | None = None  # once the first learner has said hello

    def run(self, leave_model: Callable[[], None] = lambda: None) -> None:
        """Serve learners until the run is over; then the final values are on disk and every learner has them.

        Args:
            leave_model: called once, when the values that the run ends with are on disk (if it has any); after it,
                learners that come late are served for ``linger_seconds``.

        Raises:
            ConfigError: the settings do not fit the model that the first learner has.
            DiLoCoError: the address cannot be listened on, or the run directory cannot be written.
        """
        self._tape = Tape(self._directory.tape, self._stopping)
        try:
            self._links.open()
            self._directory.write_address(self._links.address)
            self._directory.config.write_text(json.dumps(config_to_dict(self.config), indent=2) + "\n")
            self._tape.write(
                "start", durable=True, time=time.time(), incarnation=self._incarnation, address=self._links.address,
                config=config_to_dict(self.config),
            )  # fmt: skip
            if self._saved is not None and self._history is not None:
                self._run = self._resume(self._saved, self._history)
            self._serve(Rounds.settled)
            has_ended = self._run is not None and self._run.rounds.settled(time.monotonic())
            if self._run is not None:
                self._run.save()
            self._write_status()
            leave_model()
            self._serve(Rounds.done)
            self._write_status()
            num_merges = self._run.ledger.num_merges if self._run is not None else 0
            self._tape.write("finish", durable=True, merges=num_merges, stopped=not has_ended)
        finally:
            self._links.close(drain_seconds=_CLOSE_DRAIN_SECONDS)
            self._tape.close()

    def stop(self) -> None:
        """End ``run`` soon: it writes the values it has and returns. May be called from a signal handler."""
        self._stopping.set()

    @property
    def learner_checkpoints(self) -> dict[str, str]:
        """Where each learner has saved its part of the checkpoint that is gone back to, on its own machine."""
        return self._saved.facts.learner_checkpoints if self._saved is not None else {}

    @property
    def stopping(self) -> bool:
        """``stop`` was called."""
        return self._stopping.is_set()

    @property
    def has_model(self) -> bool:
        """The run directory's newest checkpoint holds the values that this run ended with."""
        return self._run is not None and self._run.saved

    def model(self) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, bytes]]:
        """Published parameters, constants and files, as :func:`hf_diloco.syncer.export.export_model` wants them."""
        assert self._run is not None, "there is no model before the first learner has joined"
        return self._run.state.tensors(), self._run.supply.constants, self._run.supply.files

    def model_facts(self) -> dict[str, str]:
        """How that model was trained, for its card."""
        assert self._run is not None, "there is no model before the first learner has joined"
        ledger = self._run.ledger
        return run_facts(
            self._run.terms.config, ledger.accounts.values(), outer_step=self._run.outer_step,
            num_merges=ledger.num_merges, num_participants=ledger.num_participants,
        )  # fmt: skip

    def warn(self, text: str) -> None:
        """Say in the log and on the tape what is wrong with the model that is left."""
        self._tape.warn(text)

    def _serve(self, is_over: Callable[[Rounds, float], bool]) -> None:
        next_status = 0.0
        while not self._stopping.is_set():
            now = time.monotonic()
            if now >= next_status:
                self._write_status()
                next_status = now + _STATUS_EVERY_SECONDS
            wake_at = self._run.wake_at(now) if self._run is not None else math.inf
            event = self._links.receive(max(min(next_status, wake_at) - now, 0.0))
            if event is not None:
                self._on_link_event(event)
            elif self._run is not None and self._run.deadline is not None and time.monotonic() >= self._run.deadline:
                self._run.dispatch(ev.Tick())
            if self._run is not None:
                self._run.look_after_checkpoints(time.monotonic())
            if self._run is not None and is_over(self._run.rounds, time.monotonic()):
                return

    def _on_link_event(self, event: LinkEvent) -> None:
        if isinstance(event, Received):
            try:
                if isinstance(event.message, ms.Hello):
                    self._on_hello(event.learner_id, event.message)
                elif self._run is not None:
                    self._run.take(event.learner_id, event.message, event.payload)
            except MessageError as error:
                self._refuse(event.learner_id, str(error))
                self._links.drop(event.learner_id, str(error))
            except DiLoCoError:
                raise
            except Exception as error:  # one learner's message must not end the run of all
                logger.exception("[syncer] a message of learner %d could not be handled", event.learner_id)
                self._links.drop(event.learner_id, f"the syncer could not handle a message: {error!r}")
            finally:
                event.release()
        elif isinstance(event, LinkDown) and self._run is not None:
            self._run.leave(event.learner_id, event.reason, for_good=False)
            if not self._run.supply.complete and not any(other.linked for other in self._run.rounds.members.values()):
                self._run = None  # nobody is bound by what a first learner said that is gone

    def _on_hello(self, learner_id: int, hello: ms.Hello) -> None:
        if self._run is None:
            if any(version.incarnation for version in hello.held):
                self._refuse(
                    learner_id,
                    f"this learner has trained to step {hello.global_step}, but the run directory of this syncer holds "
                    "no checkpoint to go on from. Start the syncer with the --run-dir of that run; or restart the "
                    "learner, which then begins this run with its model.",
                )
                return
            if misfit := fragments_misfit(self.config, hello):
                self._refuse(learner_id, misfit)
                raise ConfigError(misfit)  # no learner can mend that
            try:
                self._run = self._begin(Terms.from_first(self.config, learner_id, hello))
            except ConfigError as error:
                self._refuse(learner_id, str(error))
                return
        if objection := self._run.terms.objection(hello):
            self._refuse(learner_id, objection)
        else:
            self._run.join(learner_id, hello)

    def _begin(self, terms: Terms) -> Run:
        if terms.lowered_from:
            logger.info(
                "[syncer] num_fragments lowered from %d to %d, all that this model allows",
                terms.lowered_from, terms.config.num_fragments,
            )  # fmt: skip
        self._tape.write(
            "layout",
            fingerprint=terms.layout.fingerprint,
            num_fragments=terms.config.num_fragments,
            total_steps=terms.config.total_steps,
            num_shards=terms.config.num_shards,
            num_parameters=terms.layout.num_parameters,
        )
        return Run(terms, self._links, self._tape, self._directory, incarnation=self._incarnation)

    def _resume(self, saved: SavedRun, history: History) -> Run:
        if self._goes_back:
            put_newer_aside(self._directory, saved.checkpoint.outer_step)
        config = dataclasses.replace(saved.terms.config, linger_seconds=self.config.linger_seconds)  # may be another
        terms = dataclasses.replace(saved.terms, config=config)
        run = Run(
            terms, self._links, self._tape, self._directory, incarnation=self._incarnation, saved=(saved, history)
        )
        run.dispatch(ev.Tick())
        return run

    def _refuse(self, learner_id: int, reason: str) -> None:
        logger.warning("[syncer] learner %d refused: %s", learner_id, reason)
        self._tape.write("refusal", learner_id=learner_id, reason=reason)
        self._links.send([learner_id], ms.Refused(reason=reason))

    def status(self) -> dict[str, Any]:
        """What ``status.json`` says, once a second: the run at a glance; see :meth:`Run.status`."""
        now = time.monotonic()
        before = {
            "state": "waiting",
            "outer_step": 0,
            "total_steps": self.config.total_steps,
            "merges": 0,
            "expected_learners": self.config.expected_learners,
            "learners_here": 0,
            "learners": [],
        }
        return {
            "address": self._links.address,
            "pid": os.getpid(),
            "seconds": round(now - self._start, 1),
            "sync_every": self.config.sync_every,
            **(before if self._run is None else self._run.status(now)),
        }

    def _write_status(self) -> None:
        """Replace ``status.json`` in one move, so that a reader never sees half of it."""
        aside = self._directory.status.with_suffix(".tmp")
        try:
            aside.write_text(json.dumps(self.status()))
            aside.replace(self._directory.status)
        except OSError as error:
            logger.warning("[syncer] %s cannot be written: %s", self._directory.status, error)
