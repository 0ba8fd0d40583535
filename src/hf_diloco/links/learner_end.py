"""The learner's link, seen from the trainer: a courier process that is replaced whenever something is wrong with it."""

from __future__ import annotations

import itertools
import logging
import os
import random
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

from hf_diloco.core.message_json import from_wire, to_wire
from hf_diloco.core.messages import Message
from hf_diloco.errors import AuthenticationError, LearnerRefusedError, MessageError, UnsupportedError
from hf_diloco.links.base import LinkDown, LinkEvent, LinkUp, check_payload
from hf_diloco.links.buffers import BufferPool
from hf_diloco.links.channel import Channel
from hf_diloco.links.children import Child, require_linux
from hf_diloco.links.inbox import Inbox
from hf_diloco.links.loop import (
    LOCAL_TICK_SECONDS,
    SHORTEST_LOCAL_TIMEOUT_SECONDS,
    UNTOLD_TIMEOUT_SECONDS,
    Loop,
)
from hf_diloco.links.received import LentReceived
from hf_diloco.links.token import read_token

logger = logging.getLogger(__name__)

_FIRST_RETRY_SECONDS, _LAST_RETRY_SECONDS = 0.1, 5.0
_PROVEN_SECONDS = 5.0  # a link that lived this long was a good one
_IN_USE_EXTRA_SECONDS = 5.0
_LAST_WORDS_SECONDS = 0.2  # for what a process said before it ended


class _Courier:
    """One attempt to link and, if it succeeds, the link."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.channel: Channel
        self.is_up = False
        self.since = time.monotonic()
        self.kind, self.reason = "lost", "the courier process ended"


class RpcLearnerLink:
    """The learner's end of its link to the syncer, over torch.distributed.rpc in a process of its own.

    Args:
        host: where the syncer listens.
        port: its port.
        token: the run's token.
        learner_id: this learner's number, unique in the run.
        incarnation: one per learner process and run; a new link of the same incarnation replaces the old one.

    Raises:
        ConfigError: the token is damaged.
        UnsupportedError: this is not Linux.
    """

    def __init__(self, host: str, port: int, token: str, learner_id: int, incarnation: str) -> None:
        require_linux()
        self.learner_id = learner_id
        self._timeout = UNTOLD_TIMEOUT_SECONDS
        self._courier_args: dict[str, Any] = {
            "host_name": host,
            "port": port,
            "token": list(read_token(token)),
            "learner_id": learner_id,
            "incarnation": incarnation,
            "host": f"{socket.gethostname()} pid {os.getpid()}",
            "direct": True,
        }
        self._lock = threading.RLock()
        self._inbox = Inbox()
        self._known = 0  # number of the courier whose LinkUp has been received: from then on sending makes sense
        self._numbers = itertools.count(1)
        self._courier: _Courier | None = None
        self._error: str | None = None
        self._retry_seconds = _FIRST_RETRY_SECONDS
        self._in_use_since: float | None = None
        self._drained = threading.Event()
        self._closed = False
        self._is_over = False  # closed, or down for good
        self._loop: Loop | None = None

    # -------------------------------------------------------------------------------------------------- the interface

    def open(self) -> None:
        """Start linking, in the background."""
        with self._lock:
            if self._loop is not None or self._is_over:
                return
            self._loop, self._pool = Loop(), BufferPool()
            self._start_zygote()
            self._loop.every(LOCAL_TICK_SECONDS, self._tick)
            self._loop.start(f"hf-diloco-link-{self.learner_id}")

    def send(self, message: Message, payload: Tensor | None = None) -> None:
        """Queue a message. The payload is copied before this returns. Dropped silently while the link is down."""
        check_payload(payload)
        with self._lock:
            courier = self._courier
            if courier is None or not courier.is_up or courier.number != self._known:
                return
        document = {"op": "message", "message": to_wire(message)}
        if payload is None:
            courier.channel.post(document)
        else:
            self._pool.lend(payload, [courier.channel], document)

    def receive(self, timeout_seconds: float) -> LinkEvent | None:
        """The next event, or None after ``timeout_seconds``."""
        found = self._inbox.get(timeout_seconds)
        if found is None:
            return None
        number, event = found
        if isinstance(event, LinkUp):
            with self._lock:
                self._known = number
        return event

    def last_error(self) -> str | None:
        """Why the last attempt to link failed; None if none failed since the link was last up."""
        return self._error

    def close(self, *, drain_seconds: float = 0.0) -> None:
        """Send what is queued for at most ``drain_seconds``, then end the link and all it started. Idempotent."""
        with self._lock:
            loop, courier, closed = self._loop, self._courier, self._closed
            self._closed = True
            if loop is None or closed:
                self._is_over = True
                return
        if courier and courier.is_up and drain_seconds > 0 and not self._is_over:
            self._drained.clear()
            courier.channel.post({"op": "drain"})
            self._drained.wait(drain_seconds)
        with self._lock:
            self._is_over = True
            courier = self._courier
        if courier:
            courier.channel.post({"op": "leave"})
        self._zygote.channel.post({"op": "quit"})
        self._zygote.end()
        loop.stop()
        if courier:
            courier.channel.close()
        self._zygote.channel.close()
        self._pool.close()
        self._inbox.clear()

    # ------------------------------------------------------------------------------ what happens, in the loop's thread

    def _start_zygote(self) -> None:
        assert self._loop is not None
        self._zygote_is_ready = False
        self._zygote = Child(self._loop, "zygote", ["courier"], self._zygote_says, self._zygote_gone)

    def _zygote_says(self, message: dict[str, Any]) -> None:
        if message["op"] == "ready":
            self._zygote_is_ready = True
            if message["no_sandbox"]:
                logger.info("[learner %d] couriers run without a sandbox: %s", self.learner_id, message["no_sandbox"])
            self._link()
        elif message["op"] == "unsupported":
            self._give_up(UnsupportedError(message["text"]))
        elif message["op"] == "exited":
            assert self._loop is not None
            courier = self._courier
            if courier and courier.number == message["number"]:
                self._loop.call_later(_LAST_WORDS_SECONDS, courier.channel.finish)

    def _zygote_gone(self, _reason: str) -> None:
        code = self._zygote.end()
        self._zygote_is_ready = False
        if self._is_over:
            return
        self._error = f"the process that makes couriers ended (exit code {code})"
        logger.warning("[learner %d] %s; starting another", self.learner_id, self._error)
        self._later(self._restart_zygote)

    def _restart_zygote(self) -> None:
        with self._lock:
            if self._is_over:
                return
            try:
                self._start_zygote()
            except OSError as error:
                self._error = f"no process for couriers can be started: {error}"
                self._later(self._restart_zygote)

    def _link(self) -> None:
        """Start a courier."""
        with self._lock:
            if self._is_over or self._courier or not self._zygote_is_ready:
                return
            assert self._loop is not None
            try:
                ours, theirs = socket.socketpair()
            except OSError as error:
                self._error = f"no link can be made: {error}"
                return self._later(self._link)
            courier = _Courier(next(self._numbers))
            courier.channel = Channel(
                ours,
                self._loop,
                lambda message, payload, release: self._courier_says(courier, message, payload, release),
                lambda _reason: self._courier_gone(courier),
                self._pool,
            )
            self._courier = courier
            with theirs:
                fork = {"op": "fork", "number": courier.number, "args": self._courier_args}
                self._zygote.channel.post(fork, fds=[theirs.fileno()])

    def _courier_says(
        self, courier: _Courier, message: dict[str, Any], payload: Tensor | None, release: Callable[[], None]
    ) -> None:
        op = message["op"]
        if op == "message":
            self._received(courier, message["message"], payload, release)
        elif op == "up":
            with self._lock:
                courier.is_up, courier.since = True, time.monotonic()
                self._error = self._in_use_since = None
            self._inbox.put(courier.number, LinkUp(self.learner_id))
        elif op == "timeout":
            self._timeout = message["seconds"]
        elif op == "ended":
            courier.kind, courier.reason = message["kind"], message["reason"]
        elif op == "drained":
            self._drained.set()

    def _received(self, courier: _Courier, document: Any, payload: Tensor | None, release: Callable[[], None]) -> None:
        try:
            received = LentReceived(self.learner_id, from_wire(document), payload, [release])
        except MessageError as error:
            courier.reason = f"the syncer sent something that is no message: {error}"
        else:
            if self._inbox.put(courier.number, received, courier.channel.frame_bytes):
                return
            courier.reason = "the syncer sends faster than this learner can handle it"
        release()
        self._kill(courier)

    def _courier_gone(self, courier: _Courier) -> None:
        with self._lock:
            self._courier = None
            self._error = courier.reason
            self._drained.set()
            if self._is_over:
                return
            if courier.is_up:
                self._inbox.put(courier.number, LinkDown(self.learner_id, courier.reason))
                if time.monotonic() - courier.since > _PROVEN_SECONDS:
                    self._retry_seconds = _FIRST_RETRY_SECONDS
        logger.info("[learner %d] link: %s", self.learner_id, courier.reason)
        if courier.kind == "authentication":
            return self._give_up(AuthenticationError(courier.reason))
        if courier.kind == "refused":
            return self._give_up(LearnerRefusedError(courier.reason))
        if courier.kind == "in_use":
            now = time.monotonic()
            self._in_use_since = self._in_use_since or now
            if now - self._in_use_since > self._timeout + _IN_USE_EXTRA_SECONDS:  # the other one is not just dying
                return self._give_up(LearnerRefusedError(courier.reason))
        elif courier.kind == "unreachable":  # two hosts that look alike: through the door then; or it was bad luck
            self._courier_args["direct"] = not self._courier_args["direct"]
        self._later(self._link)

    def _later(self, callback: Callable[[], None]) -> None:
        assert self._loop is not None
        self._loop.call_later(self._retry_seconds * random.uniform(0.5, 1.0), callback)
        self._retry_seconds = min(2 * self._retry_seconds, _LAST_RETRY_SECONDS)

    def _give_up(self, error: Exception) -> None:
        with self._lock:
            self._is_over = True
            self._error = str(error)
        self._inbox.put(0, LinkDown(self.learner_id, str(error), fatal=error))

    def _kill(self, courier: _Courier) -> None:
        self._zygote.channel.post({"op": "kill", "number": courier.number})

    def _tick(self) -> None:
        courier = self._courier
        if courier:
            courier.channel.post({"op": "tick"})
            if time.monotonic() - courier.channel.heard > max(self._timeout, SHORTEST_LOCAL_TIMEOUT_SECONDS):
                courier.reason = f"the courier process has not moved for {self._timeout:g} s"
                self._kill(courier)
        self._zygote.look()
        if self._zygote_is_ready:
            self._zygote.channel.post({"op": "tick"})
            if self._zygote.silent_for() > 3 * self._timeout:
                self._zygote.kill()
