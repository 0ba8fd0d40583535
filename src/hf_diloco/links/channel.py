"""Messages, payloads and descriptors between two processes of one host, over a unix socketpair.

A frame is a length, JSON, and sometimes descriptors (SCM_RIGHTS). A payload does not travel: its region is passed
once (see :mod:`~hf_diloco.links.buffers`), later messages name it, and the receiver says when it has been used.
"""

from __future__ import annotations

import array
import json
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from hf_diloco.errors import MessageError
from hf_diloco.links.loop import READ, WRITE, Loop

if TYPE_CHECKING:
    from torch import Tensor

    from hf_diloco.links.buffers import Buffer, BufferPool

MAX_FRAME_BYTES = 32 << 20  # a Hello names every tensor of a model; nothing else comes near
_HEADER = struct.Struct("!I")
_MAX_FDS = 16


class FrameError(MessageError):
    """The other side sent something that is no frame."""


class Frame(NamedTuple):
    """One message."""

    message: dict[str, Any]
    fds: list[int]
    num_bytes: int


class FrameReader:
    """Takes frames and descriptors off a unix stream socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self._bytes, self._fds = sock, bytearray(), deque[int]()

    def read(self) -> list[Frame] | None:
        """The frames completed by one recvmsg; None at the end of the stream.

        Raises:
            BlockingIOError: nothing there (non-blocking socket).
            FrameError, OSError, ValueError, RecursionError: the stream is broken.
        """
        data, ancillary, flags, _ = self._sock.recvmsg(
            1 << 18, socket.CMSG_SPACE(_MAX_FDS * 4), socket.MSG_CMSG_CLOEXEC
        )
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                numbers = array.array("i")
                numbers.frombytes(content[: len(content) // 4 * 4])
                self._fds.extend(numbers)
        if flags & socket.MSG_CTRUNC:
            raise FrameError("descriptors were lost; is the limit of open files (ulimit -n) too low?")
        if not data:
            return None
        self._bytes += data
        frames = []
        while (frame := self._next()) is not None:
            frames.append(frame)
        return frames

    def _next(self) -> Frame | None:
        if len(self._bytes) < 4:
            return None
        (length,) = _HEADER.unpack_from(self._bytes)
        if length > MAX_FRAME_BYTES:
            raise FrameError(f"a frame of {length} bytes; at most {MAX_FRAME_BYTES} are allowed")
        if len(self._bytes) < 4 + length:
            return None
        with memoryview(self._bytes) as view:
            message = json.loads(bytes(view[4 : 4 + length]))
        del self._bytes[: 4 + length]
        fds = [self._fds.popleft() for _ in range(message.pop("fds", 0))]
        return Frame(message, fds, length)

    def close(self) -> None:
        """Close descriptors that nobody asked for."""
        while self._fds:
            os.close(self._fds.popleft())


def encode_frame(message: dict[str, Any], num_fds: int = 0) -> bytes:
    """The bytes of a frame.

    Raises:
        FrameError: it is too long.
    """
    text = json.dumps({**message, "fds": num_fds} if num_fds else message).encode()
    if len(text) > MAX_FRAME_BYTES:
        raise FrameError(f"a message of {len(text)} bytes; at most {MAX_FRAME_BYTES} are allowed")
    return _HEADER.pack(len(text)) + text


class Channel:
    """One end of the socketpair, served by a :class:`~hf_diloco.links.loop.Loop`.

    ``post`` never blocks and may be called from any thread. ``on_message(message, payload, release)`` and
    ``on_closed(reason)`` run in the loop's thread; ``on_closed`` once, when the other process has gone (or closed
    its end), after its last message. Only then are the payloads given back that it had not released: until then
    it may still be reading them.
    """

    def __init__(
        self,
        sock: socket.socket,
        loop: Loop,
        on_message: Callable[[dict[str, Any], Tensor | None, Callable[[], None]], None],
        on_closed: Callable[[str], None],
        pool: BufferPool | None = None,
    ) -> None:
        sock.setblocking(False)
        self._sock, self._loop, self._pool = sock, loop, pool
        self._on_message, self._on_closed = on_message, on_closed
        self._reader = FrameReader(sock)
        self._lock = threading.RLock()
        self._out: deque[tuple[memoryview, list[int]]] = deque()
        self._lent: dict[int, list[Buffer]] = {}  # regions the other side has not released, once for each message
        self._mapped: dict[int, Tensor] = {}  # the other side's regions
        self.closed = False
        self.heard = time.monotonic()  # when the other side last said something
        self.frame_bytes = 0  # length of the message that is being handled
        loop.call_soon(self._watch)

    def post(self, message: dict[str, Any], *, fds: Sequence[int] = (), buffer: Buffer | None = None) -> bool:
        """Send; False if the channel is closed. ``buffer`` is held until the other side releases it.

        Descriptors are duplicated: the caller may close its own at once.
        """
        with self._lock:
            if self.closed:
                return False
            fds = list(fds)
            if buffer is not None:
                assert self._pool is not None
                message = {**message, "buffer": buffer.number}
                if self not in buffer.passed_to:
                    message["capacity"] = buffer.size
                    fds.append(buffer.fd)
            frame = memoryview(encode_frame(message, len(fds)))
            duplicates = [os.dup(fd) for fd in fds]
            if buffer is not None and self._pool is not None:
                buffer.passed_to.add(self)
                self._pool.hold(buffer)
                self._lent.setdefault(buffer.number, []).append(buffer)
            idle = not self._out
            self._out.append((frame, duplicates))
            if idle:
                self._write()
                if self._out:
                    self._loop.call_soon(self._watch)
            return True

    def flush(self, seconds: float) -> None:
        """Wait until everything posted is with the kernel."""
        end = time.monotonic() + seconds
        with self._lock:
            poll = select.poll()
            poll.register(self._sock, select.POLLOUT)
            while self._out and not self.closed and (left := end - time.monotonic()) > 0:
                poll.poll(1000 * left)
                self._write()

    def finish(self) -> None:
        """Treat the other side as gone: its process has been reaped. In the loop's thread.

        Its end of the socketpair may live on in a process that was forked while the pair was made.
        """
        self._broken("")

    def close(self) -> None:
        """Close this end. In the loop's thread; ``on_closed`` is not called."""
        self._end()

    def _watch(self) -> None:
        with self._lock:
            if not self.closed:
                self._loop.watch(self._sock, READ | WRITE if self._out else READ, self._ready)

    def _write(self) -> None:
        while self._out:
            frame, fds = self._out[0]
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
            try:
                sent = self._sock.sendmsg([frame], rights)
            except BlockingIOError:
                return
            except (BrokenPipeError, ConnectionResetError):  # it is gone: reading its last words will say so
                return self._drop_output()
            except OSError as error:
                self._loop.call_soon(partial(self._broken, f"{type(error).__name__}: {error}"))
                return self._drop_output()
            for fd in fds:
                os.close(fd)
            if sent == len(frame):
                self._out.popleft()
            else:
                self._out[0] = (frame[sent:], [])

    def _drop_output(self) -> None:
        while self._out:
            for fd in self._out.popleft()[1]:
                os.close(fd)

    def _ready(self, events: int) -> None:
        if events & WRITE:
            with self._lock:
                self._write()
                self._watch()
        if events & READ:
            self._read()

    def _read(self) -> None:
        try:
            frames = self._reader.read()
        except BlockingIOError:
            return
        except (OSError, FrameError, ValueError, IndexError, AttributeError, TypeError, RecursionError) as error:
            return self._broken(f"{type(error).__name__}: {error}")
        if frames is None:
            return self._broken("")
        self.heard = time.monotonic()
        for frame in frames:
            if self.closed:
                break
            self.frame_bytes = frame.num_bytes
            self._handle(frame.message, frame.fds)

    def _handle(self, message: dict[str, Any], fds: list[int]) -> None:
        op = message.get("op")
        if op == "tick":
            return
        if op == "release":
            return self._released(message["buffer"])
        if op == "forget":
            self._mapped.pop(message["buffer"], None)
            return
        payload, release = None, _nothing
        if "buffer" in message:
            try:
                payload, release = self._map(message, fds)
            except (OSError, MessageError, ValueError, LookupError, TypeError) as error:
                return self._broken(f"{type(error).__name__}: {error}")
        elif "size" in message:
            import torch

            payload = torch.empty(0, dtype=torch.uint8)
        if fds:
            message["fds"] = fds
        self._on_message(message, payload, release)

    def _map(self, message: dict[str, Any], fds: list[int]) -> tuple[Tensor, Callable[[], None]]:
        from hf_diloco.links.buffers import map_region

        number = message["buffer"]
        if "capacity" in message:
            fd = fds.pop()
            try:
                self._mapped[number] = map_region(fd, message["capacity"])
            finally:
                os.close(fd)

        def release() -> None:
            self.post({"op": "release", "buffer": number})

        return self._mapped[number][: message["size"]], release

    def _released(self, number: int) -> None:
        with self._lock:
            held = self._lent.get(number)
            if not held:
                return
            buffer = held.pop()
            if not held:
                del self._lent[number]
        assert self._pool is not None
        self._pool.release(buffer)

    def _broken(self, reason: str) -> None:
        if not self.closed:
            self._end()
            self._on_closed(reason)

    def _end(self) -> None:
        with self._lock:
            if self.closed:
                return
            self.closed = True
            self._drop_output()
            lent, self._lent = self._lent, {}
        self._loop.forget(self._sock)
        self._sock.close()
        self._reader.close()
        self._mapped.clear()
        for buffers in lent.values():
            for buffer in buffers:
                buffer.passed_to.discard(self)
                if self._pool:
                    self._pool.release(buffer)


def _nothing() -> None:
    pass
