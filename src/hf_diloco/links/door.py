"""The syncer's one port: who holds the token may come in, nobody else reaches a byte of torch.

A process of its own, without torch. ``python -m hf_diloco.links.door <fd> <parent pid>``; the syncer passes it the
listening socket and the token. A control connection stays open as long as its link (it tells both sides at once when
the other has gone); data connections are relayed to the link's gateway on loopback.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import queue
import socket
import threading
import time
from typing import Any

from hf_diloco.errors import AuthenticationError, MessageError
from hf_diloco.links import child
from hf_diloco.links.channel import Channel
from hf_diloco.links.handshake import CONTROL, keep_alive, send_document, welcome
from hf_diloco.links.loop import Loop, tick_seconds
from hf_diloco.links.relay import relay

logger = logging.getLogger(__name__)

_MAX_STRANGERS = 64  # connections that have not proved the token yet
_STRANGER_SECONDS = 5.0
_DECISION_SECONDS = 20.0
_LOG_PAUSE_SECONDS = 1.0


class _Door:
    def __init__(self, sock: socket.socket) -> None:
        self._loop = Loop()
        self._channel = Channel(sock, self._loop, self._told, lambda _reason: os._exit(0))
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._strangers: dict[socket.socket, float] = {}  # oldest first
        self._controls: dict[int, socket.socket] = {}
        self._decisions: dict[int, queue.SimpleQueue[dict[str, Any]]] = {}
        self._ports: dict[str, int] = {}  # gateway's port by link token
        self._tokens: dict[int, str] = {}  # link token by number of the control connection
        self._last_log = 0.0

    def run(self) -> None:
        self._loop.run()

    # ------------------------------------------------------------------------------------------ what the syncer says

    def _told(self, message: dict[str, Any], _payload: object, _release: object) -> None:
        op = message["op"]
        if op == "start":
            self._token, self._timeout = message["token"], message["timeout"]
            listener = socket.socket(fileno=message["fds"][0])
            listener.setblocking(True)
            tick = tick_seconds(self._timeout)
            self._loop.every(tick, self._tick)
            self._loop.every(1.0, self._tire_of_strangers)
            threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
        elif op == "decision":
            with self._lock:
                decision = self._decisions.pop(message["control"], None)
                if decision and "port" in message:
                    self._ports[message["token"]] = message["port"]
                    self._tokens[message["control"]] = message["token"]
            if decision:
                decision.put(message)
        elif op == "drop":
            self._drop(message["control"], message["reason"])
        elif op == "quit":
            for number in list(self._controls):
                self._drop(number, message["reason"])
            os._exit(0)

    def _tick(self) -> None:
        self._channel.post({"op": "tick"})
        if time.monotonic() - self._channel.heard > self._timeout:
            logger.warning("the syncer has not moved for %.0f s; the door closes", self._timeout)
            os._exit(0)

    def _drop(self, number: int, reason: str) -> None:
        with self._lock:
            sock = self._controls.pop(number, None)
            self._ports.pop(self._tokens.pop(number, ""), None)
        if sock:
            with contextlib.suppress(OSError):
                sock.settimeout(0.0)
                send_document(sock, {"bye": reason})
            _shut(sock)

    # ------------------------------------------------------------------------------------------- who comes to the door

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, peer = listener.accept()
            except OSError as error:  # out of descriptors, or the peer has gone again
                logger.debug("accept: %s", error)
                time.sleep(0.05)
                continue
            with self._lock:
                self._strangers[sock] = time.monotonic()
                excess = next(iter(self._strangers)) if len(self._strangers) > _MAX_STRANGERS else None
            if excess:
                _shut(excess)
            try:
                threading.Thread(target=self._serve, args=(sock, peer[0]), daemon=True).start()
            except RuntimeError:  # no more threads
                self._forget_stranger(sock)
                sock.close()

    def _tire_of_strangers(self) -> None:
        with self._lock:
            late = time.monotonic() - _STRANGER_SECONDS
            tired = [sock for sock, since in self._strangers.items() if since < late]
        for sock in tired:
            _shut(sock)

    def _forget_stranger(self, sock: socket.socket) -> None:
        with self._lock:
            self._strangers.pop(sock, None)

    def _serve(self, sock: socket.socket, peer: str) -> None:
        try:
            sock.settimeout(_STRANGER_SECONDS)
            keep_alive(sock, self._timeout)
            kind, request = welcome(sock, self._token)
        except AuthenticationError:
            self._warn("a learner at %s came with a wrong token", peer)
            kind = b""
        except (OSError, EOFError, MessageError) as error:
            logger.info("not let in: %s: %s", peer, error)
            kind = b""
        finally:
            self._forget_stranger(sock)
        try:
            if kind == CONTROL:
                self._control(sock, peer, request)
            elif kind:
                self._data(sock, str(request.get("token")))
        except (OSError, EOFError, MessageError, queue.Empty) as error:
            logger.info("connection of %s ended: %s", peer, error)
        finally:
            sock.close()

    def _control(self, sock: socket.socket, peer: str, request: dict[str, Any]) -> None:
        number = next(self._numbers)
        decision: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        with self._lock:
            self._decisions[number] = decision
            self._controls[number] = sock
        self._channel.post({"op": "hello", "control": number, "peer": peer, "request": request})
        try:
            send_document(sock, decision.get(timeout=_DECISION_SECONDS))
            sock.settimeout(None)
            while sock.recv(4096):  # nothing more is said; its end is what we wait for
                pass
        finally:
            with self._lock:
                self._decisions.pop(number, None)
                self._controls.pop(number, None)
                self._ports.pop(self._tokens.pop(number, ""), None)
            self._channel.post({"op": "gone", "control": number})

    def _data(self, sock: socket.socket, token: str) -> None:
        with self._lock:
            port = self._ports.get(token)
        if port is None:
            raise MessageError("no such link")
        relay(sock, socket.create_connection(("127.0.0.1", port), timeout=5))

    def _warn(self, text: str, *args: object) -> None:
        """Strangers shall not fill the log."""
        now = time.monotonic()
        logger.log(logging.WARNING if now - self._last_log > _LOG_PAUSE_SECONDS else logging.DEBUG, text, *args)
        self._last_log = now


def _shut(sock: socket.socket) -> None:
    """End a connection; the thread that serves it closes it."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def main() -> None:
    """Be the door."""
    sock, parent = child.begin("door")
    threading.stack_size(256 << 10)  # a relayed link takes 18 threads
    child.watch_parent(parent)
    _Door(sock).run()


if __name__ == "__main__":
    main()
