"""The syncer's end of one link: what the learner's courier can call. Endpoints copy and return, nothing else.

A gateway holds nothing but the buffers of its link, and dies with it. It is locked in as soon as it listens.
"""

from __future__ import annotations

import hmac
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hf_diloco.errors import MessageError
from hf_diloco.links import sandbox, wire
from hf_diloco.links.agent import Agent
from hf_diloco.links.buffers import (
    MAX_HELD_BYTES,
    MAX_PAYLOAD_BYTES,
    PIECE_BYTES,
    WINDOW,
    Buffer,
    BufferPool,
    exact_piece,
)
from hf_diloco.links.channel import Channel
from hf_diloco.links.loop import Loop, tick_seconds

logger = logging.getLogger(__name__)

_MAX_POLL_BYTES = 4 << 20
_MAX_TRANSFERS = 2 * WINDOW  # under way at once
_MAX_ITEMS = 10_000  # that the learner has not fetched


@dataclass
class _Transfer:
    """A payload that comes in."""

    total: int
    buffer: Buffer | None
    offsets: set[int] = field(default_factory=set)
    missing: int = 0
    message: dict[str, Any] | None = None
    after: int = 0  # so many messages without payload were sent before it


@dataclass
class _Outgoing:
    """A payload that waits to be fetched."""

    payload: Tensor
    release: Callable[[], None]


class Gateway:
    """The endpoints, and the traffic with the syncer's main process."""

    def __init__(self, sock: socket.socket, token: str, timeout_seconds: float) -> None:
        self._token, self._timeout = token, timeout_seconds
        self._loop, self._pool = Loop(), BufferPool(self._answer_puts)
        self._lock = threading.RLock()
        self._called = time.monotonic()
        self._is_up = False
        self._next_told, self._next_transfer = 0, 0
        self._transfers: dict[int, _Transfer] = {}
        self._unanswered: list[tuple[int, bool, wire.Future]] = []  # puts: payload, whether its last piece, answer
        self._items: deque[tuple[int, int, dict[str, Any]]] = deque()  # number, bytes, item: not seen by the courier
        self._num_items = 0
        self._outgoing: dict[int, _Outgoing] = {}
        self._poll: tuple[int, wire.Future] | None = None
        self._draining = False
        self._channel = Channel(sock, self._loop, self._told_by_syncer, lambda _reason: os._exit(0), self._pool)

    def run(self, *, sandboxed: bool) -> None:
        """Serve until something ends."""
        for name in ("beat", "tell", "get", "took"):
            wire.offer(name, getattr(self, name))
        wire.offer("poll", self.poll, is_async=True)
        wire.offer("put", self.put, is_async=True)
        if sandboxed:
            sandbox.before_agent()
        agent = Agent("gateway", num_threads=8)
        sandbox.limit_memory()
        if sandboxed:
            sandbox.lock(may_connect=False)
        self._channel.post({"op": "listening", "port": agent.port, "pid": os.getpid()})
        self._loop.every(tick_seconds(self._timeout), self._tick)
        self._loop.run()

    def _tick(self) -> None:
        self._channel.post({"op": "tick"})
        now = time.monotonic()
        if now - self._called > self._timeout:
            self._leave(f"no sign of life from the learner for {self._timeout:g} s")
        if now - self._channel.heard > self._timeout:
            self._leave(f"the syncer has not moved for {self._timeout:g} s")

    def _leave(self, reason: str) -> None:
        self._channel.post({"op": "ended", "reason": reason})
        self._channel.flush(0.4)
        os._exit(0)

    # ------------------------------------------------------------------------------------------------ from the syncer

    def _told_by_syncer(self, message: dict[str, Any], payload: Tensor | None, release: Callable[[], None]) -> None:
        if message["op"] == "leave":
            self._channel.flush(0.4)  # a goodbye may be among it
            os._exit(0)
        with self._lock:
            if message["op"] == "drain":
                self._draining = True
                self._check_drained()
                return
            self._num_items += 1
            item: dict[str, Any] = {"message": message["message"]}
            if payload is not None:
                item["size"] = payload.numel()
                self._outgoing[self._num_items] = _Outgoing(payload, release)
            self._items.append((self._num_items, len(str(message["message"])), item))
            self._answer_poll()
            if len(self._items) > _MAX_ITEMS:
                self._leave("the learner does not take what the syncer sends")

    def _check_drained(self) -> None:
        if self._draining and not self._items and not self._outgoing:
            self._draining = False
            self._channel.post({"op": "drained"})

    # ------------------------------------------------------------------------------------ endpoints, syncer to learner

    def _check(self, token: str) -> None:
        if not hmac.compare_digest(str(token), self._token):
            raise MessageError("this call belongs to another link")
        self._called = time.monotonic()

    def beat(self, token: str) -> None:
        """The learner lives. The first one makes the link."""
        self._check(token)
        with self._lock:
            if not self._is_up:
                self._is_up = True
                self._channel.post({"op": "up"})

    def poll(self, token: str, seen: int) -> wire.Future:
        """What the syncer sent after item ``seen``: at once if there is anything, else when there is."""
        self._check(token)
        future: wire.Future = torch.futures.Future()
        with self._lock:
            while self._items and self._items[0][0] <= seen:
                self._items.popleft()
            self._check_drained()
            if self._poll:
                self._poll[1].set_result([])  # one at a time
            self._poll = (seen, future)
            self._answer_poll()
        return future

    def _answer_poll(self) -> None:
        if self._poll is None or not self._items:
            return
        (_, future), self._poll = self._poll, None
        answer: list[Any] = []
        size = 0
        for number, num_bytes, item in self._items:
            size += num_bytes
            if answer and (len(answer) == wire.MAX_POLL_ITEMS or size > _MAX_POLL_BYTES):
                break
            answer.append([number, item])
        future.set_result(answer)

    def get(self, token: str, number: int, offset: int, size: int) -> Tensor:
        """A piece of an item's payload."""
        self._check(token)
        payload = self._outgoing[number].payload
        if offset < 0 or not 1 <= size <= PIECE_BYTES or offset + size > payload.numel():
            raise MessageError("outside the payload")
        return exact_piece(payload, offset, size)

    def took(self, token: str, number: int) -> None:
        """The learner has an item's payload."""
        self._check(token)
        with self._lock:
            outgoing = self._outgoing.pop(number, None)
            if outgoing is None:
                return
            self._channel.post({"op": "sent", "size": outgoing.payload.numel()})
            outgoing.release()
            self._check_drained()

    # ------------------------------------------------------------------------------------ endpoints, learner to syncer

    def tell(self, token: str, first: int, messages: list[dict[str, Any]]) -> None:
        """Messages without payload, numbered from ``first``. One call is under way at a time."""
        self._check(token)
        with self._lock:
            for number, message in enumerate(messages, first):
                if number == self._next_told:
                    self._next_told += 1
                    self._channel.post({"op": "message", "message": message})
            self._deliver()

    def put(
        self,
        token: str,
        number: int,
        offset: int,
        total: int,
        last: list[Any] | None = None,
        piece: Tensor | None = None,
    ) -> wire.Future:
        """A piece of payload ``number``. The last one brings ``[message, after]``. The same again changes nothing.

        The answer to the last one waits until the syncer has the payload, and any answer but those of the oldest
        payload until there is room: so the courier, with its WINDOW of unanswered pieces, goes no faster than the
        syncer takes them.
        """
        self._check(token)
        future: wire.Future = torch.futures.Future()
        with self._lock:
            if number < self._next_transfer:
                future.set_result(None)
                return future
            if len(self._unanswered) >= WINDOW:
                raise MessageError("more pieces than may be under way")
            transfer = self._transfers.get(number) or self._begin(number, total)
        if piece is not None:
            self._write(transfer, offset, piece)
        with self._lock:
            if piece is not None and offset not in transfer.offsets:
                transfer.offsets.add(offset)
                transfer.missing -= piece.numel()
            if last is not None:
                transfer.message, transfer.after = last
            self._unanswered.append((number, last is not None, future))
            self._deliver()
        return future

    def _begin(self, number: int, total: int) -> _Transfer:
        if not 0 <= total <= MAX_PAYLOAD_BYTES or number >= self._next_transfer + _MAX_TRANSFERS:
            raise MessageError("not a payload")
        buffer = self._pool.take(total) if total else None
        transfer = self._transfers[number] = _Transfer(total, buffer, missing=total)
        return transfer

    def _write(self, transfer: _Transfer, offset: int, piece: Tensor) -> None:
        if transfer.buffer is None or not 0 <= offset < transfer.total or offset % PIECE_BYTES:
            raise MessageError("outside the payload")
        transfer.buffer.write(offset, min(PIECE_BYTES, transfer.total - offset), piece)

    def _deliver(self) -> None:
        """Payloads that are whole, in order, and none before the messages that were sent before it."""
        while transfer := self._transfers.get(self._next_transfer):
            if transfer.message is None or transfer.missing or transfer.after > self._next_told:
                break
            del self._transfers[self._next_transfer]
            self._next_transfer += 1
            message = {"op": "message", "message": transfer.message, "size": transfer.total}
            self._channel.post(message, buffer=transfer.buffer)
            if transfer.buffer:
                self._pool.release(transfer.buffer)  # the channel holds it now
        self._answer_puts()

    def _answer_puts(self) -> None:
        with self._lock:
            has_room = self._pool.held_bytes < MAX_HELD_BYTES
            waiting = []
            for number, is_last, future in self._unanswered:
                is_delivered, is_oldest = number < self._next_transfer, number == self._next_transfer
                if (is_delivered and has_room) or (not is_last and (has_room or is_oldest)):
                    future.set_result(None)
                else:
                    waiting.append((number, is_last, future))
            self._unanswered = waiting


def main(sock: socket.socket, args: dict[str, Any]) -> None:
    """Be the gateway of one link."""
    Gateway(sock, args["token"], args["timeout"]).run(sandboxed=args["sandboxed"])
