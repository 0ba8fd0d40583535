"""Bytes from one TCP connection to another, in the kernel where it can (``splice``). No torch: the door imports it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import threading
from collections.abc import Callable

_PIPE_BYTES = 1 << 20
_F_SETPIPE_SZ = 1031


def relay(first: socket.socket, second: socket.socket) -> None:
    """Relay both ways until one side ends; then both are closed. Takes this thread and one more."""
    for sock in (first, second):
        sock.settimeout(None)
    back = threading.Thread(target=_pump, args=(second, first), daemon=True)
    back.start()
    _pump(first, second)
    back.join()
    first.close()
    second.close()


def listen_for(port: int, dial: Callable[[], socket.socket]) -> socket.socket:
    """Listen on 127.0.0.1:``port`` and relay each connection to one that ``dial`` makes.

    Raises:
        OSError: the port is taken.
    """
    listener = socket.create_server(("127.0.0.1", port), backlog=64)

    def serve(sock: socket.socket) -> None:
        try:
            other = dial()
        except Exception:  # whoever called sees its connection end; the link's own beats tell the reason
            sock.close()
            return
        relay(sock, other)

    def accept() -> None:
        while True:
            sock, _ = listener.accept()
            threading.Thread(target=serve, args=(sock,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return listener


def _pump(source: socket.socket, sink: socket.socket) -> None:
    try:
        try:
            _splice(source, sink)
        except OSError as error:
            if error.errno not in (22, 38):  # EINVAL, ENOSYS: this kernel or sandbox cannot; nothing was moved yet
                raise
            _copy(source, sink)
    except OSError:
        pass
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
