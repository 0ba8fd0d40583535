"""The background half of a learner: talks to the syncer, decodes and encodes, so that training does not wait.

Two daemon threads. One takes what the link brings and puts it on a queue; the other works the queue off in order:
link events, and snapshots that the training thread took at a step boundary. What is ready for the training thread
(publications to apply, asks to answer) lies in ``fragments`` and ``asks`` under ``lock``; ``changed`` is notified.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from hf_diloco.core import messages as ms
from hf_diloco.core.codec import digest, encode
from hf_diloco.core.fragments import FragmentLayout
from hf_diloco.core.message_json import from_wire, to_wire
from hf_diloco.errors import DiLoCoError, LearnerRefusedError, MessageError
from hf_diloco.learner.local import Cut, LocalFragment, OpenAsk, Prepared, Shipped
from hf_diloco.learner.optimizer_state import piece_digest
from hf_diloco.learner.publications import prepare, published_value
from hf_diloco.learner.snapshots import Snapshot
from hf_diloco.links.base import LearnerLink, LinkEvent, LinkUp, Received

logger = logging.getLogger(__name__)

_RECEIVE_SECONDS = 0.5
_EMPTY = torch.empty(0, dtype=torch.uint8)


class Exchange:
    """Owns the link and everything that the link's events change.

    Args:
        learner_id: this learner's number.
        incarnation: of this learner process; part of each update id.
        link: not yet opened.
        hello: makes the Hello for a new link; called with the lock held.
        make_layout: the layout that a Welcome implies.
    """

    def __init__(
        self,
        learner_id: int,
        incarnation: str,
        link: LearnerLink,
        *,
        hello: Callable[[], ms.Hello],
        make_layout: Callable[[ms.Welcome], FragmentLayout],
    ) -> None:
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.fragments: list[LocalFragment] = []
        self.asks: dict[int, OpenAsk] = {}
        self.welcome: ms.Welcome | None = None
        self.supply_wanted = False
        self.lease: ms.LeaseShard | None = None  # the last one on this link
        self.save_wanted: int | None = None  # outer step of a checkpoint of the whole run that we are to be part of
        self.started_at: int | None = None  # outer step when the start gate opened, or at the last new link
        self.keep_up_with: int | None = None  # the same, until the training thread has taken it
        self.stop_reason: str | None = None
        self.released: ms.Released | None = None
        self.linked = False
        self.ever_linked = False
        self.num_links = 0
        self.down_since = time.monotonic()
        self.fatal: Exception | None = None
        self.notices: list[str] = []
        self.from_peers: deque[tuple[ms.StateMessage, Tensor | None]] = deque()  # of donors and recipients
        self.newest_outer_step = 0  # of all values that were published to this learner
        self.num_participants = 0  # learners in the syncer's last merge
        self.bytes_sent = 0  # payloads
        self.bytes_received = 0
        self.steps_done = 0  # kept by the training thread, for the limit of carried progress
        self.learner_id, self._incarnation, self._link = learner_id, incarnation, link
        self._hello, self._make_layout = hello, make_layout
        self._work: queue.SimpleQueue[LinkEvent | Callable[[], object] | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._threads = [
            threading.Thread(target=target, name=f"hf-diloco {name}", daemon=True)
            for target, name in ((self._receive, "receive"), (self._run, "exchange"))
        ]

    # -------------------------------------------------------------------------------- called by the training thread

    def open(self) -> None:
        """Begin to link."""
        self._link.open()
        for thread in self._threads:
            thread.start()

    def close(self, *, drain_seconds: float = 0.0) -> None:
        """End the threads and the link. Idempotent."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._work.put(None)
        for thread in self._threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(timeout=drain_seconds + 5.0)
        self._link.close(drain_seconds=drain_seconds)

    def send(self, message: ms.Message, payload: Tensor | None = None) -> None:
        """Queue a message on the link."""
        if payload is not None:
            with self.lock:
                self.bytes_sent += payload.numel() if self.linked else 0
        self._link.send(message, payload)

    def last_error(self) -> str | None:
        """Why linking failed last."""
        return self._link.last_error()

    def ship(self, cut: Cut) -> None:
        """Encode and send a snapshot, in the background."""
        self._work.put(partial(self._encode_and_send, cut))

    def confirm(self, fragment_index: int, version: ms.Version, held: Snapshot) -> None:
        """Tell the syncer that a publication is in the model, and the digest of what is held, in the background."""
        self._work.put(lambda: self._send_applied(fragment_index, version, held.result()))

    def forget(self, snapshot: Snapshot) -> None:
        """Wait for what is on its way from other ranks, in the background, and do nothing with it."""
        self._work.put(snapshot.result)

    def give(self, wanted: ms.WantPiece, content: Snapshot) -> None:
        """Hash and send a piece of optimizer state, in the background."""
        self._work.put(partial(self._send_piece, wanted, content))

    def send_last(self, message: ms.Message, payload: Tensor) -> None:
        """Queue a message behind all that is still done in the background."""
        self._work.put(partial(self.send, message, payload))

    # ------------------------------------------------------------------------------------------- background threads

    def _receive(self) -> None:
        while not self._closing.is_set():
            event = self._link.receive(_RECEIVE_SECONDS)
            if event is not None:
                self._work.put(event)

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            try:
                if callable(item):
                    item()
                else:
                    self._on_event(item)
            except Exception as error:
                logger.exception("[learner %d] the exchange with the syncer failed", self.learner_id)
                self._fail(error)

    def _send_applied(self, fragment_index: int, version: ms.Version, held: Tensor) -> None:
        self.send(ms.Applied(fragment_index=fragment_index, version=version, digest=digest(held)))

    def _send_piece(self, wanted: ms.WantPiece, snapshot: Snapshot) -> None:
        content = snapshot.result()
        piece = ms.StatePiece(
            donor_id=wanted.donor_id,
            recipient_id=wanted.recipient_id,
            piece_index=wanted.piece_index,
            digest=piece_digest(content),
        )
        logger.debug(
            "[learner %d] piece %d of its optimizer state for learner %d: %s",
            self.learner_id, piece.piece_index, piece.recipient_id, piece.digest,
        )  # fmt: skip
        self.send(piece, content)

    def _fail(self, error: Exception) -> None:
        with self.changed:
            self.fatal = self.fatal or error
            self.changed.notify_all()

    def _on_event(self, event: LinkEvent) -> None:
        if isinstance(event, Received):
            try:
                self._on_message(event.message, event.payload)
            finally:
                event.release()
            return
        with self.changed:
            self.asks.clear()
            self.from_peers.clear()
            if isinstance(event, LinkUp):
                if self.ever_linked:
                    logger.warning("[learner %d] the link is up again", self.learner_id)
                self.linked = self.ever_linked = True
                self.num_links += 1
                self.lease = None
                for local in self.fragments:  # the Hello says what is in the model; the syncer sends the rest again
                    local.ready = local.asked_at = None
                hello = self._hello()
                from_wire(to_wire(hello))  # a malformed one would be refused on every new link, for ever: raises
                self.send(hello)
            elif event.fatal is not None:
                self._fail(event.fatal)
            else:
                if self.linked:
                    self.down_since = time.monotonic()
                    logger.warning("[learner %d] the link is down: %s; training goes on", self.learner_id, event.reason)
                self.linked = False
            self.changed.notify_all()

    def _on_message(self, message: ms.Message, payload: Tensor | None) -> None:
        if payload is not None:
            self.bytes_received += payload.numel()
        if isinstance(message, ms.Publication):
            self._on_publication(message, payload)
            return
        with self.changed:
            if isinstance(message, ms.Ask):
                self._on_ask(message)
            elif isinstance(message, ms.RoundClosed):
                self._on_round_closed(message)
            elif isinstance(message, ms.UpdateRefused):
                self._on_update_refused(message)
            elif isinstance(message, ms.SaveCheckpoint):
                self.save_wanted = message.outer_step
            elif isinstance(message, ms.LeaseShard):
                self.lease = message
            elif isinstance(message, ms.HandBack):
                self._hand_back(message)
            elif isinstance(message, ms.Welcome):
                self._on_welcome(message)
            elif isinstance(message, ms.SendValues):
                self.supply_wanted = True
            elif isinstance(message, ms.Start):
                self.started_at = self.keep_up_with = message.outer_step
            elif isinstance(message, ms.Stop):
                self.stop_reason = message.reason
            elif isinstance(message, ms.Released):
                self.released = message
            elif isinstance(message, ms.Refused):
                self._fail(LearnerRefusedError(f"the syncer refused learner {self.learner_id}: {message.reason}"))
            elif isinstance(message, ms.Notice):
                self.notices.append(message.text)
            elif isinstance(message, ms.StateMessage):
                self.from_peers.append((message, None if payload is None else payload.clone()))
            self.changed.notify_all()

    def _on_welcome(self, message: ms.Welcome) -> None:
        if self.welcome is None:
            layout = self._make_layout(message)
            self.fragments = [LocalFragment(fragment) for fragment in layout.fragments]
        elif self.welcome.num_fragments != message.num_fragments:
            raise LearnerRefusedError(
                f"the syncer now splits the model into {message.num_fragments} fragments, before into "
                f"{self.welcome.num_fragments}: this is another run. Restart this learner to join it."
            )
        self.welcome = message

    def _on_ask(self, ask: ms.Ask) -> None:
        if not 0 <= ask.fragment_index < len(self.fragments):
            raise MessageError(f"the syncer asked for fragment {ask.fragment_index}, there are {len(self.fragments)}")
        local = self.fragments[ask.fragment_index]
        if local.asked_at is None:
            local.asked_at = self.steps_done
        shipped = local.shipped
        if shipped is not None and shipped.round == ask.round:
            self._send_update(ask, shipped, held_seconds=0.0)  # the answer was lost with a link: the very same bytes
        else:
            self.asks[ask.fragment_index] = OpenAsk(ask, time.monotonic())

    def _on_round_closed(self, message: ms.RoundClosed) -> None:
        if not 0 <= message.fragment_index < len(self.fragments):
            return
        waiting = self.asks.get(message.fragment_index)
        if waiting is not None and waiting.ask.round == message.round:
            del self.asks[message.fragment_index]
        local = self.fragments[message.fragment_index]
        if local.shipped is not None and local.shipped.round == message.round:
            local.shipped = None  # came late, was not merged: the progress stays and goes into a later round

    def _on_update_refused(self, message: ms.UpdateRefused) -> None:
        logger.error(
            "[learner %d] the syncer refused an update of fragment %d: %s%s",
            self.learner_id, message.fragment_index, message.reason,
            "; training goes on from the global parameters" if message.start_over else "",
        )  # fmt: skip
        self._on_round_closed(ms.RoundClosed(round=message.round, fragment_index=message.fragment_index))
        if message.start_over:  # all fragments at one boundary: one that stays broken would break the others again
            for local in self.fragments:
                if local.ready is not None:
                    local.ready = replace(local.ready, correction=None, start_over=True)
                elif local.anchor is not None and local.version is not None:
                    local.ready = Prepared(local.version, local.anchor, None, None, start_over=True)

    def _hand_back(self, message: ms.HandBack) -> None:
        if not 0 <= message.fragment_index < len(self.fragments):
            raise MessageError(f"the syncer wants fragment {message.fragment_index}, there are {len(self.fragments)}")
        local = self.fragments[message.fragment_index]
        if local.anchor is not None and local.version is not None:
            answer = ms.HandedBack(fragment_index=message.fragment_index, version=local.version)
            self.send(answer, encode(local.anchor, "fp32"))

    # ------------------------------------------------------------------------------------------------ publications

    def _on_publication(self, message: ms.Publication, payload: Tensor | None) -> None:
        if not 0 <= message.fragment_index < len(self.fragments) or payload is None:
            raise MessageError(f"the syncer published fragment {message.fragment_index} without value")
        self.newest_outer_step = max(self.newest_outer_step, message.version.outer_step)
        self.num_participants = message.num_participants
        local = self.fragments[message.fragment_index]
        with self.lock:
            if local.ready is not None and not local.ready.start_over:
                local.ready = None  # a newer one takes its place; both start from what is in the model
            anchor, version = local.anchor, local.version
        if version is not None and message.version <= version:
            if message.version == version and anchor is not None:
                self._send_applied(message.fragment_index, version, anchor)
            return
        size = local.fragment.num_parameters
        published = published_value(self.learner_id, message, payload, size, anchor, version)
        if published is None:
            self.send(ms.NeedFull(fragment_index=message.fragment_index))
            return
        with self.lock:
            if local.ready is not None:  # the fragment is about to start over: from the newer value then
                local.ready = replace(local.ready, version=message.version, published=published)
                return
        assert self.welcome is not None
        # Unlocked: nothing is taken while `ready` is None.
        prepared = prepare(self.learner_id, message, local, published, self.welcome, self.steps_done)
        with self.changed:
            local.ready = prepared
            self.changed.notify_all()

    # ------------------------------------------------------------------------------------------------------ updates

    def _encode_and_send(self, cut: Cut) -> None:
        assert self.welcome is not None
        wire_format = self.welcome.wire_format
        try:
            payload = encode(cut.anchor - cut.snapshot.result(), wire_format)
        except ValueError as error:  # NaN or infinite values: an empty payload, which the syncer refuses and counts
            logger.error("[learner %d] fragment %d: %s", self.learner_id, cut.ask.fragment_index, error)
            payload = _EMPTY
        shipped = Shipped(
            self._update_id(cut.ask), cut.ask.round, payload, wire_format, cut.steps, cut.tokens, cut.anchor_version
        )
        with self.changed:
            local = self.fragments[cut.ask.fragment_index]
            local.cutting = False
            is_void = cut.start != local.start  # the fragment has started over since: what was cut is not in it
            local.shipped = None if is_void else shipped
            again = self.asks.get(cut.ask.fragment_index)
            if again is not None and again.ask.round == cut.ask.round:
                del self.asks[cut.ask.fragment_index]  # asked again on a new link, on which the answer now goes
            self.changed.notify_all()
        if is_void:
            self.answer_nothing(OpenAsk(cut.ask, time.monotonic()), cut.anchor_version)
            return
        self._send_update(cut.ask, shipped, cut.held_seconds)

    def _send_update(self, ask: ms.Ask, shipped: Shipped, held_seconds: float) -> None:
        update = ms.Update(
            round=ask.round,
            fragment_index=ask.fragment_index,
            update_id=shipped.update_id,
            steps=shipped.steps,
            tokens=shipped.tokens,
            anchor=shipped.anchor,
            wire_format=shipped.wire_format,
            held_seconds=held_seconds,
        )
        self.send(update, shipped.payload)

    def answer_nothing(self, waiting: OpenAsk, anchor: ms.Version) -> None:
        """Answer an ask when there is no unmerged step."""
        nothing = Shipped(self._update_id(waiting.ask), waiting.ask.round, _EMPTY, "fp32", 0, 0, anchor)
        self._send_update(waiting.ask, nothing, time.monotonic() - waiting.arrived_at)

    def _update_id(self, ask: ms.Ask) -> str:
        return f"{self._incarnation}/{ask.round.incarnation}.{ask.round.number}"

    def check(self) -> None:
        """Raise what ended the exchange, if something did."""
        if self.fatal is not None:
            if isinstance(self.fatal, DiLoCoError):
                raise self.fatal
            raise DiLoCoError(f"the exchange with the syncer failed: {self.fatal!r}") from self.fatal
