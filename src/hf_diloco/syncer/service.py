"""The syncer: drives :class:`~hf_diloco.core.rounds.Rounds` with what the links bring, and does what it says."""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
from collections import deque
from typing import Any

import torch
from torch import Tensor

from hf_diloco.config import SyncerConfig, config_to_dict
from hf_diloco.core import events as ev
from hf_diloco.core import messages as ms
from hf_diloco.core.codec import decode
from hf_diloco.core.merge import MergeAccumulator, token_weight
from hf_diloco.core.rounds import Rounds
from hf_diloco.errors import ConfigError, MessageError
from hf_diloco.links.base import LinkDown, LinkUp, Received, SyncerLinks
from hf_diloco.syncer.checkpoint import save_checkpoint
from hf_diloco.syncer.roster import Account, Terms
from hf_diloco.syncer.run_directory import RunDirectory
from hf_diloco.syncer.state import GlobalState
from hf_diloco.syncer.supply import Supply
from hf_diloco.syncer.tape import Tape

logger = logging.getLogger(__name__)

_STATUS_EVERY_SECONDS = 1.0
_CLOSE_DRAIN_SECONDS = 5.0


class Syncer:
    """One run's syncer. ``run`` blocks until the run is over or ``stop`` was called.

    Args:
        config: the run's settings.
        links: the ends of all links; opened and closed by ``run``.
        run_directory: where the tape, the checkpoints and the model go.
    """

    def __init__(self, config: SyncerConfig, links: SyncerLinks, run_directory: RunDirectory) -> None:
        self.config = config
        self._links = links
        self._directory = run_directory
        self._stopping = threading.Event()
        self._start = time.monotonic()
        self._tape = Tape(run_directory.tape)
        self._terms: Terms | None = None
        self._rounds: Rounds | None = None
        self._state: GlobalState | None = None
        self._supply = Supply()
        self._accounts: dict[int, Account] = {}
        self._incarnations: dict[int, str] = {}
        self._sums: dict[ms.RoundId, MergeAccumulator] = {}
        self._taken: dict[ms.RoundId, list[dict[str, Any]]] = {}  # participants, as the tape will show them
        self._update: tuple[ms.Update, Tensor | None] | None = None  # the answer being handled, decoded
        self._readers: dict[str, int] = {}  # digest of the first batches -> learner that read them
        self._events: deque[ev.Event] = deque()
        self._deadline: float | None = None
        self._num_merges = 0
        self._num_participants = 0
        self._last_participants: list[int] = []
        self._saved = False

    # ------------------------------------------------------------------------------------------------------ running

    def run(self) -> None:
        """Serve learners until the run is over; then the final values are on disk and every learner has them.

        Raises:
            DiLoCoError: the address cannot be listened on, or the run directory cannot be written.
        """
        next_status = 0.0
        try:
            self._links.open()
            self._directory.config.write_text(json.dumps(config_to_dict(self.config), indent=2) + "\n")
            self._tape.write("start", time=time.time(), address=self._links.address, config=config_to_dict(self.config))
            while not self._stopping.is_set():
                now = time.monotonic()
                if now >= next_status:
                    self._write_status()
                    next_status = now + _STATUS_EVERY_SECONDS
                until = min(next_status, self._deadline if self._deadline is not None else math.inf)
                event = self._links.receive(max(until - now, 0.0))
                if event is not None:
                    self._on_link_event(event)
                elif self._deadline is not None and time.monotonic() >= self._deadline:
                    self._dispatch(ev.Tick())
                if self._rounds is not None and self._rounds.done(time.monotonic()):
                    break
            self._save_final()
            self._write_status()
            self._tape.write("finish", durable=True, merges=self._num_merges, stopped=self._stopping.is_set())
        finally:
            self._links.close(drain_seconds=_CLOSE_DRAIN_SECONDS)
            self._tape.close()

    def stop(self) -> None:
        """End ``run`` soon: it writes the values it has and returns. May be called from a signal handler."""
        self._stopping.set()

    @property
    def has_model(self) -> bool:
        """The run directory's newest checkpoint holds the values that this run ended with."""
        return self._saved

    def model(self) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, bytes]]:
        """Published parameters, constants and files, as :func:`hf_diloco.syncer.export.export_model` wants them."""
        assert self._state is not None, "there is no model before the first learner has joined"
        return self._state.tensors(), self._supply.constants, self._supply.files

    # ------------------------------------------------------------------------------------------- what links bring in

    def _on_link_event(self, event: LinkUp | LinkDown | Received) -> None:
        if isinstance(event, LinkDown):
            self._on_link_down(event)
        elif isinstance(event, Received):
            try:
                self._on_message(event.learner_id, event.message, event.payload)
            except MessageError as error:
                self._refuse(event.learner_id, str(error))
                self._links.drop(event.learner_id, str(error))
            finally:
                event.release()

    def _on_link_down(self, event: LinkDown) -> None:
        if self._rounds is None or event.learner_id not in self._rounds.members:
            return
        member = self._rounds.members[event.learner_id]
        if member.linked:
            logger.info("[syncer · step %d] learner %d is away: %s", self._step, event.learner_id, event.reason)
            self._tape.write("leave", learner_id=event.learner_id, reason=event.reason, for_good=False)
        self._dispatch(ev.Left(learner_id=event.learner_id, for_good=False))
        if not self._supply.complete and not any(other.linked for other in self._rounds.members.values()):
            self._terms = self._rounds = self._state = None  # nobody is bound by what a lost first learner said

    def _on_message(self, learner_id: int, message: ms.Message, payload: Tensor | None) -> None:
        if isinstance(message, ms.Hello):
            self._on_hello(learner_id, message)
        elif self._rounds is None or learner_id not in self._rounds.members:
            return  # it was refused, or has not said hello
        elif isinstance(message, ms.Progress):
            self._on_progress(learner_id, message)
        elif isinstance(message, ms.Update):
            self._on_update(learner_id, message, payload)
        elif isinstance(message, ms.Applied):
            self._on_applied(learner_id, message)
        elif isinstance(message, ms.NeedFull):
            self._tape.write("refusal", learner_id=learner_id, fragment_index=message.fragment_index, reason="misfit")
            self._dispatch(ev.FullNeeded(learner_id=learner_id, fragment_index=message.fragment_index))
        elif isinstance(message, ms.Goodbye):
            logger.info("[syncer · step %d] learner %d took leave: %s", self._step, learner_id, message.reason)
            self._tape.write("leave", learner_id=learner_id, reason=message.reason, for_good=True)
            self._dispatch(ev.Left(learner_id=learner_id, for_good=True))
        else:
            self._on_supply(learner_id, message, payload)

    def _on_hello(self, learner_id: int, hello: ms.Hello) -> None:
        try:
            if self._terms is None or self._rounds is None:
                self._fix_terms(Terms.from_first(self.config, learner_id, hello))
        except ConfigError as error:
            self._refuse(learner_id, str(error))
            return
        assert self._terms is not None
        if objection := self._terms.objection(hello):
            self._refuse(learner_id, objection)
            return
        new_process = self._incarnations.get(learner_id) != hello.incarnation
        self._incarnations[learner_id] = hello.incarnation
        account = self._accounts.setdefault(learner_id, Account(learner_id))
        account.begin(hello, new_process=new_process)
        logger.info("[syncer · step %d] learner %d (%s) is here", self._step, learner_id, hello.host)
        self._tape.write("join", learner_id=learner_id, incarnation=hello.incarnation, host=hello.host)
        self._links.send([learner_id], self._welcome())
        joined = ev.Joined(
            learner_id=learner_id, incarnation=hello.incarnation, global_step=hello.global_step, held=hello.held
        )
        self._dispatch(joined)

    def _fix_terms(self, terms: Terms) -> None:
        if terms.lowered_from:
            logger.info(
                "[syncer] num_fragments lowered from %d to %d, all that this model allows",
                terms.lowered_from, terms.config.num_fragments,
            )  # fmt: skip
        self._terms, self._rounds = terms, Rounds(terms.config)
        self._state = GlobalState(terms.layout, terms.config)
        self._supply = Supply()
        self._tape.write(
            "layout",
            fingerprint=terms.layout.fingerprint,
            num_fragments=terms.config.num_fragments,
            total_steps=terms.config.total_steps,
            num_parameters=terms.layout.num_parameters,
        )

    def _welcome(self) -> ms.Welcome:
        assert self._terms is not None
        assert self._rounds is not None
        config = self._terms.config
        assert config.total_steps is not None
        return ms.Welcome(
            incarnation=self._rounds.incarnation,
            num_fragments=config.num_fragments,
            sync_every=config.sync_every,
            outer_step=self._rounds.outer_step,
            total_steps=config.total_steps,
            on_arrival=config.on_arrival,
            local_mix=config.local_mix,
            wire_format=config.wire_format,
            averaged=self._terms.hello.averaged,
            outer_lr=config.outer_lr,
            outer_momentum=config.outer_momentum,
        )

    def _refuse(self, learner_id: int, reason: str) -> None:
        logger.warning("[syncer] learner %d refused: %s", learner_id, reason)
        self._tape.write("refusal", learner_id=learner_id, reason=reason)
        self._links.send([learner_id], ms.Refused(reason=reason))

    def _on_supply(self, learner_id: int, message: ms.Message, payload: Tensor | None) -> None:
        assert self._state is not None
        if self._supply.take(learner_id, message, payload, self._state):
            self._dispatch(ev.ValuesSupplied(learner_id=learner_id))

    def _on_progress(self, learner_id: int, message: ms.Progress) -> None:
        self._accounts[learner_id].report(message)
        if message.data_digest:
            self._compare_data(learner_id, message.data_digest)
        self._dispatch(
            ev.Reported(
                learner_id=learner_id,
                global_step=message.global_step,
                steps=message.steps,
                step_seconds=message.step_seconds,
                finished=message.finished,
            )
        )

    def _compare_data(self, learner_id: int, data_digest: str) -> None:
        other = self._readers.setdefault(data_digest, learner_id)
        if other in (learner_id, -1):
            return
        self._readers[data_digest] = -1  # said once
        text = (
            f"learners {other} and {learner_id} read the same training data in the same order, so the second adds "
            "nothing. Give each its own part: shard_dataset(dataset), or another data_seed in its training arguments."
        )
        logger.warning("[syncer · step %d] %s", self._step, text)
        self._tape.write("warning", learner_ids=[other, learner_id], text=text)
        self._links.send([other, learner_id], ms.Notice(text=text))

    def _on_update(self, learner_id: int, message: ms.Update, payload: Tensor | None) -> None:
        refused, shipped = None, None
        if message.steps > 0:
            shipped, refused = self._decode(message, payload)
        if refused:
            self._accounts[learner_id].num_refused += 1
            logger.warning("[syncer · step %d] update of learner %d refused: %s", self._step, learner_id, refused)
            self._tape.write("refusal", learner_id=learner_id, update_id=message.update_id, reason=refused)
        self._update = (message, shipped)
        self._dispatch(
            ev.Answered(
                learner_id=learner_id,
                round=message.round,
                fragment_index=message.fragment_index,
                update_id=message.update_id,
                steps=message.steps,
                weight=token_weight(message.tokens, message.steps),
                anchor=message.anchor,
                held_seconds=message.held_seconds,
                refused=refused is not None,
            )
        )

    def _decode(self, message: ms.Update, payload: Tensor | None) -> tuple[Tensor | None, str | None]:
        """The shipped difference, or why it must not be merged."""
        assert self._state is not None
        fragments = self._state.layout.fragments
        if not 0 <= message.fragment_index < len(fragments):
            return None, f"there is no fragment {message.fragment_index}"
        if payload is None:
            return None, "it has no payload"
        try:
            shape = (fragments[message.fragment_index].num_parameters,)
            shipped = decode(payload, message.wire_format, shape)
        except (MessageError, ValueError) as error:
            return None, str(error)
        if not bool(torch.isfinite(shipped).all()):
            return None, "it holds NaN or infinite values"
        return shipped, None

    def _on_applied(self, learner_id: int, message: ms.Applied) -> None:
        assert self._state is not None
        assert self._rounds is not None
        if not 0 <= message.fragment_index < len(self._rounds.current):
            return
        self._tape.write(
            "applied",
            learner_id=learner_id,
            fragment_index=message.fragment_index,
            version=list(message.version),
            digest=message.digest,
        )
        self._dispatch(
            ev.Acknowledged(learner_id=learner_id, fragment_index=message.fragment_index, version=message.version)
        )

    # -------------------------------------------------------------------------------------------- what Rounds wants

    @property
    def _step(self) -> int:
        return self._rounds.outer_step if self._rounds is not None else 0

    def _dispatch(self, event: ev.Event) -> None:
        self._events.append(event)
        while self._events:
            assert self._rounds is not None
            for action in self._rounds.handle(self._events.popleft(), time.monotonic()):
                self._perform(action)
        self._update = None

    def _perform(self, action: ev.Action) -> None:
        if isinstance(action, ev.WaitUntil):
            self._deadline = action.time
        elif isinstance(action, ev.Publish):
            self._publish(action)
        elif isinstance(action, ev.AskUpdates):
            ask = ms.Ask(round=action.round, fragment_index=action.fragment_index)
            self._links.send(list(action.learner_ids), ask)
        elif isinstance(action, ev.AcceptUpdate):
            self._accept(action)
        elif isinstance(action, ev.RejectUpdate):
            self._accounts[action.learner_id].num_late += 1
            logger.debug("[syncer] update of learner %d not merged: %s", action.learner_id, action.reason)
            closed = ms.RoundClosed(round=action.round, fragment_index=action.fragment_index)
            self._links.send([action.learner_id], closed)
        elif isinstance(action, ev.CloseRound):
            closed = ms.RoundClosed(round=action.round, fragment_index=action.fragment_index)
            self._links.send(list(action.learner_ids), closed)
        elif isinstance(action, ev.MergeRound):
            self._merge(action)
        elif isinstance(action, ev.DiscardRound):
            self._sums.pop(action.round, None)
            self._taken.pop(action.round, None)
        else:
            self._perform_on_learner(action)

    def _perform_on_learner(self, action: ev.Action) -> None:
        if isinstance(action, ev.RequestValues):
            self._links.send([action.learner_id], ms.SendValues())
        elif isinstance(action, ev.StartTraining):
            self._links.send([action.learner_id], ms.Start(outer_step=self._step))
        elif isinstance(action, ev.StopTraining):
            self._links.send([action.learner_id], ms.Stop(reason="another learner finished some time ago"))
        elif isinstance(action, ev.SaveFinal):
            self._save_final()
            self._events.append(ev.Saved())
        elif isinstance(action, ev.Release):
            self._links.send([action.learner_id], ms.Released(outer_step=self._step))

    def _accept(self, action: ev.AcceptUpdate) -> None:
        assert self._update is not None
        assert self._state is not None
        message, shipped = self._update
        assert shipped is not None
        index = message.fragment_index
        total = self._sums.setdefault(action.round, self._state.new_accumulator(index))
        pseudogradient = self._state.pseudogradient(index, shipped, stale_anchor=action.stale_anchor)
        total.add(pseudogradient, action.weight)
        self._taken.setdefault(action.round, []).append(
            {"learner_id": action.learner_id, "update_id": message.update_id, "steps": message.steps,
             "tokens": message.tokens, "weight": action.weight, "norm": float(pseudogradient.norm())}
        )  # fmt: skip

    def _merge(self, action: ev.MergeRound) -> None:
        assert self._state is not None
        started = time.monotonic()
        participants = self._taken.pop(action.round)
        self._state.merge(action.fragment_index, self._sums.pop(action.round).result())
        self._tape.write(
            "round",
            durable=True,  # who was merged must be known before anybody learns the result
            round=list(action.round),
            fragment_index=action.fragment_index,
            version=list(action.version),
            digest=self._state.digests[action.fragment_index],
            participants=participants,
            num_asked=action.num_asked,
            quorum_seconds=round(action.quorum_seconds, 4),
            grace_seconds=round(action.grace_seconds, 4),
            merge_seconds=round(time.monotonic() - started, 4),
        )
        for participant in participants:
            account = self._accounts[participant["learner_id"]]
            account.tokens_merged += participant["tokens"] / len(self._state.values)
        self._num_merges += 1
        self._num_participants += len(participants)
        self._last_participants = sorted(participant["learner_id"] for participant in participants)
        logger.info(
            "[syncer · step %d] fragment %d merged from learners %s",
            action.version.outer_step, action.fragment_index, self._last_participants,
        )  # fmt: skip
        self._events.append(ev.Merged(round=action.round))

    def _publish(self, action: ev.Publish) -> None:
        assert self._state is not None
        payload, wire_format = self._state.payload(action.fragment_index, full=action.base is None)
        message = ms.Publication(
            fragment_index=action.fragment_index,
            version=action.version,
            base=action.base,
            wire_format=wire_format,
            digest=self._state.digests[action.fragment_index],
            merged_updates=action.merged_updates,
            closed_round=action.closed_round,
        )
        self._links.send(list(action.learner_ids), message, payload)

    # --------------------------------------------------------------------------------------------- what is left behind

    def _save_final(self) -> None:
        """Theta := Theta-hat, on disk."""
        if self._saved or self._state is None or self._terms is None or not self._supply.complete:
            return
        self._state.settle()
        meta = {"config": config_to_dict(self._terms.config), "fingerprint": self._state.layout.fingerprint}
        groups = {"global": self._state.tensors(), "constants": self._supply.constants}
        save_checkpoint(self._directory.checkpoints, self._step, groups, meta, self._supply.files)
        self._saved = True
        self._tape.write("checkpoint", durable=True, outer_step=self._step)

    def status(self) -> dict[str, Any]:
        """What ``status.json`` says; see :meth:`_write_status`."""
        rounds, terms = self._rounds, self._terms
        now = time.monotonic()
        states = {member.learner_id: member.state(now) for member in rounds.members.values()} if rounds else {}
        moved = [self._links.bytes_moved(learner_id) for learner_id in self._accounts]
        phases = {"draining": "finishing", "saving": "finishing", "finished": "finished"}
        state = "waiting" if rounds is None or not rounds.started else phases.get(rounds.phase, "training")
        return {
            "address": self._links.address,
            "pid": os.getpid(),
            "state": state,
            "outer_step": self._step,
            "total_steps": terms.config.total_steps if terms else self.config.total_steps,
            "num_fragments": terms.config.num_fragments if terms else None,
            "sync_every": self.config.sync_every,
            "effective_sync_every": round(rounds.effective_sync_every, 1) if rounds else None,
            "merges": self._num_merges,
            "last_participants": self._last_participants,
            "mean_participants": self._num_participants / self._num_merges if self._num_merges else None,
            "bytes_received": sum(received for received, _ in moved),
            "bytes_sent": sum(sent for _, sent in moved),
            "seconds": round(now - self._start, 1),
            "learners": [
                account.to_dict(states.get(learner_id, "absent"))
                for learner_id, account in sorted(self._accounts.items())
            ],
        }

    def _write_status(self) -> None:
        """Replace ``status.json`` in one move, so that a reader never sees half of it."""
        aside = self._directory.status.with_suffix(".tmp")
        try:
            aside.write_text(json.dumps(self.status()))
            aside.replace(self._directory.status)
        except OSError as error:
            logger.warning("[syncer] %s cannot be written: %s", self._directory.status, error)
