"""Learners' updates from their arrival to the merge: inspected, summed up, written on the tape."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from hf_diloco.core import events as ev
from hf_diloco.core import messages as ms
from hf_diloco.core.merge import MergeAccumulator, token_weight
from hf_diloco.errors import MessageError
from hf_diloco.links.base import SyncerLinks
from hf_diloco.syncer.inspection import Inspector
from hf_diloco.syncer.ledger import Ledger
from hf_diloco.syncer.state import GlobalState
from hf_diloco.syncer.tape import Tape

logger = logging.getLogger(__name__)

_START_OVER_AFTER = 3  # refused updates in a row: the learner gets the global parameters anew


@dataclass
class _Collected:
    """What has been accepted for one round."""

    sum: MergeAccumulator
    participants: list[dict[str, Any]] = field(default_factory=list)  # as the tape will show them
    bytes_received: int = 0


class Updates:
    """The updates of all open rounds, each summed up as it arrives.

    Args:
        state: the global parameters.
        links: to tell learners whose updates are refused.
        tape: to write to.
        ledger: the accounts.
        outer_step: t, for messages to people.
    """

    def __init__(
        self, state: GlobalState, links: SyncerLinks, tape: Tape, ledger: Ledger, outer_step: Callable[[], int]
    ) -> None:
        self._state, self._links, self._tape, self._ledger = state, links, tape, ledger
        self._outer_step = outer_step
        self.inspector = Inspector(state.layout)
        self._refused_in_a_row: dict[int, int] = {}  # by learner
        self._arrived: tuple[ms.Update, Tensor | None, int] | None = None  # being handled: decoded, and bytes it took
        self._collected: dict[ms.RoundId, _Collected] = {}

    def arrive(self, learner_id: int, message: ms.Update, payload: Tensor | None) -> ev.Answered:
        """An update is here. Returns what the protocol is told; if it wants it, :meth:`accept` comes next.

        Raises:
            MessageError: it makes no sense.
        """
        if message.steps < 0 or message.tokens < 0:
            raise MessageError(f"an update cannot have {message.steps} steps and {message.tokens} tokens")
        refused, shipped = None, None
        if message.steps > 0:
            shipped, refused = self.inspector.inspect(message, payload)
        if refused:
            self._refuse(learner_id, message, refused)
        elif message.steps > 0:
            self._refused_in_a_row[learner_id] = 0
        self._arrived = (message, shipped, 0 if payload is None else payload.numel())
        return ev.Answered(
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

    def _refuse(self, learner_id: int, message: ms.Update, reason: str) -> None:
        self._ledger.account(learner_id).num_refused += 1
        in_a_row = self._refused_in_a_row.get(learner_id, 0) + 1
        start_over = in_a_row >= _START_OVER_AFTER
        self._refused_in_a_row[learner_id] = 0 if start_over else in_a_row
        logger.warning("[syncer · step %d] update of learner %d refused: %s", self._outer_step(), learner_id, reason)
        self._tape.write(
            "refusal", learner_id=learner_id, update_id=message.update_id, reason=reason, start_over=start_over
        )
        refused = ms.UpdateRefused(
            round=message.round, fragment_index=message.fragment_index, reason=reason, start_over=start_over
        )
        self._links.send([learner_id], refused)

    def accept(self, action: ev.AcceptUpdate) -> None:
        """Add the update that has just arrived to its round's sum."""
        assert self._arrived is not None
        message, shipped, num_bytes = self._arrived
        assert shipped is not None
        index = message.fragment_index
        if action.round not in self._collected:
            self._collected[action.round] = _Collected(self._state.new_accumulator(index))
        collected = self._collected[action.round]
        pseudogradient = self._state.pseudogradient(index, shipped, stale_anchor=action.stale_anchor)
        collected.sum.add(pseudogradient, action.weight)
        collected.bytes_received += num_bytes
        collected.participants.append(
            {"learner_id": action.learner_id, "update_id": message.update_id, "steps": message.steps,
             "tokens": message.tokens, "weight": action.weight, "norm": float(pseudogradient.norm())}
        )  # fmt: skip

    def let_go(self) -> None:
        """The update that has just arrived has been handled."""
        self._arrived = None

    def merge(self, action: ev.MergeRound) -> ev.Merged:
        """Merge a round's sum into the global parameters."""
        started = time.monotonic()
        collected = self._collected.pop(action.round)
        participants, merged = collected.participants, collected.sum.result()
        with self._state.lock:  # no checkpoint between the merge and its line
            self._state.merge(action.fragment_index, merged, action.version, dict(action.participants))
            self._tape.write(
                "round",
                durable=True,  # who was merged must be known before anybody learns the result
                round=list(action.round),
                fragment_index=action.fragment_index,
                version=list(action.version),
                digest=self._state.digests[action.fragment_index],
                participants=participants,
                num_asked=action.num_asked,
                bytes_received=collected.bytes_received,
                bytes_published=self._state.payload(action.fragment_index, full=False)[0].numel(),
                quorum_seconds=round(action.quorum_seconds, 4),
                grace_seconds=round(action.grace_seconds, 4),
                merge_seconds=round(time.monotonic() - started, 4),
            )
        self._ledger.add_merge(participants)
        logger.info(
            "[syncer · step %d] fragment %d merged from learners %s",
            self._outer_step(), action.fragment_index, self._ledger.last_participants,
        )  # fmt: skip
        return ev.Merged(round=action.round)

    def discard(self, round_id: ms.RoundId) -> None:
        """The round is not merged."""
        self._collected.pop(round_id, None)
