"""One run from the moment its terms are fixed: drives ``Rounds`` with what learners say, and does what it says."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from hf_diloco.core import events as ev
from hf_diloco.core import messages as ms
from hf_diloco.core.rounds import Rounds
from hf_diloco.errors import DiLoCoError
from hf_diloco.links.base import SyncerLinks
from hf_diloco.syncer.donations import Donations
from hf_diloco.syncer.history import History
from hf_diloco.syncer.joint import JointCheckpoints
from hf_diloco.syncer.ledger import Ledger
from hf_diloco.syncer.readers import Readers
from hf_diloco.syncer.restart import Restart
from hf_diloco.syncer.roster import Terms
from hf_diloco.syncer.run_directory import RunDirectory
from hf_diloco.syncer.saved_run import Facts, SavedRun
from hf_diloco.syncer.saver import Saver
from hf_diloco.syncer.shards import Shards
from hf_diloco.syncer.state import GlobalState
from hf_diloco.syncer.supply import Supply
from hf_diloco.syncer.tape import Tape
from hf_diloco.syncer.updates import Updates

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.05  # for the thread that writes a checkpoint


class Run:
    """Global parameters, protocol and accounts of one run; all methods are for the syncer's one thread.

    Args:
        terms: what the first learner and the settings fixed.
        links: to send on.
        tape: to write to.
        run_directory: where checkpoints go.
        incarnation: of this syncer process.
        saved: what the run goes on from, if it is not a new one: a checkpoint, and what happened since.
    """

    def __init__(
        self,
        terms: Terms,
        links: SyncerLinks,
        tape: Tape,
        run_directory: RunDirectory,
        *,
        incarnation: int = 1,
        saved: tuple[SavedRun, History] | None = None,
    ) -> None:
        self.terms = terms
        self.rounds = Rounds(terms.config, incarnation=incarnation)
        self.state = GlobalState(terms.layout, terms.config, incarnation)
        self.supply = Supply()
        self._donations = Donations(lambda: self.rounds.members, links)
        self.deadline: float | None = None  # when a Tick is wanted
        self.saved = False
        self.ledger = Ledger(terms.layout.num_fragments)
        self._links, self._tape = links, tape
        self._linked: set[int] = set()  # let in, and not gone since
        self._known: set[int] = set()  # let in, and not left for good
        self._updates = Updates(self.state, links, tape, self.ledger, lambda: self.outer_step)
        self._readers = Readers(links, tape)
        self._shards = Shards(links, tape)
        self._events: deque[ev.Event] = deque()
        self._restart = self._resume(*saved) if saved is not None else None
        self._joint = JointCheckpoints(terms.config.save_every, self.rounds.outer_step)
        earlier = saved[0].checkpoint.path if saved is not None else None
        self._saver = Saver(run_directory, terms, self.state, self.supply, earlier)

    def _resume(self, saved: SavedRun, history: History) -> Restart:
        self.supply.restore(saved.constants, saved.checkpoint.files, saved.facts.running_statistics)
        self.ledger.restore(saved.facts)
        self._updates.inspector.restore(saved.facts.norms, history.norms)
        self._known = set(history.known_learners)
        self._shards = Shards(self._links, self._tape, saved.facts.shard_passes)
        self.rounds.outer_step = history.outer_step
        logger.info(
            "[syncer · step %d] going on from %s; learners hand back what is newer",
            history.outer_step, saved.checkpoint.path,
        )  # fmt: skip
        return Restart(saved, history, self.state)

    @property
    def outer_step(self) -> int:
        """t; the last merges, after all have finished, count as the last step."""
        assert self.terms.config.total_steps is not None
        return min(self.rounds.outer_step, self.terms.config.total_steps)

    # ------------------------------------------------------------------------------------------ what learners say

    def join(self, learner_id: int, hello: ms.Hello) -> None:
        """Let a learner in whose Hello fits the terms."""
        self.ledger.account(learner_id).begin(hello)
        self._linked.add(learner_id)
        self._known.add(learner_id)
        logger.info("[syncer · step %d] learner %d (%s) is here", self.outer_step, learner_id, hello.host)
        self._tape.write("join", learner_id=learner_id, incarnation=hello.incarnation, host=hello.host)
        self._links.send([learner_id], self.terms.welcome(self.rounds.incarnation, self.outer_step))
        self._shards.join(learner_id, hello, time.monotonic())
        self.dispatch(_joined(learner_id, hello))

    def leave(self, learner_id: int, reason: str, *, for_good: bool) -> None:
        """A learner's link is gone, or it took leave."""
        if learner_id not in (self._known if for_good else self._linked):
            return
        self._linked.discard(learner_id)
        self._readers.forget(learner_id)
        self._shards.leave(learner_id, time.monotonic(), for_good=for_good)
        self._joint.gone(learner_id)
        if for_good:
            self._known.discard(learner_id)
        how = "took leave" if for_good else "is away"
        logger.info("[syncer · step %d] learner %d %s: %s", self.outer_step, learner_id, how, reason)
        self._tape.write("leave", learner_id=learner_id, reason=reason, for_good=for_good)
        self.dispatch(ev.Left(learner_id=learner_id, for_good=for_good))
        self._donations.left(learner_id, time.monotonic())

    def take(self, learner_id: int, message: ms.Message, payload: Tensor | None) -> None:
        """Handle a message of a learner that was let in.

        Raises:
            MessageError: it makes no sense.
        """
        if learner_id not in self._linked:
            return  # it was refused, or has not said hello
        if isinstance(message, ms.Progress):
            self._on_progress(learner_id, message)
        elif isinstance(message, ms.Update):
            self.dispatch(self._updates.arrive(learner_id, message, payload))
            self._updates.let_go()
        elif isinstance(message, ms.Applied):
            self._on_applied(learner_id, message)
        elif isinstance(message, ms.NeedFull):
            self._tape.write("refusal", learner_id=learner_id, fragment_index=message.fragment_index, reason="misfit")
            self.dispatch(ev.FullNeeded(learner_id=learner_id, fragment_index=message.fragment_index))
        elif isinstance(message, ms.Leaving):
            logger.info("[syncer · step %d] learner %d leaves soon: %s", self.outer_step, learner_id, message.reason)
            self.dispatch(ev.Leaving(learner_id=learner_id))
        elif isinstance(message, ms.Statistic):
            self.supply.take_statistic(learner_id, message, payload)
        elif isinstance(message, ms.SavedCheckpoint):
            self._joint.saved(learner_id, message.outer_step, message.path)
        elif isinstance(message, ms.Goodbye):
            self.supply.take_leave(learner_id)
            self.leave(learner_id, message.reason, for_good=message.for_good)
        elif isinstance(message, ms.HandedBack):
            if self._restart is not None:  # later it is too old: the recovery has ended without it
                self.dispatch(self._restart.take(learner_id, message, payload))
        elif isinstance(message, ms.WantShard):
            if self._shards.next(learner_id, message, time.monotonic()):
                self._readers.forget(learner_id)
        elif isinstance(message, ms.StateTaken):
            self._on_state_taken(learner_id, message)
        elif isinstance(message, ms.StateMessage):
            if self._restart is None:  # before that nobody is known to be healthy; who wants state asks again
                self._donations.take(learner_id, message, payload, time.monotonic())
        elif self.supply.take(learner_id, message, payload, self.state):
            self._tape.write("values", learner_id=learner_id, digests=self.state.digests)
            self._saver.begin(self._facts())  # nobody trains before a syncer that dies could go on from it

    def _on_progress(self, learner_id: int, message: ms.Progress) -> None:
        self.ledger.account(learner_id).report(message)
        if message.data_digest:
            self._readers.compare(learner_id, message.data_digest)
        self.dispatch(
            ev.Reported(
                learner_id=learner_id,
                global_step=message.global_step,
                steps=message.steps,
                step_seconds=message.step_seconds,
                finished=message.finished,
            )
        )

    def _on_state_taken(self, learner_id: int, message: ms.StateTaken) -> None:
        self._donations.end(learner_id)
        logger.info(
            "[syncer · step %d] learner %d begins with optimizer state: %s%s", self.outer_step, learner_id,
            message.source, f" ({message.reason})" if message.reason else "",
        )  # fmt: skip
        self._tape.write("state", learner_id=learner_id, **dataclasses.asdict(message))

    def _on_applied(self, learner_id: int, message: ms.Applied) -> None:
        if not 0 <= message.fragment_index < len(self.rounds.current):
            return
        self._tape.write(
            "applied",
            learner_id=learner_id,
            fragment_index=message.fragment_index,
            version=list(message.version),
            digest=message.digest,
        )
        self.dispatch(
            ev.Acknowledged(learner_id=learner_id, fragment_index=message.fragment_index, version=message.version)
        )

    # -------------------------------------------------------------------------------------------- what Rounds wants

    def dispatch(self, event: ev.Event) -> None:
        """Tell the protocol, and do what follows from it."""
        self._events.append(event)
        while self._events:
            protocol = self._restart or self.rounds
            for action in protocol.handle(self._events.popleft(), time.monotonic()):
                self._perform(action)

    def _perform(self, action: ev.Action) -> None:
        if isinstance(action, ev.WaitUntil):
            self.deadline = action.time
        elif isinstance(action, ev.Publish):
            self._publish(action)
        elif isinstance(action, ev.AskUpdates):
            ask = ms.Ask(round=action.round, fragment_index=action.fragment_index)
            self._links.send(list(action.learner_ids), ask)
        elif isinstance(action, ev.AcceptUpdate):
            self._updates.accept(action)
        elif isinstance(action, ev.RejectUpdate):
            self.ledger.account(action.learner_id).num_late += not action.refused
            logger.debug("[syncer] update of learner %d not merged: %s", action.learner_id, action.reason)
            closed = ms.RoundClosed(round=action.round, fragment_index=action.fragment_index)
            self._links.send([action.learner_id], closed)
        elif isinstance(action, ev.CloseRound):
            closed = ms.RoundClosed(round=action.round, fragment_index=action.fragment_index)
            self._links.send(list(action.learner_ids), closed)
        elif isinstance(action, ev.MergeRound):
            self._events.append(self._updates.merge(action))
        elif isinstance(action, ev.DiscardRound):
            self._updates.discard(action.round)
        else:
            self._perform_on_learner(action)

    def _perform_on_learner(self, action: ev.Action) -> None:
        if isinstance(action, ev.RequestValues):
            self._links.send([action.learner_id], ms.SendValues())
        elif isinstance(action, ev.StartTraining):
            self._links.send([action.learner_id], ms.Start(outer_step=self.outer_step))
        elif isinstance(action, ev.StopTraining):
            self._links.send([action.learner_id], ms.Stop(reason="another learner finished some time ago"))
        elif isinstance(action, ev.SaveFinal):
            self.save()
            self._events.append(ev.Saved())
        elif isinstance(action, ev.Release):
            self._links.send([action.learner_id], ms.Released(outer_step=self.outer_step))
        elif isinstance(action, ev.RequestHandBack):
            self._links.send([action.learner_id], ms.HandBack(fragment_index=action.fragment_index))
        elif isinstance(action, ev.EndRecovery):
            self._end_recovery()

    def _end_recovery(self) -> None:
        assert self._restart is not None
        restart, incarnation = self._restart, self.rounds.incarnation
        recovered = restart.end()
        self._tape.write(
            "recovered",
            durable=True,  # a version stamped by this incarnation must be known before anybody holds it
            incarnation=incarnation,
            outer_step=recovered.outer_step,
            fragments=restart.describe(recovered),
            num_handed_back=restart.num_handed_back,
        )
        for participants in restart.merges(recovered):
            self.ledger.add_merge(participants)
        self.state.stamp(incarnation)
        self.rounds, self._restart = Rounds(self.terms.config, incarnation=incarnation, recovered=recovered), None
        self._saver.due_at = time.monotonic()
        self._events.extend([*restart.said(), ev.Tick()])
        logger.info(
            "[syncer · step %d] recovered: %d of %d fragments were handed back by learners",
            recovered.outer_step, restart.num_handed_back, len(recovered.held),
        )  # fmt: skip

    def _publish(self, action: ev.Publish) -> None:
        payload, wire_format = self.state.payload(action.fragment_index, full=action.base is None)
        message = ms.Publication(
            fragment_index=action.fragment_index,
            version=action.version,
            base=action.base,
            wire_format=wire_format,
            digest=self.state.digests[action.fragment_index],
            merged_updates=action.merged_updates,
            closed_round=action.closed_round,
            num_participants=len(self.ledger.last_participants),
        )
        self._links.send(list(action.learner_ids), message, payload)

    # --------------------------------------------------------------------------------------------- what is left behind

    def wake_at(self, now: float) -> float:
        """When :meth:`look_after_checkpoints` or a Tick is wanted."""
        soon = self._saver.due_at if self._may_checkpoint() else math.inf
        if self._saver.is_writing:
            soon = now + _POLL_SECONDS
        return min(soon, self.deadline if self.deadline is not None else math.inf)

    def _may_checkpoint(self) -> bool:
        phase = self.rounds.phase
        return self._restart is None and self.rounds.has_values and phase in ("training", "draining")

    def look_after_checkpoints(self, now: float) -> None:
        """Begin one if it is time; note what became of the last.

        Raises:
            DiLoCoError: the first one, without which nobody may train, could not be written.
        """
        try:
            path = self._saver.result()
        except DiLoCoError as error:
            if not self.rounds.has_values and self._restart is None:
                raise
            self._tape.warn(str(error))
            return
        if path is not None:
            self._tape.write("checkpoint", path=f"{path.parent.name}/{path.name}")
            if not self.rounds.has_values and self._restart is None:
                self.dispatch(ev.ValuesSupplied())
        if not self._may_checkpoint():
            return
        if self._joint.due(self.outer_step):
            self._ask_for_checkpoints(now)
        if self._saver.is_writing:
            return
        if paths := self._joint.take(now):
            self._saver.begin(self._facts(paths))
        elif now >= self._saver.due_at:
            self._saver.begin(self._facts())

    def _ask_for_checkpoints(self, now: float) -> None:
        """Of all learners that train: their parts of a checkpoint of the whole run."""
        if learner_ids := [member.learner_id for member in self.rounds.present(now) if not member.finished]:
            self._joint.begin(self.outer_step, learner_ids, now)
            self._links.send(learner_ids, ms.SaveCheckpoint(outer_step=self.outer_step))

    def _facts(self, learner_checkpoints: Mapping[int, str] | None = None) -> Facts:
        return Facts(
            incarnation=self.rounds.incarnation,
            outer_step=self.outer_step,
            started=self.rounds.started,
            known_learners=sorted(self._known),
            accounts=[account.save() for account in self.ledger.accounts.values()],
            num_merges=self.ledger.num_merges,
            num_participants=self.ledger.num_participants,
            tape_bytes=self._tape.size_bytes,
            learner_checkpoints={str(who): path for who, path in (learner_checkpoints or {}).items()},
            final=self.rounds.phase == "saving",
            shard_passes=self._shards.num_passes,
            running_statistics=sorted(self.supply.running),
            norms=self._updates.inspector.norms,
        )

    def save(self) -> None:
        """The values of this moment, on disk, final ones at the end; not before the learners of a restart are heard."""
        if self.saved or self._restart is not None or not self.supply.complete:
            return
        if self.rounds.phase == "saving":
            self.state.settle()
        if warning := self.supply.settle({who: row.tokens_trained for who, row in self.ledger.accounts.items()}):
            self._tape.warn(warning)
        path = self._saver.write_now(self._facts(), self._tape)
        self.saved = True
        self._tape.write("checkpoint", durable=True, path=f"{path.parent.name}/{path.name}")

    def status(self, now: float) -> dict[str, Any]:
        """The run's part of ``status.json``."""
        states = {member.learner_id: member.state(now) for member in self.rounds.members.values()}
        return {
            "state": self._state_word(),
            "outer_step": self.outer_step,
            "total_steps": self.terms.config.total_steps,
            "num_fragments": self.terms.config.num_fragments,
            "sync_every": self.terms.config.sync_every,
            "effective_sync_every": round(self.rounds.effective_sync_every, 1),
            **self.rounds.start_gate(now),
            **self.ledger.status(states, self._links),
        }

    def _state_word(self) -> str:
        if self._restart is not None:
            return "recovering"
        phases = {"draining": "finishing", "saving": "finishing", "finished": "finished"}
        return phases.get(self.rounds.phase, "training") if self.rounds.started else "waiting"


def _joined(learner_id: int, hello: ms.Hello) -> ev.Joined:
    return ev.Joined(
        learner_id=learner_id, incarnation=hello.incarnation, global_step=hello.global_step, held=hello.held
    )
