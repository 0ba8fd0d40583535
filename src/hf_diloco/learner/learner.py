"""The learner: what the training thread calls, at its step boundaries."""

from __future__ import annotations

import json
import logging
import os
import socket
import time
import uuid
import warnings
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer

import hf_diloco
from hf_diloco.config import DiLoCoPlugin
from hf_diloco.core import messages as ms
from hf_diloco.core.fragments import FragmentLayout
from hf_diloco.core.message_json import to_wire
from hf_diloco.errors import DiLoCoWarning
from hf_diloco.learner.accounts import Accounts
from hf_diloco.learner.donation import Donor, take_state
from hf_diloco.learner.exchange import Exchange
from hf_diloco.learner.joining import Patience, check_healed, rpc_link, send_statistics, supply
from hf_diloco.learner.metrics import metrics
from hf_diloco.learner.operations import Kind, Operation, Plan, Word
from hf_diloco.learner.parameters import ModelParameters
from hf_diloco.learner.passes import next_shard
from hf_diloco.learner.rank import Rank, never
from hf_diloco.learner.ranks import OneRank, Ranks
from hf_diloco.learner.reporter import Reporter
from hf_diloco.learner.shared_state import send_state
from hf_diloco.links.base import LearnerLink

logger = logging.getLogger(__name__)

_GOODBYE_SECONDS = 5.0
_PAUSE_SECONDS = 0.2  # between boundaries while nothing happens
_SHORT_PAUSE_SECONDS = 0.005  # ... while the other ranks have something to do
_EMPTY = torch.empty(0, dtype=torch.uint8)


class Learner(Rank):
    """One learner of a run, or its rank 0: ships and applies fragments while the model trains.

    All methods are for the thread that trains. None of them waits for the network but ``join``, ``finish`` and
    ``leave``; what takes time runs in the background (:class:`~hf_diloco.learner.exchange.Exchange`). While the link
    is down, training goes on and unmerged progress is kept.

    Args:
        parameters: the live model.
        plugin: where the syncer is, and which learner this is.
        total_steps: how long the training script means to train; None to take the run's.
        steps_from_epochs: ``total_steps`` was worked out from epochs and this learner's own shard, so that it may
            differ between learners; the run takes the first learner's.
        files: config and tokenizer files by name, for the exported model; sent if this learner supplies the initial
            values.
        optimizer: the inner optimizer. A learner that begins in mid-run without state for it gets a peer's, or a short
            warm-up of its learning rate.
        link: for tests; default is a link over ``torch.distributed.rpc`` to ``plugin.syncer``.
        ranks: the processes of this learner, if there are several.
    """

    def __init__(
        self,
        parameters: ModelParameters,
        plugin: DiLoCoPlugin,
        *,
        total_steps: int | None,
        steps_from_epochs: bool = False,
        files: Mapping[str, bytes] | None = None,
        optimizer: Optimizer | None = None,
        link: LearnerLink | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        super().__init__(parameters, plugin, ranks or OneRank(), optimizer)
        assert self._ranks.rank == 0
        self.total_steps = total_steps or 0
        self._wanted_steps, self._steps_from_epochs = total_steps, steps_from_epochs
        self._files = dict(files or {})
        self._incarnation = uuid.uuid4().hex[:12]
        self._exchange = Exchange(
            self.learner_id,
            self._incarnation,
            link or rpc_link(plugin, self._incarnation),
            hello=self._hello,
            make_layout=self._layout,
        )
        self._accounts = Accounts(self._exchange)
        self._donor = Donor(self.learner_id, self._exchange, self._optimizer_state, self._why_not)
        self._reporter = Reporter(self._exchange, self._accounts)
        self._patience: Patience

    # ------------------------------------------------------------------------------------------------------ joining

    def join(self, *, interrupted: Callable[[], bool] = never) -> bool:
        """Become part of the run: get the global parameters (or supply the initial ones) and wait for the start.

        Args:
            interrupted: whether this process was told to stop; looked at while waiting, and at each step boundary.

        Returns:
            False if it was interrupted.

        Raises:
            SyncerUnreachableError: nobody answered for ``join_timeout_seconds``.
            AuthenticationError: the token is wrong.
            LearnerRefusedError: the syncer refused this learner.
        """
        logger.info("[learner %d] looking for the syncer at %s", self.learner_id, self._plugin.syncer)
        self._interrupted = interrupted
        exchange = self._exchange
        self._patience = Patience(self.learner_id, exchange, self._plugin.syncer, self._plugin.join_timeout_seconds)
        exchange.open()
        if self._until(self._joining) is Word.GIVE_UP:
            return False
        assert self._welcome is not None
        self.total_steps = self._welcome.total_steps
        takes_state = self._optimizer is not None and bool(exchange.started_at)
        shard = None if exchange.lease is None else exchange.lease.shard
        start = [self.global_step, self.total_steps, takes_state, shard]
        self._ranks.share(json.dumps(start).encode())
        if self._lease is not None and shard is not None:
            self._lease.move(shard)
        if takes_state:
            self._take_state()
            if self.interrupted:
                return False
        check_healed(exchange, self._parameters)
        self._reporter.begin()
        logger.info("[learner %d · step %d] training with %s", self.learner_id, self.global_step, self._plugin.syncer)
        return True

    def _joining(self) -> Word:
        self._exchange.check()
        self._show_notices()
        if self.interrupted:
            return Word.GIVE_UP
        if self._joined():
            return Word.DONE
        self._patience.check()
        return Word.GO_ON

    def _joined(self) -> bool:
        with (exchange := self._exchange).lock:
            healed = bool(exchange.fragments) and all(local.version is not None for local in exchange.fragments)
            may_begin = exchange.started_at is not None or exchange.released is not None
            knows_shard = self._lease is None or exchange.lease is not None
            has_kept_up = exchange.keep_up_with is None and self._ranks.is_idle
        return healed and knows_shard and may_begin and has_kept_up

    def _take_state(self) -> None:
        """Give the inner optimizer the best state there is, on all ranks."""
        state, taken, failure, has_own = self._optimizer_state, None, None, self._has_own_state()
        try:
            taken = take_state(
                self.learner_id, self._exchange, state,
                lambda: self._boundary(self._plan()), lambda: self.interrupted, has_own=has_own, why_not=self._why_not,
            )  # fmt: skip
        except Exception as error:  # the other ranks are to hear of it before it is raised
            failure = error

        def ended() -> Word:
            if failure is not None:
                raise failure
            return Word.DONE if self._ranks.is_idle else Word.GO_ON

        self._until(ended)
        assert taken is not None
        if taken.source == "warm-up":
            self._warm_up()
        self._exchange.send(taken)
        send_state(self._ranks, taken, state)

    def _hello(self) -> ms.Hello:
        none = ms.Version(0, 0)
        return ms.Hello(
            incarnation=self._incarnation,
            host=f"{socket.gethostname()}, pid {os.getpid()}",
            shapes=tuple(self._parameters.shapes.items()),
            averaged=self._parameters.averaged,
            constants_digest=self._constants_digest,
            total_steps=self._wanted_steps,
            steps_from_epochs=self._steps_from_epochs,
            num_shards=self._plugin.num_shards if self._lease is None else self._lease.num_shards,
            shard=None if self._lease is None else self._lease.shard,
            library_version=hf_diloco.__version__,
            global_step=self.global_step,
            held=tuple(local.version or none for local in self._exchange.fragments),
        )

    def _layout(self, welcome: ms.Welcome) -> FragmentLayout:
        return FragmentLayout.build(self._parameters.shapes, welcome.num_fragments, welcome.averaged)

    def _on_welcome(self) -> None:
        self._welcome = welcome = self._exchange.welcome
        assert welcome is not None
        self._ranks.share(json.dumps(to_wire(welcome)).encode())
        self._fragments = [local.fragment for local in self._exchange.fragments]

    def _value(self, fragment_index: int) -> Tensor:
        anchor = self._exchange.fragments[fragment_index].anchor
        assert anchor is not None
        return anchor

    def _supply(self) -> None:
        supply(self.learner_id, self._exchange, self._parameters, self._fragments, self._files)

    # ----------------------------------------------------------------------------------------------------- training

    def step(self, tokens: int, *, loss: float | None = None, data_digest: tuple[int, ...] | None = None) -> bool:
        """Count one inner step, apply what has arrived, ship what was asked for.

        Call it after the optimizer step, when no gradients are alive.

        Args:
            tokens: trained in this step.
            loss: the last training loss, for people who watch.
            data_digest: hashes of examples that were read, if there are new ones, to find others that read the same.

        Returns:
            False when training should end: ``global_step`` has reached ``total_steps``, or the syncer says so. Then
            call ``finish``.

        Raises:
            LearnerRefusedError: another process has taken this learner's place.
        """
        exchange, reporter = self._exchange, self._reporter
        reporter.step(loss, data_digest)
        self.global_step = min(self.global_step + 1, self.total_steps)  # who joins at the end makes one more
        self._accounts.has_trained = True
        ended = exchange.stop_reason is not None or exchange.released is not None
        word = Word.FAILED if exchange.fatal is not None else Word.STOP if ended else Word.GO_ON
        plan = self._plan() if word is not Word.FAILED else Plan()
        plan.word, plan.steps, plan.tokens = word, 1, tokens
        plan.save_wanted, exchange.save_wanted = exchange.save_wanted, None
        word = self._boundary(plan).word
        if word is Word.FAILED:
            exchange.check()
        if self._donor.has_work:
            self._donor.serve()
        reporter.report_now_and_then(self.global_step)
        if exchange.notices:
            self._show_notices()
        return word is not Word.STOP and self.global_step < self.total_steps

    def _next_shard(self, own: int, interrupted: Callable[[], bool]) -> bytes:
        return str(next_shard(self._exchange, own, self._num_passes, interrupted)).encode()

    def saved_checkpoint(self, outer_step: int, path: str) -> None:
        """Say where this learner has saved its part of that checkpoint."""
        self._exchange.send(ms.SavedCheckpoint(outer_step=outer_step, path=path))

    def metrics(self) -> dict[str, float]:
        """How this learner is doing in the run (:func:`hf_diloco.learner.metrics.metrics`)."""
        return metrics(self._exchange, self._accounts)

    def _plan(self) -> Plan:
        """What has arrived since the last boundary; it is applied, then what was asked for is cut."""
        exchange, room = self._exchange, self._ranks.room
        if self._welcome is None:
            return Plan(operations=[Operation(Kind.WELCOME)] if exchange.welcome is not None and room else [])
        if exchange.supply_wanted and room:
            exchange.supply_wanted = False
            return Plan(operations=[Operation(Kind.SUPPLY)])
        if exchange.keep_up_with is not None and room:
            outer_step, exchange.keep_up_with = exchange.keep_up_with, None
            return Plan(operations=[Operation(Kind.KEEP_UP, outer_step=outer_step)])
        return Plan(operations=self._accounts.plan(room))

    def _count(self, steps: int, tokens: int) -> None:
        self._accounts.count(steps, tokens)

    def _until(self, ended: Callable[[], Word]) -> Word:
        """Boundary after boundary until ``ended`` says how the wait is over; all ranks then stand at the same one."""
        failure: Exception | None = None
        while True:
            try:
                word = ended()
            except Exception as error:
                word, failure = Word.FAILED, error
            plan = self._plan() if word is Word.GO_ON else Plan(word=word)
            agreed = self._boundary(plan).word
            if word is not Word.GO_ON and self._ranks.size > 1:
                agreed = self._boundary(Plan()).word  # that at which all know it
            if agreed is Word.FAILED:
                self._exchange.check()
                assert failure is not None
                raise failure
            if agreed in (Word.DONE, Word.GIVE_UP):
                return agreed
            self._pause()

    def _pause(self) -> None:
        """Until something happens, but not for long."""
        with (exchange := self._exchange).changed:
            is_new = exchange.supply_wanted or (exchange.welcome is not None and self._welcome is None)
            is_new = is_new or exchange.keep_up_with is not None
            if not self._ranks.is_idle or not (is_new or self._accounts.has_work()):
                exchange.changed.wait(timeout=_PAUSE_SECONDS if self._ranks.is_idle else _SHORT_PAUSE_SECONDS)

    def _show_notices(self) -> None:
        with self._exchange.lock:
            notices, self._exchange.notices = self._exchange.notices, []
        for text in notices:
            warnings.warn(text, DiLoCoWarning, stacklevel=3)

    # ----------------------------------------------------------------------------------------------------- the end

    def finish(self, *, interrupted: Callable[[], bool] = never) -> bool:
        """Wait for the final global values; then the model holds them.

        Goes on answering until the last fragment is merged. Blocks while other learners still train, at most the
        run's ``finish_wait_seconds``, and while the syncer is away.

        Args:
            interrupted: looked at while waiting.

        Returns:
            False if it was interrupted, or the syncer was away for ``lost_timeout_seconds`` (and a warning was given);
            the model then keeps its local values.
        """
        self._interrupted, self._reporter.finished = interrupted, True
        self._reporter.begin_to_wait()
        logger.info("[learner %d · step %d] done; waiting for the final values", self.learner_id, self.global_step)
        if self._until(self._waits_for_release) is Word.GIVE_UP:
            return False
        self.restore()
        logger.info("[learner %d · step %d] the model holds the global values", self.learner_id, self.global_step)
        self._say_goodbye(ms.Goodbye(reason="the run is over"))
        return True

    def _waits_for_release(self) -> Word:
        exchange = self._exchange
        if exchange.released is not None:
            is_done = self._ranks.is_idle and all(local.ready is None for local in exchange.fragments)
            return Word.DONE if is_done else Word.GO_ON
        if self.interrupted:
            return Word.GIVE_UP
        exchange.check()
        if self._reporter.is_on_new_link():
            send_statistics(exchange, self._parameters)
            self._reporter.report(self.global_step, _EMPTY)  # keeps its place behind the statistics
        away_seconds = 0.0 if exchange.linked else time.monotonic() - exchange.down_since
        if away_seconds > self._plugin.lost_timeout_seconds:
            warnings.warn(
                f"the syncer at {self._plugin.syncer} was away for {away_seconds:.0f} s: the model keeps this "
                "learner's own values. The global ones can be had with `hf-diloco export` on the syncer's machine.",
                DiLoCoWarning,
                stacklevel=4,
            )
            return Word.GIVE_UP
        return Word.GO_ON

    def leave(self, reason: str, *, drain_seconds: float = 0.0, for_good: bool = True) -> None:
        """Take leave before the run is over; the others go on. The model keeps its local values.

        Args:
            reason: for the syncer's log.
            for_good: False if it is to be started again: a run that all have left for good is over.
            drain_seconds: how long to wait until all is merged; what is not merged by then is lost to the run.
        """
        self._boundary(Plan())  # with several ranks, the last step is counted only now
        self._reporter.begin_to_wait()
        if drain_seconds > 0 or self._ranks.size > 1:
            self._drain(reason, time.monotonic() + drain_seconds)
        if self._accounts.has_trained:
            send_statistics(self._exchange, self._parameters)
        self._say_goodbye(ms.Goodbye(reason=reason, for_good=for_good))

    def _drain(self, reason: str, deadline: float) -> None:
        """Have everything merged that is not, and apply the result."""

        def ended() -> Word:
            if self._exchange.fatal is not None or time.monotonic() >= deadline or not self._accounts.unmerged_steps():
                return Word.DONE
            if self._reporter.is_on_new_link():
                self._reporter.report(self.global_step)
                self._exchange.send(ms.Leaving(reason=reason))
            return Word.GO_ON

        self._until(ended)
        if left := self._accounts.unmerged_steps():
            logger.warning("[learner %d] leaves with %d steps that were not merged", self.learner_id, left)
        else:
            logger.info("[learner %d] all it has done is merged", self.learner_id)

    def _say_goodbye(self, goodbye: ms.Goodbye) -> None:
        self._reporter.report(self.global_step)  # what became of the last tokens
        self._exchange.send_last(goodbye, _EMPTY)
        self._exchange.close(drain_seconds=_GOODBYE_SECONDS)
        self._ranks.share(b"")  # the others stay until nothing is on its way from them any more

    def close(self) -> None:
        """As a rank does; and the link."""
        self._exchange.close()
        super().close()
