"""What examples a model is trained on, as numbers: computed on the device, read when they have come home."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from hf_diloco.core.data_digest import NUM_HASHES, DataDigest

_MOST_FLOATS = 4096  # of an image or a sound that are looked at, evenly spread
# Odd numbers for mixing bits, of 64 bits, as int64 has them (splitmix64's).
_STEP, _FIRST, _SECOND = -7046029254386353131, -4658895280553007687, -7723592293110705685


class ExamplesRead:
    """The digest of the examples that this learner has read, for the syncer to compare."""

    def __init__(self) -> None:
        self._digest = DataDigest()
        self._pending: deque[tuple[Tensor, torch.cuda.Event | None]] = deque()
        self._say_at = 0

    def add(self, batch: Tensor, mask: Tensor | None) -> None:
        """Note the examples of a micro-batch; never waits for an accelerator.

        Args:
            batch: token ids, pixels or what else there is, with a row for each example.
            mask: of the same shape, zero where a row is padded: with other examples it is padded otherwise.
        """
        numbers = example_numbers(batch.detach(), mask)
        if numbers.is_cuda:
            home = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            home.copy_(numbers, non_blocking=True)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(torch.cuda.current_stream(numbers.device))
            self._pending.append((home, copied))
        else:
            self._pending.append((numbers.cpu(), None))

    def news(self) -> tuple[int, ...] | None:
        """The smallest hashes: at first, then each time that twice as many examples were read; else None."""
        while self._pending:
            numbers, copied = self._pending[0]
            if copied is not None and not copied.query():  # type: ignore[no-untyped-call]
                break
            self._pending.popleft()
            self._digest.add(numbers.tolist())
        if self._digest.num_examples < self._say_at:
            return None
        self._say_at = max(2 * self._digest.num_examples, NUM_HASHES)
        return self._digest.hashes


def example_numbers(batch: Tensor, mask: Tensor | None) -> Tensor:
    """A number (int64) for each row of a batch: equal rows have equal ones, padding does not count."""
    rows = batch.reshape(len(batch), -1) if batch.numel() else batch.new_zeros((len(batch), 1))
    kept = mask.reshape(rows.shape).ne(0) if mask is not None and mask.shape == batch.shape and batch.numel() else None
    if rows.is_floating_point():
        stride = max(rows.shape[1] // _MOST_FLOATS, 1)
        rows = rows[:, ::stride].to(torch.float32).contiguous().view(torch.int32)
        kept = None if kept is None else kept[:, ::stride]
    rows = rows.to(torch.int64)
    positions = torch.arange(1, rows.shape[1] + 1, device=rows.device)
    if kept is not None:
        positions = kept.cumsum(1)  # so that padding on the left shifts nothing
    mixed = rows + positions * _STEP
    mixed = (mixed ^ (mixed >> 30)) * _FIRST
    mixed = (mixed ^ (mixed >> 27)) * _SECOND
    mixed = mixed ^ (mixed >> 31)
    return (mixed if kept is None else mixed * kept).sum(1)
