"""The learner's end of one link: carries messages and payloads between the trainer and the gateway.

It calls, the gateway answers (learners behind NAT can only call out). Whatever goes wrong, it says why and exits:
the next courier makes the next link.
"""

from __future__ import annotations

import logging
import os
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

from torch import Tensor

from hf_diloco.errors import AuthenticationError, LearnerRefusedError, MessageError
from hf_diloco.links import handshake, sandbox, wire
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
from hf_diloco.links.loop import (
    LOCAL_TICK_SECONDS,
    SHORTEST_LOCAL_TIMEOUT_SECONDS,
    UNTOLD_TIMEOUT_SECONDS,
    Loop,
    tick_seconds,
)
from hf_diloco.links.relay import listen_for
from hf_diloco.links.token import Token

logger = logging.getLogger(__name__)

_NO_TIMEOUT = 0.0  # slow is not dead: death is for the beats to find, and for TCP
_LAST_WORDS_SECONDS = 2.0
_MAX_TELL_MESSAGES = 64
_MAX_TELL_BYTES = 4 << 20
_MAX_DOWNLOADS = 1000  # announced and not fetched yet; an honest syncer has one a fragment under way
_LONGEST_TIMEOUT_SECONDS = 86_400.0


@dataclass
class _Upload:
    number: int
    message: dict[str, Any]
    after: int  # messages without payload that were sent before
    payload: Tensor
    release: Callable[[], None]


class Courier:
    """One link, from the door's answer to the first thing that goes wrong."""

    def __init__(self, sock: socket.socket, args: dict[str, Any]) -> None:
        self._args = args
        self._address: str = args["host_name"]
        self._timeout = UNTOLD_TIMEOUT_SECONDS
        self._room = threading.Condition()
        self._loop, self._pool = Loop(), BufferPool(self._has_room)
        self._tells: deque[tuple[int, dict[str, Any]]] = deque()
        self._tell_there = threading.Semaphore(0)
        self._uploads: queue.SimpleQueue[_Upload] = queue.SimpleQueue()
        self._downloads: queue.SimpleQueue[tuple[int, int, dict[str, Any]]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_tells = self._num_uploads = self._acknowledged = 0
        self._draining = False
        self._channel = Channel(sock, self._loop, self._told_by_trainer, lambda _reason: os._exit(0), self._pool)
        self._channel.post({"op": "born", "pid": os.getpid()})

    def run(self) -> NoReturn:
        """Link, then carry."""
        self._loop.every(LOCAL_TICK_SECONDS, self._tick)
        self._loop.start("trainer-channel")
        try:
            control, answer = self._knock()
            self._token, port = str(answer["token"]), int(answer["port"])
        except AuthenticationError as error:
            self._end(str(error), kind="authentication")
        except LearnerRefusedError as error:
            self._end(str(error), kind="refused")
        except (OSError, EOFError, MessageError, KeyError, TypeError, ValueError) as error:
            self._end(self._explain(error))
        if self._args["sandboxed"]:
            sandbox.before_agent()
        direct = bool(answer.get("direct")) and self._args["direct"]
        try:
            if not direct:
                listen_for(port, self._dial)
            agent = Agent("courier", num_threads=4)
            self._ctl, self._up, self._down = (agent.add_peer(port) for _ in range(3))
            self._beat()
            sandbox.limit_memory()
            if self._args["sandboxed"]:
                sandbox.lock(may_connect=True)
        except Exception as error:
            self._end(f"the syncer's gateway cannot be reached: {str(error)[:200]}", kind="unreachable")
        self._channel.post({"op": "up"})
        for work in (self._watch_control, self._send_tells, self._poll, self._upload, self._download):
            threading.Thread(target=self._guarded, args=(work, control), name=work.__name__, daemon=True).start()
        while True:
            time.sleep(tick_seconds(self._timeout))
            try:
                self._beat()
            except Exception as error:
                self._failed(error, "no answer from the syncer's gateway")

    def _guarded(self, work: Callable[[socket.socket], None], control: socket.socket) -> None:
        try:
            work(control)
        except Exception as error:
            self._failed(error, f"{type(error).__name__} in {work.__name__.strip('_')}")

    def _failed(self, error: Exception, what: str) -> NoReturn:
        """End, but let the syncer say why first, if it ended the link: its word may come after its gateway has gone."""
        time.sleep(_LAST_WORDS_SECONDS)  # the thread that hears it ends this process
        self._end(in_words(error) or f"{what}: {str(error)[:200]}")

    def _end(self, reason: str, kind: str = "lost") -> NoReturn:
        self._channel.post({"op": "ended", "kind": kind, "reason": reason})
        self._channel.flush(1.0)
        os._exit(0)

    def _tick(self) -> None:
        self._channel.post({"op": "tick"})
        if time.monotonic() - self._channel.heard > max(self._timeout, SHORTEST_LOCAL_TIMEOUT_SECONDS):
            os._exit(0)  # the trainer is stopped: it shall be missed

    # ------------------------------------------------------------------------------------------------- coming in

    def _knock(self) -> tuple[socket.socket, dict[str, Any]]:
        request = {name: self._args[name] for name in ("learner_id", "incarnation", "host")}
        request["host_key"] = handshake.host_key()
        control = self._connect(handshake.CONTROL, request)
        control.settimeout(max(30.0, self._timeout))  # the syncer may be busy
        answer = handshake.receive_document(control)
        control.settimeout(None)
        self._timeout = min(max(0.1, float(answer["timeout"])), _LONGEST_TIMEOUT_SECONDS)
        self._channel.post({"op": "timeout", "seconds": self._timeout})
        if "refused" in answer:
            self._end(str(answer["refused"]), kind=str(answer.get("kind", "lost")))
        handshake.keep_alive(control, self._timeout)
        self._address = control.getpeername()[0]  # data goes the same way, and no name needs to be resolved again
        return control, answer

    def _connect(self, kind: bytes, request: dict[str, Any]) -> socket.socket:
        args = self._args
        timeout = min(8.0, max(2.0, self._timeout))
        return handshake.connect(self._address, args["port"], Token(*args["token"]), kind, request, timeout)

    def _dial(self) -> socket.socket:
        sock = self._connect(handshake.DATA, {"token": self._token})
        handshake.keep_alive(sock, self._timeout)
        return sock

    def _explain(self, error: Exception) -> str:
        where = f"{self._args['host_name']}:{self._args['port']}"
        if isinstance(error, ConnectionRefusedError):
            return f"connection refused by {where}"
        if isinstance(error, TimeoutError):
            return f"no answer from {where}"
        if isinstance(error, socket.gaierror):
            return f"{self._args['host_name']} cannot be resolved: {error.strerror}"
        if isinstance(error, MessageError):
            return str(error)
        return f"{where}: {error}"

    # ------------------------------------------------------------------------------------------------- from the trainer

    def _told_by_trainer(self, message: dict[str, Any], payload: Tensor | None, release: Callable[[], None]) -> None:
        op = message["op"]
        if op == "leave":
            os._exit(0)
        elif op == "drain":
            with self._lock:
                self._draining = True
            self._check_drained()
        elif op == "message" and payload is None:
            self._num_tells += 1
            self._tells.append((len(str(message["message"])), message["message"]))
            self._tell_there.release()
        elif op == "message":
            assert payload is not None
            self._uploads.put(_Upload(self._num_uploads, message["message"], self._num_tells, payload, release))
            self._num_uploads += 1

    def _acknowledge(self, count: int) -> None:
        with self._lock:
            self._acknowledged += count
        self._check_drained()

    def _check_drained(self) -> None:
        with self._lock:
            drained = self._draining and self._acknowledged == self._num_tells + self._num_uploads
            self._draining = self._draining and not drained
        if drained:
            self._channel.post({"op": "drained"})

    # ------------------------------------------------------------------------------------------------------- threads

    def _beat(self) -> None:
        timeout = self._timeout - 2 * tick_seconds(self._timeout)  # the gateway hears nothing for as long as that
        wire.call(self._ctl, "beat", self._token, timeout_seconds=timeout).wait()

    def _watch_control(self, control: socket.socket) -> None:
        try:
            reason = str(handshake.receive_document(control).get("bye"))
        except (OSError, EOFError, MessageError):
            reason = "the syncer has gone"
        self._end(reason)

    def _send_tells(self, _control: socket.socket) -> None:
        sent = 0
        while True:
            self._tell_there.acquire()
            size, message = self._tells.popleft()
            batch = [message]
            while (
                len(batch) < _MAX_TELL_MESSAGES and size < _MAX_TELL_BYTES and self._tell_there.acquire(blocking=False)
            ):
                num_bytes, message = self._tells.popleft()
                batch.append(message)
                size += num_bytes
            wire.call(self._ctl, "tell", self._token, sent, batch, timeout_seconds=_NO_TIMEOUT).wait()
            sent += len(batch)
            self._acknowledge(len(batch))

    def _upload(self, _control: socket.socket) -> None:
        under_way: deque[tuple[wire.Future, _Upload | None]] = deque()

        def finish_oldest() -> None:
            future, finished = under_way.popleft()
            future.wait()
            if finished:
                finished.release()
                self._acknowledge(1)

        while True:
            while under_way and self._uploads.empty():
                finish_oldest()
            upload = self._uploads.get()
            for arguments, is_last in _pieces(upload):
                if len(under_way) == WINDOW:
                    finish_oldest()
                future = wire.call(self._up, "put", self._token, *arguments, timeout_seconds=_NO_TIMEOUT, is_async=True)
                under_way.append((future, upload if is_last else None))

    def _poll(self, _control: socket.socket) -> None:
        seen = 0
        while True:
            items = wire.call(self._ctl, "poll", self._token, seen, timeout_seconds=_NO_TIMEOUT, is_async=True).wait()
            if len(items) > wire.MAX_POLL_ITEMS or self._downloads.qsize() > _MAX_DOWNLOADS:
                raise MessageError("the syncer announces more than it may")
            for number, item in items:
                if number <= seen:
                    continue
                seen = number
                if "size" in item:
                    if not 0 <= item["size"] <= MAX_PAYLOAD_BYTES:
                        raise MessageError(f"a payload of {item['size']} bytes")
                    self._downloads.put((number, item["size"], item["message"]))
                else:
                    self._channel.post({"op": "message", "message": item["message"]})

    def _download(self, _control: socket.socket) -> None:
        under_way: deque[tuple[wire.Future, int, int, Buffer, Callable[[], None] | None]] = deque()

        def finish_oldest() -> None:
            future, offset, length, buffer, deliver = under_way.popleft()
            buffer.write(offset, length, future.wait())
            if deliver:
                deliver()

        while True:
            while under_way and self._downloads.empty():
                finish_oldest()
            number, size, message = self._downloads.get()
            if not size:
                while under_way:
                    finish_oldest()
                self._deliver(number, 0, message, None)
                continue
            while under_way and self._pool.held_bytes >= MAX_HELD_BYTES:
                finish_oldest()  # what is under way itself may take all the room
            with self._room:
                self._room.wait_for(lambda: self._pool.held_bytes < MAX_HELD_BYTES)
            buffer = self._pool.take(size)
            for offset in range(0, size, PIECE_BYTES):
                if len(under_way) == WINDOW:
                    finish_oldest()
                length = min(PIECE_BYTES, size - offset)
                future = wire.call(self._down, "get", self._token, number, offset, length, timeout_seconds=_NO_TIMEOUT)
                last = offset + length == size
                deliver = _bound(self._deliver, number, size, message, buffer) if last else None
                under_way.append((future, offset, length, buffer, deliver))

    def _has_room(self) -> None:
        with self._room:
            self._room.notify()

    def _deliver(self, number: int, size: int, message: dict[str, Any], buffer: Buffer | None) -> None:
        self._channel.post({"op": "message", "message": message, "size": size}, buffer=buffer)
        if buffer:
            self._pool.release(buffer)  # the channel holds it now
        wire.call(self._down, "took", self._token, number, timeout_seconds=_NO_TIMEOUT)


def _bound(function: Callable[..., None], *args: Any) -> Callable[[], None]:
    return lambda: function(*args)


def _pieces(upload: _Upload) -> Iterator[tuple[list[Any], bool]]:
    """Arguments of ``put`` for each piece, and whether it is the last."""
    total = upload.payload.numel()
    last = [upload.message, upload.after]
    if not total:
        yield [upload.number, 0, 0, last], True
        return
    for offset in range(0, total, PIECE_BYTES):
        length = min(PIECE_BYTES, total - offset)
        piece = exact_piece(upload.payload, offset, length)
        is_last = offset + length == total
        yield [upload.number, offset, total, last if is_last else None, piece], is_last


def in_words(error: Exception) -> str | None:
    """What to say of an error of RPC's transport, whose own text names C++ files; None: another error."""
    text = str(error)
    logger.info("%s: %s", type(error).__name__, text)
    return "the connection to the syncer ended" if "originated at tensorpipe" in text else None


def main(sock: socket.socket, args: dict[str, Any]) -> None:
    """Be the courier of one link."""
    Courier(sock, args).run()
