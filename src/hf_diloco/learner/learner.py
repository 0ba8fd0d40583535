"""The learner: what the training thread calls, at its step boundaries."""

from __future__ import annotations

import logging
import os
import socket
import time
import uuid
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor
from torch.optim import Optimizer

import hf_diloco
from hf_diloco.config import DiLoCoPlugin
from hf_diloco.core import messages as ms
from hf_diloco.core.codec import encode
from hf_diloco.core.fragments import Fragment, FragmentLayout
from hf_diloco.errors import DiLoCoError, DiLoCoWarning, SyncerUnreachableError
from hf_diloco.learner.donation import Donor, take_state
from hf_diloco.learner.exchange import Cut, Exchange
from hf_diloco.learner.lease import lease_of
from hf_diloco.learner.local import LocalFragment, Prepared
from hf_diloco.learner.metrics import metrics
from hf_diloco.learner.optimizer_state import optimizer_state
from hf_diloco.learner.parameters import ModelParameters
from hf_diloco.learner.passes import next_shard
from hf_diloco.links.base import LearnerLink

logger = logging.getLogger(__name__)

_REPORT_EVERY_SECONDS = 0.05
_SAY_EVERY_SECONDS = 10.0
_WEIGHT_OF_NEWEST_STEP = 0.2
_LONGEST_STEP = 4  # times the usual one: an evaluation between two steps does not count in full
_GOODBYE_SECONDS = 5.0


def _never() -> bool:
    return False


class Learner:
    """One learner of a run: ships and applies fragments while the model trains.

    All methods are for the thread that trains. None of them waits for the network but ``join`` and ``finish``; what
    takes time runs in the background (:class:`~hf_diloco.learner.exchange.Exchange`). While the link is down,
    training goes on and unmerged progress is kept.

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
    ) -> None:
        assert plugin.learner_id is not None
        self.learner_id = plugin.learner_id
        self.global_step = 0
        self.total_steps = total_steps or 0
        self._parameters, self._plugin = parameters, plugin
        self._wanted_steps, self._steps_from_epochs = total_steps, steps_from_epochs
        self._files = dict(files or {})
        self._constants_digest = parameters.constants_digest()
        self._lease, self._num_passes = lease_of(plugin), 0
        incarnation = uuid.uuid4().hex[:12]
        self._incarnation = incarnation
        self._exchange = Exchange(
            plugin.learner_id,
            incarnation,
            link or _rpc_link(plugin, incarnation),
            hello=self._hello,
            make_layout=self._layout,
        )
        self._optimizer = optimizer
        self._optimizer_state = optimizer_state(parameters.trainable, optimizer)
        self._donor = Donor(plugin.learner_id, self._exchange, self._optimizer_state)
        self._steps = 0
        self._tokens = 0
        self._tokens_overwritten = self._steps_overwritten = 0.0  # mean over the fragments
        self._step_seconds = 0.0
        self._stepped_at: float | None = None
        self._reported_at = 0.0
        self._loss: float | None = None
        self._data_digest: tuple[int, ...] = ()
        self._digest_said_on = -1  # the link it was last sent on
        self._finishing = False
        self._starts_over = False

    # ------------------------------------------------------------------------------------------------------ joining

    def join(self, *, interrupted: Callable[[], bool] = _never) -> bool:
        """Become part of the run: get the global parameters (or supply the initial ones) and wait for the start.

        Args:
            interrupted: looked at while waiting.

        Returns:
            False if it was interrupted.

        Raises:
            SyncerUnreachableError: nobody answered for ``join_timeout_seconds``.
            AuthenticationError: the token is wrong.
            LearnerRefusedError: the syncer refused this learner.
        """
        logger.info("[learner %d] looking for the syncer at %s", self.learner_id, self._plugin.syncer)
        exchange = self._exchange
        opened_at = said_at = time.monotonic()
        exchange.open()
        while not self._joined():
            if interrupted():
                return False
            with exchange.changed:
                exchange.changed.wait(timeout=0.2)
            exchange.check()
            self._show_notices()
            self._boundary()
            if exchange.supply_wanted:
                self._supply()
            now = time.monotonic()
            if not exchange.ever_linked and now - opened_at > self._plugin.join_timeout_seconds:
                raise SyncerUnreachableError(
                    f"no syncer answered at {self._plugin.syncer} for {self._plugin.join_timeout_seconds:.0f} s (last: "
                    f"{exchange.last_error() or 'no answer'}). Check that `hf-diloco syncer` is running, that the "
                    "address is right and that a firewall lets its port through."
                )
            if now - said_at > _SAY_EVERY_SECONDS:
                said_at = now
                missing = f"no syncer yet at {self._plugin.syncer}: {exchange.last_error() or 'no answer'}"
                what = "waiting for the start: other learners are missing" if exchange.linked else missing
                logger.warning("[learner %d] %s (%.0f s so far)", self.learner_id, what, now - opened_at)
        assert exchange.welcome is not None
        self.total_steps = exchange.welcome.total_steps
        if self._lease is not None and exchange.lease is not None:
            self._lease.move(exchange.lease.shard)
        if self._optimizer is not None and exchange.started_at:
            state = self._optimizer_state
            exchange.send(take_state(self.learner_id, exchange, self._optimizer, state, self._boundary, interrupted))
            if interrupted():
                return False
        self._check_healed()
        self._stepped_at = time.monotonic()
        logger.info("[learner %d · step %d] training with %s", self.learner_id, self.global_step, self._plugin.syncer)
        return True

    def _check_healed(self) -> None:
        for index, local in enumerate(self._exchange.fragments):
            assert local.anchor is not None
            if not self._parameters.holds(local.fragment, local.anchor):
                raise DiLoCoError(
                    f"fragment {index} of the model does not hold the global value that was written to it. Does "
                    "something else change the parameters before the first step (a callback, another thread)?"
                )

    def _joined(self) -> bool:
        with self._exchange.lock:
            exchange = self._exchange
            healed = bool(exchange.fragments) and all(local.version is not None for local in exchange.fragments)
            if exchange.started_at is not None:
                self.global_step = max(self.global_step, exchange.started_at)
            knows_shard = self._lease is None or exchange.lease is not None
            return healed and knows_shard and (exchange.started_at is not None or exchange.released is not None)

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
            torch_version=torch.__version__,
            global_step=self.global_step,
            held=tuple(local.version or none for local in self._exchange.fragments),
        )

    def _layout(self, welcome: ms.Welcome) -> FragmentLayout:
        return FragmentLayout.build(self._parameters.shapes, welcome.num_fragments, welcome.averaged)

    def _supply(self) -> None:
        exchange = self._exchange
        exchange.supply_wanted = False
        logger.info("[learner %d] sending the initial parameters", self.learner_id)
        for index, local in enumerate(exchange.fragments):
            value = self._parameters.read(local.fragment).result()
            exchange.send(ms.SupplyFragment(fragment_index=index), encode(value, "fp32"))
        for name, tensor in self._parameters.constants():
            message = ms.SupplyConstant(
                name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape)
            )
            exchange.send(message, tensor.contiguous().view(-1).view(torch.uint8))
        for name, content in self._files.items():
            payload = torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0).byte()
            exchange.send(ms.SupplyFile(name=name), payload)
        exchange.send(ms.Supplied(), torch.empty(0, dtype=torch.uint8))

    # ----------------------------------------------------------------------------------------------------- training

    def step(self, tokens: int, *, loss: float | None = None, data_digest: tuple[int, ...] | None = None) -> bool:
        """Count one inner step, apply what has arrived, ship what was asked for.

        Call it after the optimizer step, when no gradients are alive.

        Args:
            tokens: trained in this step.
            loss: the last training loss, for people who watch.
            data_digest: hashes of examples that were read, if there are new ones, to find learners that read the same
                data.

        Returns:
            False when training should end: ``global_step`` has reached ``total_steps``, or the syncer says so. Then
            call ``finish``.

        Raises:
            LearnerRefusedError: another process has taken this learner's place.
        """
        self._exchange.check()
        now = time.monotonic()
        if self._stepped_at is not None:
            self._measure(now - self._stepped_at)
        self._stepped_at = now
        self.global_step += 1
        self._steps += 1
        self._tokens += tokens
        self._exchange.steps_done = self._steps
        self._loss = loss
        if data_digest is not None:
            self._data_digest, self._digest_said_on = data_digest, -1
        self._boundary()
        if self._donor.has_work:
            self._donor.serve()
        if now - self._reported_at >= _REPORT_EVERY_SECONDS:
            self._reported_at = now
            self._report()
        if self._exchange.notices:
            self._show_notices()
        ended = self._exchange.stop_reason is not None or self._exchange.released is not None
        return not ended and self.global_step < self.total_steps

    def end_pass(self, *, interrupted: Callable[[], bool] = _never) -> bool:
        """Between two passes over the data: take the shard that the syncer leases for the next one.

        Args:
            interrupted: looked at while waiting for the syncer's answer.

        Returns:
            Whether it is another shard. It is the same one without a data set whose shard can change.
        """
        if self._lease is None:
            return False
        own = self._lease.shard
        self._num_passes += 1
        self._lease.move(next_shard(self._exchange, own, self._num_passes, interrupted))
        logger.info("[learner %d · step %d] reads shard %d", self.learner_id, self.global_step, self._lease.shard)
        return self._lease.shard != own

    def take_save_wanted(self) -> int | None:
        """Outer step of a checkpoint of the whole run that this learner is to save its part of, now; said once."""
        wanted, self._exchange.save_wanted = self._exchange.save_wanted, None
        return wanted

    def saved_checkpoint(self, outer_step: int, path: str) -> None:
        """Say where this learner has saved its part of that checkpoint."""
        self._exchange.send(ms.SavedCheckpoint(outer_step=outer_step, path=path))

    def starts_over(self) -> bool:
        """Whether the syncer refused so many updates that the model now holds the global parameters; said once."""
        said, self._starts_over = self._starts_over, False
        return said

    def metrics(self) -> dict[str, float]:
        """How this learner is doing in the run (:func:`hf_diloco.learner.metrics.metrics`)."""
        return metrics(
            self._exchange,
            tokens=self._tokens,
            tokens_overwritten=self._tokens_overwritten,
            steps_overwritten=self._steps_overwritten,
        )

    def _measure(self, seconds: float) -> None:
        if not self._step_seconds:
            self._step_seconds = seconds
        seconds = min(seconds, _LONGEST_STEP * self._step_seconds)
        self._step_seconds += _WEIGHT_OF_NEWEST_STEP * (seconds - self._step_seconds)

    def _boundary(self) -> None:
        """Apply results, then ship: an answer is cut from a value that everything applied so far is in."""
        exchange = self._exchange
        with exchange.lock:
            ready = [
                (index, local.fragment, self._take(local, local.ready))
                for index, local in enumerate(exchange.fragments)
                if local.ready is not None
            ]
        for index, fragment, prepared in ready:
            self._apply(index, fragment, prepared)
        if exchange.asks:
            self._answer()

    def _take(self, local: LocalFragment, prepared: Prepared) -> Prepared:
        """Make the prepared value the anchor and settle the counts; the caller then writes to the model."""
        local.ready = None
        assert self._exchange.welcome is not None
        if not self._steps:
            prepared = replace(prepared, correction=None)  # nothing to keep: exactly the published value
        under_way = self._exchange.welcome.on_arrival == "carry" and (local.cutting or local.shipped is not None)
        if prepared.start_over:
            local.start += 1
        elif prepared.correction is None and local.anchor is not None and under_way:
            # Progress was to be given up, but since that was decided a part of it was cut, and may be merged: keep it.
            prepared = replace(prepared, correction=prepared.published - local.anchor)
        if prepared.merged is not None:
            local.accounted_steps += prepared.merged.steps
            local.accounted_tokens += prepared.merged.tokens
            if local.shipped is prepared.merged:
                local.shipped = None
        if prepared.start_over:
            local.shipped = None  # if it is merged yet, nothing of it is to be taken out of what is here now
        if prepared.correction is None and local.anchor is not None:
            self._tokens_overwritten += (self._tokens - local.accounted_tokens) / len(self._exchange.fragments)
            self._steps_overwritten += (self._steps - local.accounted_steps) / len(self._exchange.fragments)
            local.accounted_steps, local.accounted_tokens = self._steps, self._tokens
        local.anchor, local.version = prepared.published, prepared.version
        return prepared

    def _apply(self, index: int, fragment: Fragment, prepared: Prepared) -> None:
        welcome = self._exchange.welcome
        assert welcome is not None
        if prepared.correction is not None:
            self._parameters.add_(fragment, prepared.correction)
        else:
            keep_some = welcome.on_arrival == "overwrite" and self._steps and not prepared.start_over
            mix = welcome.local_mix if keep_some else 0.0
            self._parameters.write_(fragment, prepared.published, mix)
        self._starts_over = self._starts_over or prepared.start_over
        self.global_step = max(self.global_step, min(prepared.version.outer_step, welcome.total_steps))
        applied = ms.Applied(fragment_index=index, version=prepared.version, digest=prepared.digest)
        exact = welcome.on_arrival == "overwrite" and not welcome.local_mix and welcome.wire_format == "fp32"
        logger.debug(
            "[learner %d · step %d] applied fragment %d of version %s",
            self.learner_id, self.global_step, index, tuple(prepared.version),
        )  # fmt: skip
        self._exchange.confirm(applied, self._parameters.read(fragment) if exact else None)

    def _answer(self) -> None:
        exchange = self._exchange
        with exchange.lock:
            asks, exchange.asks = exchange.asks, {}
            for index, waiting in asks.items():
                local = exchange.fragments[index]
                if local.anchor is None or local.version is None:
                    continue
                steps, tokens = self._steps - local.accounted_steps, self._tokens - local.accounted_tokens
                if steps == 0:
                    exchange.answer_nothing(waiting, local.version)
                    continue
                held_seconds = time.monotonic() - waiting.arrived_at
                snapshot = self._parameters.read(local.fragment)
                local.cutting = True
                cut = Cut(waiting.ask, snapshot, local.anchor, local.version, steps, tokens, held_seconds, local.start)
                exchange.ship(cut)

    def _report(self, payload: Tensor | None = None) -> None:
        is_news = self._digest_said_on != self._exchange.num_links
        self._digest_said_on = self._exchange.num_links
        self._exchange.send(
            ms.Progress(
                global_step=self.global_step,
                steps=self._steps,
                tokens=self._tokens,
                step_seconds=max(self._step_seconds, 1e-6),
                loss=self._loss,
                finished=self._finishing,
                data_digest=self._data_digest if is_news else (),
                tokens_overwritten=round(self._tokens_overwritten),
            ),
            payload,
        )

    def _show_notices(self) -> None:
        with self._exchange.lock:
            notices, self._exchange.notices = self._exchange.notices, []
        for text in notices:
            warnings.warn(text, DiLoCoWarning, stacklevel=3)

    # ----------------------------------------------------------------------------------------------------- the end

    def finish(self, *, interrupted: Callable[[], bool] = _never) -> bool:
        """Wait for the final global values; then the model holds them.

        Goes on answering until the last fragment is merged. Blocks while other learners still train, at most the
        run's ``finish_wait_seconds``, and while the syncer is away.

        Args:
            interrupted: looked at while waiting.

        Returns:
            False if it was interrupted, or the syncer was away for ``lost_timeout_seconds`` (and a warning was given);
            the model then keeps its local values.
        """
        exchange, self._finishing = self._exchange, True
        logger.info("[learner %d · step %d] done; waiting for the final values", self.learner_id, self.global_step)
        reported_on = -1
        while exchange.released is None:
            if interrupted():
                return False
            exchange.check()
            self._boundary()
            with exchange.changed:
                num_links, away_seconds = exchange.num_links, time.monotonic() - exchange.down_since
                linked = exchange.linked
                if linked and num_links == reported_on and exchange.released is None and not self._has_work():
                    exchange.changed.wait(timeout=1.0)
            if linked and num_links != reported_on:
                reported_on = num_links
                self._send_statistics()
                self._report(torch.empty(0, dtype=torch.uint8))  # keeps its place behind the statistics
            elif not linked and away_seconds > self._plugin.lost_timeout_seconds:
                warnings.warn(
                    f"the syncer at {self._plugin.syncer} was away for {away_seconds:.0f} s: the model keeps this "
                    "learner's own values. The global ones can be had with `hf-diloco export` on the syncer's machine.",
                    DiLoCoWarning,
                    stacklevel=2,
                )
                return False
            elif not linked:
                time.sleep(0.05)
        self._boundary()
        self.restore()
        logger.info("[learner %d · step %d] the model holds the global values", self.learner_id, self.global_step)
        self._report()  # what became of the last tokens
        exchange.send(ms.Goodbye(reason="the run is over"), torch.empty(0, dtype=torch.uint8))
        exchange.close(drain_seconds=_GOODBYE_SECONDS)
        return True

    def _send_statistics(self) -> None:
        for name, tensor in self._parameters.statistics():
            message = ms.Statistic(name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape))
            self._exchange.send(message, tensor.view(-1).view(torch.uint8))

    def _has_work(self) -> bool:
        return bool(self._exchange.asks) or any(local.ready is not None for local in self._exchange.fragments)

    def restore(self) -> None:
        """Write the global values, as this learner last received them, into the model."""
        for local in self._exchange.fragments:
            if local.anchor is not None:
                self._parameters.write_(local.fragment, local.anchor)

    def leave(self, reason: str, *, drain_seconds: float = 0.0, for_good: bool = True) -> None:
        """Take leave before the run is over; the others go on. The model keeps its local values.

        Args:
            reason: for the syncer's log.
            for_good: False if it is to be started again: a run that all have left for good is over.
            drain_seconds: how long to wait for what this learner has to be merged first. What is not merged by then
                is lost to the run.
        """
        if drain_seconds > 0:
            self._drain(reason, time.monotonic() + drain_seconds)
        self._report()  # what became of the last tokens
        self._exchange.send(ms.Goodbye(reason=reason, for_good=for_good), torch.empty(0, dtype=torch.uint8))
        self._exchange.close(drain_seconds=_GOODBYE_SECONDS)

    def _drain(self, reason: str, deadline: float) -> None:
        """Have everything merged that is not, and apply the result."""
        exchange, said_on = self._exchange, -1
        while self._unmerged_steps() and time.monotonic() < deadline and exchange.fatal is None:
            self._boundary()
            with exchange.changed:
                if exchange.linked and exchange.num_links != said_on:
                    said_on = exchange.num_links
                    self._report()
                    exchange.send(ms.Leaving(reason=reason))
                if not self._has_work():
                    exchange.changed.wait(timeout=0.2)
        if left := self._unmerged_steps():
            logger.warning("[learner %d] leaves with %d steps that were not merged", self.learner_id, left)
        else:
            logger.info("[learner %d] all it has done is merged", self.learner_id)

    def _unmerged_steps(self) -> int:
        with self._exchange.lock:
            return max((self._steps - local.accounted_steps for local in self._exchange.fragments), default=0)

    def close(self) -> None:
        """End the link without a word, as after an exception; the syncer counts this learner as absent. Idempotent."""
        self._exchange.close()


def _rpc_link(plugin: DiLoCoPlugin, incarnation: str) -> LearnerLink:
    from hf_diloco.links.rpc import RpcLearnerLink

    assert plugin.learner_id is not None
    host, port = plugin.address
    return RpcLearnerLink(host, port, plugin.read_token(), plugin.learner_id, incarnation)
