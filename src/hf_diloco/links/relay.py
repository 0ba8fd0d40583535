"""Bytes from one connection to another: in the kernel where it can (``splice``), or in and out of TLS.

No torch: the door imports it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import select
import socket
import ssl
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)

OUT_OF_FILES = (errno.EMFILE, errno.ENFILE)
_PIPE_BYTES = 1 << 20
_TLS_BLOCK_BYTES = 1 << 18
_F_SETPIPE_SZ = 1031
MAX_CONNECTIONS = 32  # of one link; its RPC agent makes 9


def relay(first: socket.socket, second: socket.socket) -> None:
    """Relay both ways until one side ends; then both are closed. At most one of them is a TLS connection."""
    try:
        if isinstance(first, ssl.SSLSocket):
            _relay_tls(first, second)
        elif isinstance(second, ssl.SSLSocket):
            _relay_tls(second, first)
        else:
            _relay_plain(first, second)
    finally:
        first.close()
        second.close()


def listen_for(port: int, dial: Callable[[], socket.socket]) -> socket.socket:
    """Listen on 127.0.0.1:``port`` and relay each connection to one that ``dial`` makes.

    Raises:
        OSError: the port is taken.
    """
    listener = socket.create_server(("127.0.0.1", port), backlog=64)
    room = threading.Semaphore(MAX_CONNECTIONS)

    def serve(sock: socket.socket) -> None:
        try:
            other = dial()
        except Exception:  # whoever called sees its connection end; the link's own beats tell the reason
            sock.close()
        else:
            relay(sock, other)
        finally:
            room.release()

    def accept() -> None:
        while True:
            room.acquire()  # any user of this host can connect; who is one too many waits in the backlog
            sock, _ = listener.accept()
            threading.Thread(target=serve, args=(sock,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return listener


# ------------------------------------------------------------------------------------------------------------- plain


def _relay_plain(first: socket.socket, second: socket.socket) -> None:
    """Takes this thread and one more."""
    for sock in (first, second):
        sock.settimeout(None)
    back = threading.Thread(target=_pump, args=(second, first), daemon=True)
    back.start()
    _pump(first, second)
    back.join()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    try:
        try:
            _splice(source, sink)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOSYS):  # this kernel or sandbox cannot; nothing was moved yet
                raise
            _copy(source, sink)
    except OSError as error:
        if error.errno in OUT_OF_FILES:
            logger.warning("a connection of a link ends: %s (ulimit -n)", error)
    for sock in (source, sink):
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)


def _splice(source: socket.socket, sink: socket.socket) -> None:
    read_end, write_end = os.pipe()
    try:
        with contextlib.suppress(OSError):  # above this user's limit: the default size works too
            fcntl.fcntl(write_end, _F_SETPIPE_SZ, _PIPE_BYTES)
        while moved := os.splice(source.fileno(), write_end, _PIPE_BYTES):
            while moved:
                moved -= os.splice(read_end, sink.fileno(), moved)
    finally:
        os.close(read_end)
        os.close(write_end)


def _copy(source: socket.socket, sink: socket.socket) -> None:
    block = memoryview(bytearray(_PIPE_BYTES))
    while size := source.recv_into(block):
        sink.sendall(block[:size])


# --------------------------------------------------------------------------------------------------------------- TLS


def _relay_tls(secured: ssl.SSLSocket, plain: socket.socket) -> None:
    """In this one thread: a TLS connection must not be read and written by two at once."""
    secured.setblocking(False)
    plain.setblocking(False)
    flows = incoming, outgoing = _Flow(secured, plain), _Flow(plain, secured)
    with contextlib.suppress(OSError):
        while not any(flow.is_over for flow in flows):
            moved = [flow.move() for flow in flows]
            if not any(moved):
                _wait(
                    (secured, incoming.source_wants | outgoing.sink_wants),
                    (plain, outgoing.source_wants | incoming.sink_wants),
                )


def _wait(*wanted: tuple[socket.socket, int]) -> None:
    poll = select.poll()
    for sock, events in wanted:
        if events:  # one of which nothing is wanted may have hung up already, and would wake us again and again
            poll.register(sock, events)
    poll.poll()


class _Flow:
    """One direction: a block is filled from ``source`` as far as that goes without waiting, then emptied into ``sink``.

    ``source_wants`` and ``sink_wants`` are the events that the next move waits for.
    """

    def __init__(self, source: socket.socket, sink: socket.socket) -> None:
        self._source, self._sink = source, sink
        self._block = memoryview(bytearray(_TLS_BLOCK_BYTES))
        self._first = self._last = 0
        self._source_ended = False
        self.source_wants = self.sink_wants = 0

    @property
    def is_over(self) -> bool:
        """The source has ended, and all it sent has been handed on."""
        return self._source_ended and self._first == self._last

    def move(self) -> bool:
        """Whether anything moved."""
        self.source_wants = self.sink_wants = 0
        if self._first == self._last:
            self._fill()
        before = self._first
        if self._first < self._last:
            try:
                # What TLS could not send at once must be offered again unchanged, and is: the block is still full.
                self._first += self._sink.send(self._block[self._first : self._last])
            except OSError as error:
                self.sink_wants = _wanted(error, select.POLLOUT)
        return self._first > before or self.is_over

    def _fill(self) -> None:
        self._first = self._last = 0
        while self._last < len(self._block):
            try:
                size = self._source.recv_into(self._block[self._last :])
            except OSError as error:
                self.source_wants = _wanted(error, select.POLLIN)
                return
            self._source_ended = not size
            self._last += size
            if not size or not isinstance(self._source, ssl.SSLSocket):  # TLS gives 16 KiB at a time
                return


def _wanted(error: OSError, usual: int) -> int:
    """The event to wait for before the same is tried again.

    Raises:
        OSError: it was not that; the connection is broken.
    """
    if isinstance(error, BlockingIOError):
        return usual
    if isinstance(error, ssl.SSLWantReadError):
        return select.POLLIN
    if isinstance(error, ssl.SSLWantWriteError):
        return select.POLLOUT
    raise error
