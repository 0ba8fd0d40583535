"""Payload memory that two processes share: memfd regions, made once and reused.

The side that sends owns the region and its descriptor; the other side maps it. No name in any file system, so
nothing can be left behind, and the size of /dev/shm does not matter.
"""

from __future__ import annotations

import itertools
import mmap
import os
import threading
import weakref
from typing import Any

import torch
from torch import Tensor

MAX_PAYLOAD_BYTES = 1 << 38  # far above any fragment; a larger number comes from a broken or hostile peer
_GRAIN_BYTES = 1 << 16
_MAX_FREE = 8  # as many as there may be open rounds


def map_region(fd: int, size: int) -> Tensor:
    """The region as a uint8 tensor, which alone keeps it mapped. The descriptor may be closed afterwards."""
    return torch.frombuffer(mmap.mmap(fd, size, mmap.MAP_SHARED), dtype=torch.uint8)


def exact_piece(payload: Tensor, offset: int, size: int) -> Tensor:
    """A view of these bytes that owns a storage of exactly this size: RPC would copy a slice before sending it."""
    return torch.frombuffer(payload.numpy(), dtype=torch.uint8, count=size, offset=offset)


class Buffer:
    """One region of this process. ``holds`` counts who still reads or writes it."""

    def __init__(self, number: int, size: int) -> None:
        self.number, self.size, self.holds = number, size, 1
        self.fd = os.memfd_create("hf-diloco", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(self.fd, 0, size)  # the pages now, without the GIL; a full machine says so here
            self.tensor = map_region(self.fd, size)
        except BaseException:
            os.close(self.fd)
            raise
        self.passed_to: weakref.WeakSet[Any] = weakref.WeakSet()  # channels whose other side has mapped it

    def destroy(self) -> None:
        """Let the memory go; who has mapped it keeps it."""
        os.close(self.fd)
        del self.tensor


class BufferPool:
    """The regions that this process sends from."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._free: list[Buffer] = []  # the one that was used last comes last
        self._closed = False

    def take(self, size: int) -> Buffer:
        """A region of at least ``size`` bytes, held once. The smallest that fits, else a new one."""
        with self._lock:
            fitting = [buffer for buffer in self._free if size <= buffer.size <= 4 * size + (16 << 20)]
            if fitting:
                buffer = min(fitting, key=lambda buffer: buffer.size)
                self._free.remove(buffer)
                buffer.holds = 1
                return buffer
            number = next(self._numbers)
        return Buffer(number, -(-size // _GRAIN_BYTES) * _GRAIN_BYTES)

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
            self._free.append(buffer)
            excess = self._free if self._closed else self._free[:-_MAX_FREE]
            self._free = [] if self._closed else self._free[-_MAX_FREE:]
        self._destroy(excess)

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
