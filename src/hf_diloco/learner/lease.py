"""Which shard of the training set a learner reads now: told by the syncer, looked up by its data sets."""

from __future__ import annotations

import weakref

import torch

from hf_diloco.config import DiLoCoPlugin


class ShardLease:
    """The shard that a learner's data sets read. They look here when a pass over them begins.

    In shared memory, since a pass may begin in a worker of a DataLoader.

    Args:
        num_shards: of the training set.
        shard: to begin with.
    """

    def __init__(self, num_shards: int, shard: int) -> None:
        self.num_shards = num_shards
        self.first_epoch = 0  # of the passes of this training: those before, if it goes on from a checkpoint
        self._shard = torch.tensor([shard]).share_memory_()  # type: ignore[no-untyped-call]

    @property
    def shard(self) -> int:
        """For the next pass."""
        return int(self._shard)

    def move(self, shard: int) -> None:
        """Read this shard from the next pass on."""
        self._shard.fill_(shard)

    def __deepcopy__(self, memo: object) -> ShardLease:
        return self  # copies of a data set move with it


# Data sets are made before the learner is, by a call that knows no more of it than the plugin does.
_leases: weakref.WeakValueDictionary[tuple[str | None, int | None], ShardLease] = weakref.WeakValueDictionary()


def lease_of(plugin: DiLoCoPlugin) -> ShardLease | None:
    """The lease of this learner; None if it has no data set that can change its shard."""
    return _leases.get((plugin.syncer, plugin.learner_id))


def lease_for(plugin: DiLoCoPlugin, num_shards: int) -> ShardLease:
    """The lease of this learner; a new one on its home shard if it has none over so many shards."""
    assert plugin.learner_id is not None  # DiLoCoPlugin has checked: there is a syncer
    lease = lease_of(plugin)
    if lease is None or lease.num_shards != num_shards:
        lease = ShardLease(num_shards, plugin.learner_id % num_shards)
        _leases[plugin.syncer, plugin.learner_id] = lease
    return lease
