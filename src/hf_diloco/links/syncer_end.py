"""The syncer's links, seen from its main process: one door, and a gateway process for each learner."""

from __future__ import annotations

import itertools
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from hf_diloco.core.message_json import from_wire, to_wire
from hf_diloco.core.messages import Message
from hf_diloco.errors import MessageError, UnsupportedError
from hf_diloco.links import child, handshake
from hf_diloco.links.base import LinkDown, LinkEvent, LinkUp, check_payload
from hf_diloco.links.buffers import BufferPool
from hf_diloco.links.channel import Channel
from hf_diloco.links.children import Child, require_linux
from hf_diloco.links.inbox import Inbox
from hf_diloco.links.listening import join_address, listen
from hf_diloco.links.loop import Loop, tick_seconds
from hf_diloco.links.received import LentReceived
from hf_diloco.links.token import read_token

logger = logging.getLogger(__name__)

_START_SECONDS = 120.0  # importing torch from a cold network disk takes its time
_LEAVE_SECONDS = 0.5
_RESTART_SECONDS = 0.2
_SAY_AGAIN_SECONDS = 10.0
_MAX_LINKS = 1024  # each costs two processes' worth of descriptors and some megabytes
_MAX_NAME_CHARACTERS = 200


class _Link:
    """One admitted link of a learner."""

    def __init__(self, number: int, control: int, request: dict[str, Any], peer: str) -> None:
        self.number, self.control = number, control
        self.learner_id: int = request["learner_id"]
        self.incarnation: str = request["incarnation"]
        host = "".join(character for character in request["host"] if character.isprintable())  # it is logged
        self.host = f"{host[:_MAX_NAME_CHARACTERS]} ({peer})"
        self.is_direct = request["host_key"] == handshake.host_key()
        self.token = secrets.token_hex(16)
        self.channel: Channel
        self.is_up = self.is_over = self.is_drained = False
        self.reason = "the gateway process ended"


class RpcSyncerLinks:
    """The syncer's ends of all links, over torch.distributed.rpc in processes of their own behind one port.

    Args:
        listen_host: address to listen at, e.g. ``0.0.0.0``.
        listen_port: port; 0 lets the system choose, see ``address``.
        token: the run's token: only learners that know it may link.
        certificate: file with the key and the certificate that the token names. None: TLS is switched off.
        link_timeout_seconds: a peer that shows no sign of life for this long is gone.

    Raises:
        UnsupportedError: this is not Linux.
    """

    def __init__(
        self,
        listen_host: str,
        listen_port: int,
        token: str,
        *,
        certificate: Path | None = None,
        link_timeout_seconds: float = 10.0,
    ) -> None:
        require_linux()
        self._listen, self._timeout = (listen_host, listen_port), link_timeout_seconds
        self._secret, self._certificate = read_token(token).secret, certificate
        self.address = join_address(listen_host, listen_port)
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._inbox = Inbox()
        self._numbers = itertools.count(1)
        self._links: dict[int, _Link] = {}  # the present one of each learner
        self._dying: set[_Link] = set()  # over, but their gateways may not have ended yet
        self._known: dict[int, int] = {}  # number of the link whose LinkUp has been received, by learner
        self._moved: dict[int, list[int]] = {}
        self._problem: Exception | None = None
        self._zygote_is_ready = self._is_over = False
        self._loop: Loop | None = None
        self._refused, self._refused_at = "", 0.0  # what was last said of who was not let in

    # -------------------------------------------------------------------------------------------------- the interface

    def open(self) -> None:
        """Listen. Returns when learners can link.

        Raises:
            ConfigError: the address cannot be listened at.
            UnsupportedError: this torch release cannot be served.
        """
        if self._loop is not None or self._is_over:
            return
        child.raise_file_limit()
        self._listener = listen(*self._listen)
        self.address = join_address(self._listen[0], self._listener.getsockname()[1])
        self._loop, self._pool = Loop(), BufferPool()
        self._start_door()
        self._start_zygote()
        self._loop.every(tick_seconds(self._timeout), self._tick)
        self._loop.start("hf-diloco-links")
        with self._changed:
            self._changed.wait_for(lambda: self._zygote_is_ready or self._problem, _START_SECONDS)
            problem = self._problem
            if not self._zygote_is_ready and problem is None:
                problem = TimeoutError(f"the gateway process did not start within {_START_SECONDS:g} s")
        if problem:
            self.close()
            raise problem

    def send(self, learner_ids: list[int], message: Message, payload: Tensor | None = None) -> None:
        """Queue one message for several learners; the payload is copied once. Dropped for those whose link is down."""
        check_payload(payload)
        with self._lock:
            links = [self._links[learner_id] for learner_id in learner_ids if learner_id in self._links]
            links = [link for link in links if link.is_up and self._known.get(link.learner_id) == link.number]
        if not links:
            return
        channels = [link.channel for link in links]
        document = {"op": "message", "message": to_wire(message)}
        if payload is not None:
            self._pool.lend(payload, channels, document)
            return
        for channel in channels:
            channel.post(document)

    def receive(self, timeout_seconds: float) -> LinkEvent | None:
        """The next event of any link, or None after ``timeout_seconds``."""
        found = self._inbox.get(timeout_seconds)
        if found is None:
            return None
        number, event = found
        if isinstance(event, LinkUp):
            with self._lock:
                self._known[event.learner_id] = number
        return event

    def drop(self, learner_id: int, reason: str) -> None:
        """End this learner's link (it may come back); LinkDown follows."""
        with self._lock:
            link = self._links.get(learner_id)
            if link:
                self._end(link, reason)

    def bytes_moved(self, learner_id: int) -> tuple[int, int]:
        """Payload bytes received from and sent to this learner so far, over all its links."""
        with self._lock:
            received, sent = self._moved.get(learner_id, (0, 0))
            return received, sent

    def close(self, *, drain_seconds: float = 0.0) -> None:
        """Send what is queued for at most ``drain_seconds``, then end all links and child processes. Idempotent."""
        with self._lock:
            if self._is_over or self._loop is None:
                self._is_over = True
                return
            self._is_over = True
            links = [link for link in self._links.values() if link.is_up]
        if drain_seconds > 0 and links:
            for link in links:
                link.channel.post({"op": "drain"})
            with self._changed:
                self._changed.wait_for(lambda: all(link.is_drained or link.is_over for link in links), drain_seconds)
        self._door.channel.post({"op": "quit", "reason": "the syncer closed its links"})
        for link in list(self._links.values()):
            link.channel.post({"op": "leave"})
        self._zygote.channel.post({"op": "quit"})
        self._door.end()
        self._zygote.end()
        self._loop.stop()
        for link in [*self._links.values(), *self._dying]:
            link.channel.close()
        self._links.clear()
        self._dying.clear()
        self._door.channel.close()
        self._zygote.channel.close()
        self._listener.close()
        self._pool.close()
        self._inbox.clear()

    # ------------------------------------------------------------------------------------- door and zygote, in the loop

    def _start_door(self) -> None:
        assert self._loop is not None
        self._door = Child(self._loop, "door", [], self._door_says, self._door_gone)
        certificate = str(self._certificate.absolute()) if self._certificate else None
        start = {"op": "start", "secret": self._secret, "timeout": self._timeout, "certificate": certificate}
        self._door.channel.post(start, fds=[self._listener.fileno()])

    def _start_zygote(self) -> None:
        assert self._loop is not None
        self._zygote = Child(self._loop, "zygote", ["gateway"], self._zygote_says, self._zygote_gone)

    def _restart(self, start: Callable[[], None]) -> None:
        """In a moment: what ended at once may end at once again."""

        def restart() -> None:
            with self._lock:
                if self._is_over:
                    return
            try:
                start()
            except OSError as error:
                logger.error("a process cannot be started: %s", error)
                self._later(_RESTART_SECONDS, restart)

        self._later(_RESTART_SECONDS, restart)

    def _later(self, seconds: float, callback: Callable[[], None]) -> None:
        assert self._loop is not None
        self._loop.call_later(seconds, callback)

    def _door_gone(self, _reason: str) -> None:
        code = self._door.end()
        with self._lock:
            if self._is_over:
                return
            logger.warning("the door process ended (exit code %d); starting another", code)
            for link in list(self._links.values()):
                self._end(link, "the door process ended")
        self._restart(self._start_door)

    def _zygote_gone(self, _reason: str) -> None:
        code = self._zygote.end()
        with self._changed:
            was_ready, self._zygote_is_ready = self._zygote_is_ready, False
            if self._is_over:
                return
            if not was_ready and self._problem is None and not self._known:
                self._problem = UnsupportedError(f"the gateway process ended (exit code {code}); it said why above")
                self._changed.notify_all()
                return
        logger.warning("the process that makes gateways ended (exit code %d); starting another", code)
        self._restart(self._start_zygote)

    def _zygote_says(self, message: dict[str, Any]) -> None:
        with self._changed:
            if message["op"] == "ready":
                self._zygote_is_ready = True
                if message["no_sandbox"]:
                    logger.warning("gateways run without a sandbox: %s", message["no_sandbox"])
            elif message["op"] == "unsupported":
                self._problem = UnsupportedError(message["text"])
            elif message["op"] == "exited":
                for link in [*self._links.values(), *self._dying]:
                    if link.number == message["number"]:
                        self._later(_LEAVE_SECONDS, link.channel.finish)
            self._changed.notify_all()

    def _door_says(self, message: dict[str, Any]) -> None:
        with self._lock:
            if message["op"] == "hello":
                self._hello(message["control"], message["request"], message["peer"])
            elif message["op"] == "gone":
                for link in self._links.values():
                    if link.control == message["control"]:
                        link.reason = "the learner's connection ended"
                        self._let_leave(link)

    def _let_leave(self, link: _Link) -> None:
        """Let the gateway hand over what it has received, then end it."""
        link.channel.post({"op": "leave"})
        self._later(_LEAVE_SECONDS, lambda: self._end(link, link.reason))

    # ---------------------------------------------------------------------------------------------- links, in the loop

    def _hello(self, control: int, request: dict[str, Any], peer: str) -> None:
        def refuse(text: str, kind: str = "lost") -> None:
            self._say_refused(f"a learner at {peer} is not let in: {text}")
            refused = {"op": "decision", "control": control, "refused": text, "kind": kind}
            self._door.channel.post({**refused, "timeout": self._timeout})

        kinds = {"learner_id": int, "incarnation": str, "host": str, "host_key": str}
        is_whole = all(type(request.get(name)) is kind for name, kind in kinds.items())
        if not is_whole or not 0 <= request["learner_id"] < 2**31 or len(request["incarnation"]) > _MAX_NAME_CHARACTERS:
            return refuse("the syncer did not understand the learner's request")
        if len(self._links) + len(self._dying) >= _MAX_LINKS:
            return refuse(f"the syncer has {_MAX_LINKS} links and takes no more")
        if self._is_over or not self._zygote_is_ready:
            return refuse("the syncer is not ready")
        present = self._links.get(request["learner_id"])
        if present and present.incarnation != request["incarnation"]:
            text = f"learner id {present.learner_id} is already in use by {present.host}; give each learner its own "
            return refuse(text + "HF_DILOCO_LEARNER_ID", "in_use")
        if present:
            self._end(present, "replaced by a new link of the same learner")
        try:
            self._admit(_Link(next(self._numbers), control, request, peer))
        except OSError as error:
            refuse(f"the syncer cannot make a link now: {error}")

    def _say_refused(self, text: str) -> None:
        """Who is refused asks again and again: the same is said once in a while."""
        now = time.monotonic()
        if text != self._refused or now - self._refused_at > _SAY_AGAIN_SECONDS:
            logger.warning("[syncer] %s", text)
            self._refused, self._refused_at = text, now

    def _admit(self, link: _Link) -> None:
        assert self._loop is not None
        ours, theirs = socket.socketpair()
        link.channel = Channel(
            ours,
            self._loop,
            lambda message, payload, release: self._gateway_says(link, message, payload, release),
            lambda _reason: self._gateway_gone(link),
            self._pool,
        )
        self._links[link.learner_id] = link
        with theirs:
            args = {"token": link.token, "timeout": self._timeout}
            fork = {"op": "fork", "number": link.number, "args": args}
            self._zygote.channel.post(fork, fds=[theirs.fileno()])

    def _gateway_says(
        self, link: _Link, message: dict[str, Any], payload: Tensor | None, release: Callable[[], None]
    ) -> None:
        op = message["op"]
        with self._changed:
            if link.is_over:
                release()
            elif op == "message":
                self._received(link, message["message"], payload, release)
            elif op == "listening":
                decision = {"op": "decision", "control": link.control, "port": message["port"], "token": link.token}
                self._door.channel.post({**decision, "direct": link.is_direct, "timeout": self._timeout})
            elif op == "up":
                link.is_up = True
                self._inbox.put(link.number, LinkUp(link.learner_id))
            elif op == "sent":
                self._moved.setdefault(link.learner_id, [0, 0])[1] += message["size"]
            elif op == "drained":
                link.is_drained = True
                self._changed.notify_all()
            elif op == "ended":
                link.reason = message["reason"]

    def _received(self, link: _Link, document: Any, payload: Tensor | None, release: Callable[[], None]) -> None:
        try:
            received = LentReceived(link.learner_id, from_wire(document), payload, [release])
        except MessageError as error:
            release()
            self._end(link, f"the learner sent something that is no message: {error}")
            return
        if not self._inbox.put(link.number, received, link.channel.frame_bytes):
            release()
            self._end(link, "the learner sends faster than the syncer can handle it")
        elif payload is not None:
            self._moved.setdefault(link.learner_id, [0, 0])[0] += payload.numel()

    def _gateway_gone(self, link: _Link) -> None:
        with self._lock:
            self._end(link, link.reason)
            self._dying.discard(link)

    def _end(self, link: _Link, reason: str) -> None:
        """End a link. Its gateway may live a moment longer; nothing it says counts any more."""
        with self._changed:
            if link.is_over:
                return
            link.is_over = True
            self._dying.add(link)
            if self._links.get(link.learner_id) is link:
                del self._links[link.learner_id]
            if link.is_up:
                self._inbox.put(link.number, LinkDown(link.learner_id, reason))
            self._changed.notify_all()
        logger.info("[learner %d] link ended: %s", link.learner_id, reason)
        self._zygote.channel.post({"op": "kill", "number": link.number})
        self._door.channel.post({"op": "drop", "control": link.control, "reason": reason})

    def _tick(self) -> None:
        for helper in (self._door, self._zygote):
            helper.channel.post({"op": "tick"})
            helper.look()
        # (before it is ready the zygote imports torch and says nothing)
        if self._door.silent_for() > self._timeout:
            self._door.kill()
        if self._zygote_is_ready and self._zygote.silent_for() > 3 * self._timeout:
            self._zygote.kill()
        with self._lock:
            for link in list(self._links.values()):
                link.channel.post({"op": "tick"})
                if time.monotonic() - link.channel.heard > self._timeout:
                    self._end(link, f"the gateway process has not moved for {self._timeout:g} s")
