"""Copies of values as they were at one moment, taken without waiting for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property

import torch
from torch import Tensor


class Snapshot:
    """Values as they were at one moment, flat on the CPU, perhaps still on their way.

    Args:
        finish: gives the values; waits for what is under way.
    """

    def __init__(self, finish: Callable[[], Tensor]) -> None:
        self._finish = finish

    def result(self) -> Tensor:
        """The values; waits for whatever is under way. One thread at a time, and it may be any."""
        return self._values

    @cached_property
    def _values(self) -> Tensor:
        return self._finish()


class Snapshots:
    """Takes snapshots without waiting on the host: tensors are cloned on their device and travel on a side stream."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def take(self, values: Tensor, pairs: Iterable[tuple[Tensor, Tensor]]) -> Snapshot:
        """Copy each (target, source); the targets are views that make up ``values``, pinned if a source is on CUDA.

        The sources may change right away. Device memory: a clone in the targets' dtype, until it has arrived.
        """
        cloned: dict[torch.device, list[tuple[Tensor, Tensor]]] = {}
        with torch.no_grad():
            for target, source in pairs:
                if source.is_cuda:
                    clone = source.to(target.dtype, copy=True, memory_format=torch.contiguous_format)
                    cloned.setdefault(source.device, []).append((target, clone))
                else:
                    target.copy_(source)
        copied = [self._send_home(device, pairs) for device, pairs in cloned.items()]

        def arrived() -> Tensor:
            for event in copied:
                event.synchronize()
            return values

        return Snapshot(arrived)

    def _send_home(self, device: torch.device, pairs: list[tuple[Tensor, Tensor]]) -> torch.cuda.Event:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        side = self._streams[device]
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for target, clone in pairs:
                target.copy_(clone, non_blocking=True)
                clone.record_stream(side)  # else its memory could be handed out while it is still being read
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(side)
        return event
