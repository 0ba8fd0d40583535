"""Payload memory that two processes share: memfd regions, made once and reused.

The side that sends owns the region and its descriptor; the other side maps it. No name in any file system, so
nothing can be left behind, and the size of /dev/shm does not matter.
"""

from __future__ import annotations

import fcntl
import itertools
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_diloco.errors import MessageError

if TYPE_CHECKING:
    from hf_diloco.links.channel import Channel

PIECE_BYTES = 8 << 20  # what one RPC call carries of a payload
WINDOW = 4  # pieces that the courier may have under way, each way
MAX_HELD_BYTES = 1 << 30  # above this, what comes in waits until the main process has released some
MAX_PAYLOAD_BYTES = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2  # no run with more fits on this host
_GRAIN_BYTES = 1 << 16
_MAX_FREE = 8  # as many as there may be open rounds


def map_region(fd: int, size: int) -> Tensor:
    """The region as a uint8 tensor, which alone keeps it mapped. The descriptor may be closed afterwards.

    Raises:
        MessageError: whoever made it could shrink it, and so end this process.
        OSError, ValueError: it is no region, or smaller.
    """
    if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise MessageError("a memory region that is not sealed")
    return torch.frombuffer(mmap.mmap(fd, size, mmap.MAP_SHARED), dtype=torch.uint8)


def exact_piece(payload: Tensor, offset: int, size: int) -> Tensor:
    """A view of these bytes that owns a storage of exactly this size: RPC would copy a slice before sending it."""
    return torch.frombuffer(payload.numpy(), dtype=torch.uint8, count=size, offset=offset)


class Buffer:
    """One region of this process. ``holds`` counts who still reads or writes it."""

    def __init__(self, number: int, size: int) -> None:
        self.number, self.size, self.holds = number, size, 1
        self.fd = os.memfd_create("hf-diloco", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, size)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            self.tensor = map_region(self.fd, size)
        except BaseException:
            os.close(self.fd)
            raise
        self._reserved: set[int] = set()  # pieces that have their pages
        self.passed_to: weakref.WeakSet[Any] = weakref.WeakSet()  # channels whose other side has mapped it

    def reserve(self, offset: int, size: int) -> None:
        """Take the memory for these bytes, without the GIL. A full machine says so here (OSError)."""
        for piece in range(offset // PIECE_BYTES, -(-(offset + size) // PIECE_BYTES)):
            if piece not in self._reserved:
                start = piece * PIECE_BYTES
                os.posix_fallocate(self.fd, start, min(PIECE_BYTES, self.size - start))
                self._reserved.add(piece)

    def write(self, offset: int, size: int, piece: Any) -> None:
        """Write a piece that a peer sent and that ought to have ``size`` bytes.

        Raises:
            MessageError: it is something else.
        """
        if not isinstance(piece, Tensor) or piece.dtype != torch.uint8 or piece.shape != (size,):
            raise MessageError("not the piece of a payload that was expected")
        self.reserve(offset, size)
        self.tensor[offset : offset + size].copy_(piece)

    def destroy(self) -> None:
        """Let the memory go; who has mapped it keeps it."""
        os.close(self.fd)
        del self.tensor


class BufferPool:
    """The regions that this process sends from.

    Args:
        on_release: called whenever a region has become free, from any thread.
    """

    def __init__(self, on_release: Callable[[], None] | None = None) -> None:
        self._lock = threading.Lock()
        self._on_release = on_release
        self.held_bytes = 0  # size of the regions that somebody still reads or writes
        self._numbers = itertools.count(1)
        self._free: list[Buffer] = []  # the one that was used last comes last
        self._closed = False

    def take(self, size: int) -> Buffer:
        """A region of at least ``size`` bytes, held once. The smallest that fits, else a new one.

        Memory is taken as it is reserved, so a peer's announcement alone costs none.
        """
        with self._lock:
            fitting = [buffer for buffer in self._free if size <= buffer.size <= 4 * size + (16 << 20)]
            if fitting:
                buffer = min(fitting, key=lambda buffer: buffer.size)
                self._free.remove(buffer)
                buffer.holds = 1
                self.held_bytes += buffer.size
                return buffer
            number = next(self._numbers)
        buffer = Buffer(number, -(-size // _GRAIN_BYTES) * _GRAIN_BYTES)
        with self._lock:
            self.held_bytes += buffer.size
        return buffer

    def lend(self, payload: Tensor, channels: Sequence[Channel], document: dict[str, Any]) -> None:
        """Send ``document`` on the channels with one copy of the payload, which is free when all have released it."""
        document = {**document, "size": payload.numel()}
        if not payload.numel():
            for channel in channels:
                channel.post(document)
            return
        buffer = self.take(payload.numel())
        try:
            buffer.reserve(0, payload.numel())
            buffer.tensor[: payload.numel()].copy_(payload)
            for channel in channels:
                channel.post(document, buffer=buffer)
        finally:
            self.release(buffer)

    def hold(self, buffer: Buffer) -> None:
        """One more reader."""
        with self._lock:
            buffer.holds += 1

    def release(self, buffer: Buffer) -> None:
        """One reader less; without any, the region is free for reuse, and the one unused longest may go."""
        with self._lock:
            buffer.holds -= 1
            if buffer.holds:
                return
            self.held_bytes -= buffer.size
            self._free.append(buffer)
            excess = self._free if self._closed else self._free[:-_MAX_FREE]
            self._free = [] if self._closed else self._free[-_MAX_FREE:]
        self._destroy(excess)
        if self._on_release:
            self._on_release()

    def close(self) -> None:
        """Let all go; those still held go when they are released."""
        with self._lock:
            self._closed, excess, self._free = True, self._free, []
        self._destroy(excess)

    @staticmethod
    def _destroy(buffers: list[Buffer]) -> None:
        for buffer in buffers:
            for channel in list(buffer.passed_to):
                channel.post({"op": "forget", "buffer": buffer.number})
            buffer.destroy()
