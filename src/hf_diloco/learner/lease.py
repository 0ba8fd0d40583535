"""Which shard of the training set a learner reads now: told by the syncer, looked up by its data sets."""

from __future__ import annotations

import warnings
import weakref

import datasets
import torch

from hf_diloco.config import DiLoCoPlugin
from hf_diloco.errors import DiLoCoWarning


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
        self.is_read = True  # by what is trained on
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
    """The lease of this learner; None if it has no data set that can change its shard, or trains on another."""
    lease = _leases.get((plugin.syncer, plugin.learner_id))
    return lease if lease is not None and lease.is_read else None


def trains_on(plugin: DiLoCoPlugin, dataset: object) -> None:
    """Training begins, on this data set: does it have the lease of this learner?

    If not, the syncer is not to take the shards that it would lease for read. Only a plain table is known not to.
    """
    lease = _leases.get((plugin.syncer, plugin.learner_id))
    if lease is None:
        return
    lease.is_read = type(dataset) is not datasets.Dataset
    if not lease.is_read:
        warnings.warn(
            "the training set is not what shard_dataset gave, but a selection of its rows or another order of them: "
            "this learner keeps them for good, and shards without a learner are left unread. Call shard_dataset last, "
            "on what goes to Trainer or to the DataLoader.",
            DiLoCoWarning,
            stacklevel=3,
        )


def lease_for(plugin: DiLoCoPlugin, num_shards: int) -> ShardLease:
    """The lease of this learner; a new one on its home shard if it has none over so many shards."""
    assert plugin.learner_id is not None  # DiLoCoPlugin has checked: there is a syncer
    lease = _leases.get((plugin.syncer, plugin.learner_id))
    if lease is None or lease.num_shards != num_shards:
        lease = ShardLease(num_shards, plugin.learner_id % num_shards)
        _leases[plugin.syncer, plugin.learner_id] = lease
    return lease
