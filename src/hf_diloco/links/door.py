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
import select
import socket
import ssl
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_diloco.errors import AuthenticationError, MessageError
from hf_diloco.links import child, tls
from hf_diloco.links.channel import Channel
from hf_diloco.links.handshake import CONTROL, keep_alive, send_document, welcome
from hf_diloco.links.listening import join_address
from hf_diloco.links.loop import Loop, tick_seconds
from hf_diloco.links.relay import MAX_CONNECTIONS, OUT_OF_FILES, relay

logger = logging.getLogger(__name__)

_MAX_STRANGERS = 64  # connections that have not proved the token yet
_STRANGER_SECONDS = 5.0
_DECISION_SECONDS = 20.0
_LOG_PAUSE_SECONDS = 1.0


@dataclass
class _Control:
    """The control connection of one link."""

    sock: socket.socket
    decision: queue.SimpleQueue[dict[str, Any]] = field(default_factory=queue.SimpleQueue)
    token: str = ""  # of the link
    sending: threading.Lock = field(default_factory=threading.Lock)


class _Door:
    def __init__(self, sock: socket.socket) -> None:
        self._loop = Loop()
        self._channel = Channel(sock, self._loop, self._told, lambda _reason: os._exit(0))
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._strangers: dict[socket.socket, float] = {}  # since when
        self._controls: dict[int, _Control] = {}
        self._ports: dict[str, int] = {}  # gateway's port by link token
        self._relays: Counter[str] = Counter()  # data connections by link token
        self._last_log = -_LOG_PAUSE_SECONDS
        self._num_unsaid = 0  # warnings since then

    def run(self) -> None:
        self._loop.run()

    # ------------------------------------------------------------------------------------------ what the syncer says

    def _told(self, message: dict[str, Any], _payload: object, _release: object) -> None:
        op = message["op"]
        if op == "start":
            self._secret, self._timeout = message["secret"], message["timeout"]
            certificate = message["certificate"]
            self._tls = tls.door_context(Path(certificate)) if certificate else None
            listener = socket.socket(fileno=message["fds"][0])
            listener.setblocking(True)
            tick = tick_seconds(self._timeout)
            self._loop.every(tick, self._tick)
            self._loop.every(1.0, self._tire_of_strangers)
            threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
        elif op == "decision":
            with self._lock:
                control = self._controls.get(message["control"])
                if control and "port" in message:
                    control.token = message["token"]
                    self._ports[control.token] = message["port"]
            if control:
                control.decision.put(message)
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
        control = self._forget_control(number)
        if control is None:
            return
        if control.sending.acquire(blocking=False):  # else it hangs in the middle of our first word
            with contextlib.suppress(OSError):
                control.sock.settimeout(0.0)
                send_document(control.sock, {"bye": reason})
            control.sending.release()
        _shut(control.sock)

    def _forget_control(self, number: int) -> _Control | None:
        with self._lock:
            control = self._controls.pop(number, None)
            if control:
                self._ports.pop(control.token, None)
        return control

    # ------------------------------------------------------------------------------------------- who comes to the door

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, peer = listener.accept()
            except OSError as error:  # out of descriptors, or the peer has gone again
                self._warn_of_files(error)
                logger.debug("accept: %s", error)
                time.sleep(0.05)
                continue
            with self._lock:
                self._strangers[sock] = time.monotonic()
                excess = None
                if len(self._strangers) > _MAX_STRANGERS:
                    excess = min(self._strangers, key=lambda stranger: self._strangers[stranger])
            if excess:
                _shut(excess)
            try:
                threading.Thread(target=self._serve, args=(sock, peer[0], peer[1]), daemon=True).start()
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

    def _serve(self, sock: socket.socket, peer: str, port: int) -> None:
        where = join_address(peer, port)
        try:
            sock.settimeout(_STRANGER_SECONDS)
            keep_alive(sock, self._timeout)
            sock = self._with_tls(sock)
            if isinstance(sock, ssl.SSLSocket):
                sock.do_handshake()
            may_speak = self._tls is None or isinstance(sock, ssl.SSLSocket) or tls.is_loopback(peer)
            kind, request = welcome(sock, self._secret, may_speak=may_speak)
        except AuthenticationError:
            self._warn("a learner at %s came with a wrong token", where)
            kind = b""
        except (OSError, EOFError, MessageError) as error:
            logger.info("not let in: %s: %s", where, error)
            kind = b""
        finally:
            self._forget_stranger(sock)
        try:
            if kind == CONTROL:
                self._control(sock, peer, request)
            elif kind:
                self._data(sock, str(request.get("token")))
        except (OSError, EOFError, MessageError, queue.Empty) as error:
            self._warn_of_files(error)
            logger.info("connection of %s ended: %s", where, error)
        finally:
            sock.close()

    def _with_tls(self, sock: socket.socket) -> socket.socket:
        """The connection as a TLS one, if the stranger speaks it; its handshake is still to come."""
        if not tls.speaks_tls(sock):
            return sock
        if self._tls is None:
            raise MessageError("it speaks TLS, which is switched off here (--no-tls)")
        secured = self._tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        with self._lock:  # the wrapped socket has taken the descriptor over
            self._strangers[secured] = self._strangers.pop(sock, time.monotonic())
        return secured

    def _control(self, sock: socket.socket, peer: str, request: dict[str, Any]) -> None:
        number, control = next(self._numbers), _Control(sock)
        with self._lock:
            self._controls[number] = control
        self._channel.post({"op": "hello", "control": number, "peer": peer, "request": request})
        try:
            decision = control.decision.get(timeout=_DECISION_SECONDS)
            with control.sending:
                send_document(sock, decision)
            _wait_for_end(sock)
        finally:
            self._forget_control(number)
            self._channel.post({"op": "gone", "control": number})

    def _data(self, sock: socket.socket, token: str) -> None:
        with self._lock:
            port = self._ports.get(token)
            if port is None:
                raise MessageError("no such link")
            if self._relays[token] == MAX_CONNECTIONS:
                raise MessageError("its link has too many connections")
            self._relays[token] += 1
        try:
            relay(sock, socket.create_connection(("127.0.0.1", port), timeout=5))
        finally:
            with self._lock:
                self._relays[token] -= 1
                self._relays += Counter()  # drops what is zero

    def _warn_of_files(self, error: Exception) -> None:
        if isinstance(error, OSError) and error.errno in OUT_OF_FILES:
            self._warn("the door cannot serve all who come: %s (ulimit -n)", error)

    def _warn(self, text: str, *args: object) -> None:
        """Strangers shall not fill the log."""
        now = time.monotonic()
        with self._lock:
            is_soon = now - self._last_log < _LOG_PAUSE_SECONDS
            self._num_unsaid += is_soon
            if is_soon:
                return
            num_unsaid, self._num_unsaid, self._last_log = self._num_unsaid, 0, now
        logger.warning(text + (f" ({num_unsaid} more before it)" if num_unsaid else ""), *args)


def _wait_for_end(sock: socket.socket) -> None:
    """Nothing more is said: the first thing that can be read is the end. (TLS must not be read while we write.)"""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    poll.poll()


def _shut(sock: socket.socket) -> None:
    """End a connection; the thread that serves it closes it."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)  # of the TCP connection, whatever TLS is doing


def main() -> None:
    """Be the door."""
    sock, parent = child.begin("door")
    threading.stack_size(256 << 10)  # a relayed link takes 18 threads
    child.watch_parent(parent)
    _Door(sock).run()


if __name__ == "__main__":
    main()
