"""Rows of a sharded model on their way to rank 0 of a learner."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hf_diloco.learner.snapshots import Snapshot

logger = logging.getLogger(__name__)

# Of the process, not of one object: a message that an earlier object never took must not be taken for a new one.
_tags = itertools.count(1)


class Gathering:
    """Sends what a rank holds to rank 0, in messages that are known by a tag.

    These are messages between two ranks and no collectives: they may be under way in any order, beside the
    collectives of the thread that trains, and a rank that holds nothing takes no part. So a rank sends from a thread
    of its own, when a copy from the GPU has arrived, and nobody's training step waits for it.

    Args:
        group: a gloo group of all ranks of the learner; None with one rank.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self.rank = dist.get_rank(group) if group is not None else 0

    def rank_of(self, global_rank: int) -> int:
        """Rank in the group; -1 if it is not in there."""
        if self._group is None:
            return 0 if not dist.is_initialized() or global_rank == dist.get_rank() else -1
        try:
            return dist.get_group_rank(self._group, global_rank)
        except ValueError:
            return -1

    def new_tag(self) -> int:
        """For one gathering; all ranks have to take their tags in the same order."""
        return 0 if self._group is None else next(_tags)

    def send(self, snapshot: Snapshot, tag: int) -> None:
        """Send it to rank 0, in the background."""
        name = f"hf-diloco send {tag}"
        threading.Thread(target=self._send, args=(snapshot, tag), name=name, daemon=True).start()

    def _send(self, snapshot: Snapshot, tag: int) -> None:
        try:
            self.send_now(snapshot.result(), tag)
        except RuntimeError as error:  # rank 0 is gone: the thread that trains will see that by itself
            logger.warning("rank %d could not send its rows of a fragment to rank 0: %s", self.rank, error)

    def send_now(self, values: Tensor, tag: int) -> None:
        """Send a contiguous CPU tensor to rank 0; returns when it is gone."""
        assert self._group is not None
        dist.send(_bytes(values), dist.get_global_rank(self._group, 0), self._group, tag)

    def receive(self, targets: Mapping[int, Sequence[Tensor]], tag: int) -> None:
        """Fill contiguous CPU tensors with what each rank has sent under the tag, one after the other."""
        if not targets:
            return
        assert self._group is not None
        received, works = {}, []
        for rank, parts in targets.items():
            size_bytes = sum(part.numel() * part.element_size() for part in parts)
            received[rank] = torch.empty(size_bytes, dtype=torch.uint8)
            works.append(dist.irecv(received[rank], dist.get_global_rank(self._group, rank), self._group, tag))
        for work, (rank, content) in zip(works, received.items(), strict=True):
            assert work is not None
            work.wait()
            as_bytes = [_bytes(part) for part in targets[rank]]
            contents = torch.split(content, [part.numel() for part in as_bytes])
            for part, values in zip(as_bytes, contents, strict=True):
                part.copy_(values)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)
