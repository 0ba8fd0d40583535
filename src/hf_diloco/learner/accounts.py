"""What a learner has trained and what of it was merged; and what follows for the next step boundary.

For rank 0, which has the link. An operation is planned at one boundary and executed at this one (a learner of one
process) or at a later one. When it is planned, the exchange goes on from the new value (``anchor``, ``version``); steps
and tokens are settled when it is executed, since until then the model trains on without it. Operations on one fragment
are executed in the order in which they were planned, so an update is cut from a value that all publications before it
are in and none after it, and that is what its anchor was when it was planned. With several ranks a step is counted
when the tokens of all ranks are known, a boundary later: steps and tokens of an update always belong together.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from hf_diloco.core import messages as ms
from hf_diloco.learner.exchange import Exchange
from hf_diloco.learner.local import Cut, LocalFragment, OpenAsk, Prepared
from hf_diloco.learner.operations import Kind, Operation
from hf_diloco.learner.snapshots import Snapshot

logger = logging.getLogger(__name__)


class Accounts:
    """Plans operations out of what has arrived, and settles them.

    Args:
        exchange: of this learner.
    """

    def __init__(self, exchange: Exchange) -> None:
        self.has_trained = False
        self.steps = 0  # inner steps done, as far as it is known how many tokens they were
        self.tokens = 0  # tokens trained in them
        self.tokens_overwritten = self.steps_overwritten = 0.0  # mean over the fragments
        self._exchange = exchange
        self._is_starting_over = False

    def count(self, steps: int, tokens: int) -> None:
        """So many more were done."""
        self.steps += steps
        self.tokens += tokens
        self._exchange.steps_done = self.steps

    def unmerged_steps(self) -> int:
        """Steps that are in no merge yet, of the fragment that has most of them."""
        with self._exchange.lock:
            return max((self.steps - local.accounted_steps for local in self._exchange.fragments), default=0)

    def has_work(self) -> bool:
        """Something waits for the next boundary."""
        fragments = self._exchange.fragments
        can_answer = any(not fragments[index].cutting for index in list(self._exchange.asks))
        return can_answer or any(local.ready is not None for local in fragments)

    def plan(self, room: int) -> list[Operation]:
        """Apply what has arrived, then answer: an update is cut from a value that everything applied before is in.

        Args:
            room: at most so many operations.
        """
        exchange = self._exchange
        if self._is_starting_over or not self.has_work():
            return []
        with exchange.lock:
            if any(local.ready is not None and local.ready.start_over for local in exchange.fragments):
                return [self._plan_start_over()] if room else []
            planned: list[Operation] = []
            for index, local in enumerate(exchange.fragments):
                if local.ready is not None and len(planned) < room:
                    planned.append(self._plan_to_apply(index, local))
            for index, waiting in list(exchange.asks.items()):
                local = exchange.fragments[index]
                if local.cutting:
                    continue  # the last answer is still being encoded, and may turn out to be the answer to this
                if local.anchor is None or local.version is None:
                    del exchange.asks[index]
                elif len(planned) < room:
                    del exchange.asks[index]
                    local.cutting = True
                    cut = partial(self._ship, local, waiting, local.anchor, local.version, local.start)
                    planned.append(Operation(Kind.CUT, index, done=cut))
            return planned

    # ------------------------------------------------------------------------------------------------- publications

    def _plan_to_apply(self, index: int, local: LocalFragment) -> Operation:
        prepared, settle = self.take(index, local)
        version = prepared.version
        if prepared.correction is not None:
            return Operation(Kind.ADD, index, version.outer_step, prepared.correction, settle)
        assert self._exchange.welcome is not None
        mixes = self._exchange.welcome.on_arrival == "overwrite" and self.has_trained
        return Operation(Kind.MIX if mixes else Kind.WRITE, index, version.outer_step, prepared.published, settle)

    def _plan_start_over(self) -> Operation:
        """All fragments at one boundary, and nothing else until that is done."""
        self._is_starting_over = True
        fragments = enumerate(self._exchange.fragments)
        taken = [self.take(index, local) for index, local in fragments if local.ready is not None]

        def done(live: Snapshot | None) -> None:
            for _, settle in taken:
                settle(live)
            self._is_starting_over = False

        outer_step = max(prepared.version.outer_step for prepared, _ in taken)
        return Operation(Kind.START_OVER, outer_step=outer_step, done=done)

    def take(self, index: int, local: LocalFragment) -> tuple[Prepared, Callable[[Snapshot | None], None]]:
        """Make the prepared value the anchor; what is returned last settles the counts when it is in the model."""
        prepared, local.ready = local.ready, None
        assert prepared is not None
        assert self._exchange.welcome is not None
        if not self.has_trained:
            prepared = replace(prepared, correction=None)  # nothing to keep: exactly the published value
        under_way = self._exchange.welcome.on_arrival == "carry" and (local.cutting or local.shipped is not None)
        if prepared.start_over:
            local.start += 1
        elif prepared.correction is None and local.anchor is not None and under_way:
            # Progress was to be given up, but since that was decided a part of it was cut, and may be merged: keep it.
            prepared = replace(prepared, correction=prepared.published - local.anchor)
        if prepared.start_over or (prepared.merged is not None and local.shipped is prepared.merged):
            # When starting over: if it is merged yet, nothing of it is to be taken out of the new value.
            local.shipped = None
        gives_up = prepared.correction is None and local.anchor is not None
        local.anchor, local.version = prepared.published, prepared.version
        return prepared, partial(self.settle, index, local, prepared, gives_up)

    def settle(
        self, index: int, local: LocalFragment, prepared: Prepared, gives_up: bool, live: Snapshot | None
    ) -> None:
        """The value is in the model.

        Args:
            index: of the fragment.
            local: the fragment.
            prepared: what was put into the model.
            gives_up: it took the place of all progress that was not merged.
            live: what was read back, if it is to be compared.
        """
        with self._exchange.lock:
            if prepared.merged is not None:
                local.accounted_steps += prepared.merged.steps
                local.accounted_tokens += prepared.merged.tokens
                local.asked_at = None
            if gives_up:
                local.asked_at = None
                num_fragments = len(self._exchange.fragments)
                self._say_given_up(index, self.steps - local.accounted_steps)
                self.tokens_overwritten += (self.tokens - local.accounted_tokens) / num_fragments
                self.steps_overwritten += (self.steps - local.accounted_steps) / num_fragments
                local.accounted_steps, local.accounted_tokens = self.steps, self.tokens
        logger.debug(
            "[learner %d] holds version (%d, %d) of fragment %d", self._exchange.learner_id, *prepared.version, index
        )
        self._exchange.confirm(index, prepared.version, live or Snapshot(lambda: prepared.published))

    def _say_given_up(self, index: int, num_steps: int) -> None:
        assert self._exchange.welcome is not None
        if num_steps and self._exchange.welcome.on_arrival == "carry":  # else it is what always happens
            logger.warning(
                "[learner %d] fragment %d: %d steps that were not merged give way to the global value",
                self._exchange.learner_id, index, num_steps,
            )  # fmt: skip

    # ------------------------------------------------------------------------------------------------------- updates

    def _ship(
        self,
        local: LocalFragment,
        waiting: OpenAsk,
        anchor: torch.Tensor,
        version: ms.Version,
        start: int,
        snapshot: Snapshot | None,
    ) -> None:
        """Answer an ask with what was cut; with nothing, if there is no step that was not merged."""
        assert snapshot is not None
        with self._exchange.lock:
            steps, tokens = self.steps - local.accounted_steps, self.tokens - local.accounted_tokens
            if steps == 0:
                local.cutting = False
                self._exchange.forget(snapshot)
                self._exchange.answer_nothing(waiting, version)
                return
            held_seconds = time.monotonic() - waiting.arrived_at
            self._exchange.ship(Cut(waiting.ask, snapshot, anchor, version, steps, tokens, held_seconds, start))
