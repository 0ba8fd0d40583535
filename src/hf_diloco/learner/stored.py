"""How a tensor of a model is stored in the processes of a learner, and how some of its rows are read and changed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from hf_diloco.errors import UnsupportedError
from hf_diloco.learner.gathering import Gathering

LOW_PRECISION = (torch.bfloat16, torch.float16)
_SUPPORTED = (
    "A learner may hold its model whole in each process (one process, DDP), or in rows (FSDP2, DeepSpeed ZeRO); "
    "docs/support.md lists what is supported."
)


class Rows(NamedTuple):
    """Rows ``first`` to ``last`` (exclusive) of a tensor; a 0-dim tensor is one row."""

    first: int
    last: int

    @property
    def num_rows(self) -> int:
        """How many they are."""
        return self.last - self.first

    def overlap(self, first: int, last: int) -> Rows:
        """Those that are also in ``first`` to ``last``; ``num_rows`` is 0 if none is."""
        first = max(self.first, first)
        return Rows(first, max(first, min(self.last, last)))


class Stored(ABC):
    """One tensor of the model. All ranks of the learner make the same calls in the same order."""

    tensor: Any  # as the model has it: a Tensor, or a kind of it with more attributes
    shape: tuple[int, ...]  # of the whole tensor
    held: Rows  # what this rank can change
    shipped: dict[int, Rows]  # what each rank sends to rank 0 (rank 0: what it has itself); together all rows, once

    @property
    def keeps_small_updates(self) -> bool:
        """Whether changes are not rounded to bf16 or fp16."""
        return self.tensor.dtype not in LOW_PRECISION

    @abstractmethod
    def rows(self, rows: Rows) -> Tensor:
        """These rows, all of them held here; perhaps a view."""

    @contextmanager
    def changing(self, rows: Rows) -> Iterator[Tensor]:
        """A context in which these rows, all of them held here, can be changed in place."""
        yield self.rows(rows)

    def equals(self, rows: Rows, values: Tensor) -> bool:
        """Whether what is held here of these rows is the values, rounded to its dtype; without communication."""
        live = self.rows(rows)
        return torch.equal(live, values.to(live.device).to(live.dtype))

    @abstractmethod
    def whole(self) -> Tensor | None:
        """A CPU copy of the whole tensor in its dtype on rank 0; None on other ranks."""


class WholeTensor(Stored):
    """A tensor that each rank holds whole: one process, DDP."""

    def __init__(self, tensor: Tensor, gathering: Gathering) -> None:
        self.tensor = tensor
        self.shape = tuple(tensor.shape)
        self.held = all_rows(self.shape)
        self.shipped = {0: self.held}
        self._is_read_here = gathering.rank == 0

    def rows(self, rows: Rows) -> Tensor:
        """A view."""
        return rows_of(self.tensor.detach(), rows)

    def whole(self) -> Tensor | None:
        """The copy on rank 0; nothing is sent."""
        return self.tensor.detach().to("cpu", copy=True).contiguous() if self._is_read_here else None


class ShardedTensor(Stored):
    """A DTensor whose rows are spread over the ranks, as FSDP2 does it, perhaps on several replicas (HSDP).

    Rows are spread by the rule of ``Shard(0)``, that of ``torch.chunk``: each rank has ``ceil(rows / ranks)``, the last
    ones fewer or none. Each rank changes the rows that it holds; those of the first replica are what is read.

    Raises:
        UnsupportedError: it is placed in another way, or on processes that are not in the learner's group.
    """

    def __init__(self, name: str, tensor: DTensor, gathering: Gathering) -> None:
        self.tensor = tensor
        self.shape = tuple(tensor.shape)
        self._gathering = gathering
        mesh = tensor.device_mesh
        sharded = [dim for dim, placement in enumerate(tensor.placements) if not isinstance(placement, Replicate)]
        by_rows = all(type(tensor.placements[dim]) is Shard and tensor.placements[dim].is_shard(0) for dim in sharded)
        position = mesh.get_coordinate()
        if len(sharded) > 1 or not by_rows or position is None:
            raise UnsupportedError(
                f"{name!r} is placed as {tensor.placements} on {mesh}: tensor and pipeline parallelism inside a "
                f"learner are not supported. {_SUPPORTED}"
            )
        first_replica = mesh.mesh[tuple(slice(None) if dim in sharded else 0 for dim in range(mesh.mesh.dim()))]
        holders = [gathering.rank_of(rank) for rank in first_replica.reshape(-1).tolist()]
        if -1 in holders:
            raise UnsupportedError(
                f"{name!r} is sharded over processes that are not known to be of this learner ({mesh}). {_SUPPORTED}"
            )
        shards = _chunks(self.shape, len(holders))
        self.held = shards[position[sharded[0]] if sharded else 0]
        self.shipped = dict(zip(holders, shards, strict=True))
        if self._local().shape != (self.held.num_rows, *self.shape[1:]):
            raise UnsupportedError(
                f"{name!r} of shape {self.shape}: this process holds {tuple(self._local().shape)} of it, where torch's "
                f"rule for {tensor.placements} gives {self.held.num_rows} rows. {_SUPPORTED}"
            )

    def _local(self) -> Tensor:
        with torch.no_grad():  # else it would be a copy in the graph
            local: Tensor = self.tensor.to_local()
            return local

    def rows(self, rows: Rows) -> Tensor:
        """A view of the local shard."""
        first = self.held.first
        return rows_of(self._local(), Rows(rows.first - first, rows.last - first))

    def whole(self) -> Tensor | None:
        """The copy on rank 0, from the rows of all others."""
        tag = self._gathering.new_tag()
        mine = self.shipped.get(self._gathering.rank)
        if self._gathering.rank:
            if mine is not None and mine.num_rows:
                self._gathering.send_now(self._local().to("cpu").contiguous(), tag)
            return None
        whole = torch.empty(self.shape, dtype=self.tensor.dtype)
        if not self.shape:
            return whole.copy_(self._local())
        if mine is not None:
            whole[mine.first : mine.last].copy_(self.rows(mine))
        others = {rank: [whole[r.first : r.last]] for rank, r in self.shipped.items() if rank and r.num_rows}
        self._gathering.receive(others, tag)
        return whole


def rows_of(tensor: Tensor, rows: Rows) -> Tensor:
    """A view of some of its rows."""
    return tensor[rows.first : rows.last] if tensor.dim() else tensor


def all_rows(shape: tuple[int, ...]) -> Rows:
    """Those of a whole tensor."""
    return Rows(0, shape[0] if shape else 1)


def _chunks(shape: tuple[int, ...], num_chunks: int) -> list[Rows]:
    num_rows = all_rows(shape).last
    size = -(-num_rows // num_chunks)
    return [Rows(min(i * size, num_rows), min((i + 1) * size, num_rows)) for i in range(num_chunks)]
