"""Optimizer state from one learner to another: the donor's side, and the recipient's.

The recipient waits for it before its first inner step, and goes on applying publications meanwhile; it asks for one
piece at a time, so whatever is lost, it knows what is missing, and any donor with an optimizer of the same kind can
go on. The donor trains: it copies one piece at a step boundary, and the rest happens in its background thread.
Pieces of one state thus come from different steps; moments move slowly, and each tensor keeps its own step counter.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

from torch import Tensor

from hf_diloco.core import messages as ms
from hf_diloco.errors import MessageError, UnsupportedError
from hf_diloco.learner.exchange import Exchange
from hf_diloco.learner.optimizer_state import OptimizerState, StatePlan, piece_digest

logger = logging.getLogger(__name__)

LIMIT_SECONDS = 60.0  # a warm-up costs a learner less than a longer wait
_PATIENCE_SECONDS = 5.0  # without a word from a donor: then another one
_SEEK_AGAIN_SECONDS = 2.0  # while there is none: one whose link was lost may be back
_DOWN_SECONDS = 3.0  # a link that is down for longer is not waited for: training goes on without the syncer
_JUDGE_SECONDS = 10.0  # from then on it is given up if at this rate it would take too long
_SAY_EVERY_SECONDS = 10.0
_MOST_BAD_PIECES = 3  # of one donor


class Donor:
    """Answers those who want this learner's optimizer state; called at step boundaries by the thread that trains.

    Args:
        learner_id: this learner's number.
        exchange: of this learner.
        state: None if it cannot be given away.
        why_not: the reason for that.
    """

    def __init__(self, learner_id: int, exchange: Exchange, state: OptimizerState | None, why_not: str) -> None:
        self._learner_id, self._exchange, self._state, self._why_not = learner_id, exchange, state, why_not
        self._plans: dict[int, StatePlan] = {}  # by recipient: as it was offered
        self._wanted: deque[ms.WantPiece] = deque()

    def serve(self) -> None:
        """Offer the state to those who ask for it; copy at most one piece."""
        with self._exchange.lock:
            while self._exchange.from_peers:
                message, _ = self._exchange.from_peers.popleft()
                if isinstance(message, ms.WantState):
                    self._offer(message.recipient_id)
                elif isinstance(message, ms.WantPiece):
                    self._wanted.append(message)
        if self._wanted:
            self._give(self._wanted.popleft())

    @property
    def has_work(self) -> bool:
        """Somebody waits for the next step boundary."""
        return bool(self._exchange.from_peers or self._wanted)

    def _offer(self, recipient_id: int) -> None:
        try:
            if self._state is None:
                raise UnsupportedError(self._why_not)
            plan = self._state.plan()
        except UnsupportedError as error:
            self._decline(recipient_id, str(error))
            return
        self._plans[recipient_id] = plan
        self._exchange.send(
            ms.StateOffer(
                donor_id=self._learner_id,
                recipient_id=recipient_id,
                fingerprint=plan.fingerprint,
                without=plan.without,
            )
        )

    def _give(self, wanted: ms.WantPiece) -> None:
        plan = self._plans.get(wanted.recipient_id)
        if plan is None or self._state is None or not 0 <= wanted.piece_index < len(plan.pieces):
            self._decline(wanted.recipient_id, f"it has no piece {wanted.piece_index}")
            return
        self._exchange.give(wanted, self._state.read(plan.pieces[wanted.piece_index]))

    def _decline(self, recipient_id: int, reason: str) -> None:
        self._exchange.send(ms.NoState(donor_id=self._learner_id, recipient_id=recipient_id, reason=reason))


class Recipient:
    """Takes over the optimizer state of a peer, before this learner's first step.

    Args:
        learner_id: this learner's number.
        exchange: of this learner, which has joined.
        state: to be filled.
        boundary: applies publications; called again and again, so that this learner keeps up with the run.
        interrupted: looked at while waiting.
    """

    def __init__(
        self,
        learner_id: int,
        exchange: Exchange,
        state: OptimizerState,
        boundary: Callable[[], object],
        interrupted: Callable[[], bool],
    ) -> None:
        self._learner_id, self._exchange, self._state = learner_id, exchange, state
        self._boundary, self._interrupted = boundary, interrupted
        self._plan: StatePlan | None = None
        self._missing: list[int] = []  # pieces, the next one last
        self._donor_id: int | None = None
        self._donor_ids: list[int] = []  # whose pieces are in the state
        self._num_bad = 0
        self._heard_at = 0.0  # when the present donor last said something, or the search for one began
        self._failure: str | None = None

    def take(self) -> ms.StateTaken:
        """Wait for the state; afterwards it is in the optimizer, or the optimizer is empty as before."""
        started = time.monotonic()
        try:
            self._state.fill()
            if self._state.is_empty:
                return ms.StateTaken(source="own", reason="this optimizer keeps no state")
            self._wait(started)
        except UnsupportedError as error:
            self._failure = str(error)
        seconds = time.monotonic() - started
        if self._failure is not None or self._plan is None:
            self._state.clear()
            return ms.StateTaken(source="warm-up", reason=self._failure or "nobody offered any", waited_seconds=seconds)
        self._state.clear(self._plan.without)
        return ms.StateTaken(
            source="peer",
            reason="",
            donor_ids=tuple(self._donor_ids),
            num_pieces=len(self._plan.pieces),
            size_bytes=self._plan.size_bytes,
            waited_seconds=seconds,
        )

    def _wait(self, started: float) -> None:
        exchange, asked_on, said_at = self._exchange, -1, started
        while self._failure is None and not (self._plan and not self._missing):
            exchange.check()
            self._boundary()
            with exchange.changed:
                if not exchange.from_peers and exchange.num_links == asked_on:
                    exchange.changed.wait(timeout=0.2)
                num_links, linked = exchange.num_links, exchange.linked
                arrived = list(exchange.from_peers)
                exchange.from_peers.clear()
                now = time.monotonic()
                if self._interrupted():
                    self._failure = "this learner is told to stop"
                elif exchange.released is not None or exchange.stop_reason is not None:
                    self._failure = "the run is ending"
                elif not linked and now - exchange.down_since > _DOWN_SECONDS:
                    self._failure = "the link to the syncer is down"
            if linked and num_links != asked_on:
                asked_on = num_links
                self._seek(now)
            for message, payload in arrived:
                self._hear(message, payload, now)
            if self._donor_id is None and now - self._heard_at > _SEEK_AGAIN_SECONDS:
                self._seek(now)
            elif now - self._heard_at > _PATIENCE_SECONDS:
                self._refuse(f"nothing came for {_PATIENCE_SECONDS:.0f} s", now)
            self._judge(now - started)
            if now - said_at > _SAY_EVERY_SECONDS:
                said_at = now
                self._say(now - started)

    def _seek(self, now: float) -> None:
        """Ask for a donor, on a new link or because there is none yet."""
        self._donor_id, self._heard_at = None, now
        self._exchange.send(ms.WantState(recipient_id=self._learner_id))

    def _refuse(self, reason: str, now: float) -> None:
        """Ask for another donor than this one."""
        assert self._donor_id is not None
        logger.info("[learner %d] no optimizer state from learner %d: %s", self._learner_id, self._donor_id, reason)
        self._exchange.send(ms.NoState(donor_id=self._donor_id, recipient_id=self._learner_id, reason=reason))
        self._donor_id, self._heard_at = None, now

    def _hear(self, message: ms.StateMessage, payload: Tensor | None, now: float) -> None:
        if isinstance(message, ms.NoState):
            self._failure = message.reason  # the syncer's word: there is nobody to ask
        elif isinstance(message, ms.StateOffer):
            self._heard_at, self._donor_id, self._num_bad = now, message.donor_id, 0
            self._accept(message, now)
        elif isinstance(message, ms.StatePiece) and message.donor_id == self._donor_id:
            self._heard_at = now
            self._put(message, payload, now)

    def _accept(self, offer: ms.StateOffer, now: float) -> None:
        try:
            plan = self._state.plan(offer.without)
        except UnsupportedError as error:
            return self._refuse(str(error), now)
        if plan.fingerprint != offer.fingerprint:
            return self._refuse("its optimizer is of another kind, or of other shapes", now)
        if plan != self._plan:  # else what is here is good: only the rest is missing
            self._plan, self._donor_ids = plan, []
            self._missing = list(reversed(range(len(plan.pieces))))
        self._ask()

    def _ask(self) -> None:
        assert self._donor_id is not None
        if self._missing:
            want = ms.WantPiece(donor_id=self._donor_id, recipient_id=self._learner_id, piece_index=self._missing[-1])
            self._exchange.send(want)

    def _put(self, message: ms.StatePiece, payload: Tensor | None, now: float) -> None:
        assert self._plan is not None
        if not self._missing or message.piece_index != self._missing[-1]:
            return  # of an offer before this one
        try:
            if payload is None or piece_digest(payload) != message.digest:
                raise MessageError("its digest is wrong")
            self._state.write(self._plan.pieces[message.piece_index], payload)
        except MessageError as error:
            self._num_bad += 1
            if self._num_bad >= _MOST_BAD_PIECES:
                return self._refuse(f"piece {message.piece_index}: {error}", now)
        else:
            self._missing.pop()
            if message.donor_id not in self._donor_ids:
                self._donor_ids.append(message.donor_id)
        self._ask()

    def _judge(self, seconds: float) -> None:
        """Give up when it takes too long, or surely will."""
        if self._failure is not None or (self._plan and not self._missing):
            return
        if seconds > LIMIT_SECONDS:
            self._failure = f"it did not come within {LIMIT_SECONDS:.0f} s"
        elif self._plan and seconds > _JUDGE_SECONDS:
            num_done = len(self._plan.pieces) - len(self._missing)
            needed = seconds * len(self._plan.pieces) / max(num_done, 1)
            if needed > 2 * LIMIT_SECONDS:  # donors differ, and a rate may rise
                self._failure = f"at this rate it would take {needed:.0f} s"

    def _say(self, seconds: float) -> None:
        num_pieces = len(self._plan.pieces) if self._plan else 0
        logger.info(
            "[learner %d] waiting for optimizer state: %d of %d pieces (%.0f s so far)",
            self._learner_id, num_pieces - len(self._missing), num_pieces, seconds,
        )  # fmt: skip


def take_state(
    learner_id: int,
    exchange: Exchange,
    state: OptimizerState | None,
    boundary: Callable[[], object],
    interrupted: Callable[[], bool],
    *,
    has_own: bool,
    why_not: str,
) -> ms.StateTaken:
    """Give an optimizer that begins in mid-run its own state, else a peer's; else it needs a warm-up, which is said.

    Args:
        learner_id: this learner's number.
        exchange: of this learner, which has joined.
        state: None if it cannot be exchanged.
        boundary: applies publications, while this waits for a peer's state.
        interrupted: looked at while waiting.
        has_own: the optimizer, whatever its kind, has state that was restored with it.
        why_not: it cannot be exchanged.
    """
    if has_own:
        taken = ms.StateTaken(source="own", reason="")
    elif state is None:
        taken = ms.StateTaken(source="warm-up", reason=why_not)
    else:
        taken = Recipient(learner_id, exchange, state, boundary, interrupted).take()
    if taken.source == "peer":
        text = "that of learner {}: {:.1f} MB in {} pieces, {:.1f} s".format(
            " and ".join(map(str, taken.donor_ids)), taken.size_bytes / 1e6, taken.num_pieces, taken.waited_seconds
        )
    elif taken.source == "own":
        text = taken.reason or "its own, as it was saved"
    else:
        text = f"none ({taken.reason})"
    logger.info("[learner %d] state of the inner optimizer: %s", learner_id, text)
    return taken
