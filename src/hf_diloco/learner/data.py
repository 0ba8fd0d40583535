"""Give each learner its own shard of the training set, in its own order."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping
from typing import Any, cast

import datasets
from datasets.distributed import split_dataset_by_node
from torch.utils.data import Dataset, IterableDataset, Subset

from hf_diloco.config import DiLoCoPlugin
from hf_diloco.errors import ConfigError, DiLoCoWarning, UnsupportedError
from hf_diloco.learner.lease import ShardLease, lease_for


def shard_dataset(
    dataset: Any, *, num_shards: int | None = None, shard: int | None = None, plugin: DiLoCoPlugin | None = None
) -> Any:
    """The shard of a training set that this learner reads; the shards are disjoint and cover it.

    Call it before the dataset goes to Trainer or to a DataLoader, which then split the shard over the learner's own
    ranks. Without a syncer (and without ``shard``) the dataset is returned as it is. A map-style dataset keeps its
    shard; of an iterable one each pass may read another, as the syncer leases them (``docs/data.md``).

    Args:
        dataset: A ``datasets.Dataset`` or a map-style torch dataset (contiguous shards), a
            ``datasets.IterableDataset`` (its files if ``num_shards`` divides their number, else every
            ``num_shards``-th example; if you shuffle it before, use the same seed at all learners), or an iterable
            torch dataset (every ``num_shards``-th example).
        num_shards: Number of shards; equal at all learners. Default: ``HF_DILOCO_NUM_SHARDS``. For an iterable dataset
            at least as large as the number of learners there will ever be; for a map-style one the number of learners,
            since shards that belong to none of them are not read.
        shard: Which shard, for good. Default: the learner's id modulo ``num_shards``, at first.
        plugin: Where the defaults come from. Default: ``DiLoCoPlugin()``, that is, the environment.

    Raises:
        ConfigError: the number of shards is unknown or out of range, or a shard would be empty.
        TypeError: the dataset can neither be indexed nor is iterable as Trainer wants it.
    """
    plugin = plugin or DiLoCoPlugin()
    if shard is None and not plugin.syncer:
        return dataset
    num_shards = plugin.num_shards if num_shards is None else num_shards
    if num_shards is None:
        raise ConfigError(
            "num_shards is not known. Set HF_DILOCO_NUM_SHARDS (or shard_dataset(num_shards=...)) to the same number "
            "at all learners, for instance the number of learners."
        )
    if num_shards < 1:
        raise ConfigError(f"num_shards={num_shards} is out of range; it must be at least 1.")
    if shard is not None and not 0 <= shard < num_shards:
        raise ConfigError(
            f"shard={shard} is out of range; with num_shards={num_shards} it must be 0 to {num_shards - 1}."
        )
    if isinstance(dataset, datasets.IterableDataset | IterableDataset):
        return _leased(dataset, lease_for(plugin, num_shards) if shard is None else ShardLease(num_shards, shard))
    return _take(dataset, num_shards, _home(num_shards, plugin) if shard is None else shard)


def data_seed(seed: int, learner_id: int, from_step: int = 0) -> int:
    """A seed of this learner's own for the order of its data.

    Hashed, since samplers use seed + epoch: with seed + learner_id one learner's second epoch would be another's first.

    Args:
        seed: The training script's.
        learner_id: This learner's number.
        from_step: The run's step at which it begins to read its data anew; another order each time, so that a learner
            that is killed again and again does not train on the same first batches for ever.
    """
    text = f"hf-diloco data order {seed} {learner_id}" + (f" from step {from_step}" if from_step else "")
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % 2**31


def _home(num_shards: int, plugin: DiLoCoPlugin) -> int:
    assert plugin.learner_id is not None  # DiLoCoPlugin has checked: there is a syncer
    if plugin.learner_id >= num_shards:
        warnings.warn(
            f"learner {plugin.learner_id} reads shard {plugin.learner_id % num_shards}, as another learner may: the "
            f"training set is split into num_shards={num_shards}. Set HF_DILOCO_NUM_SHARDS above the largest learner "
            "id, at all learners, before the run starts.",
            DiLoCoWarning,
            stacklevel=3,
        )
    return plugin.learner_id % num_shards


def _leased(dataset: Any, lease: ShardLease) -> Any:
    try:
        from hf_diloco.learner.streams import ShardOfStream, shard_of_iterable
    except ImportError as error:
        raise UnsupportedError(
            f"datasets {datasets.__version__} reads its sources in a way that shard_dataset does not know ({error}). "
            "Install a version of datasets that hf-diloco was tested with (constraints.txt)."
        ) from error
    if isinstance(dataset, datasets.IterableDataset):
        return shard_of_iterable(dataset, lease)
    return ShardOfStream(dataset, lease)


def _take(dataset: Any, num_shards: int, shard: int) -> Any:
    if isinstance(dataset, Mapping):
        names = ", ".join(map(str, list(dataset)[:4]))
        raise TypeError(
            f"shard_dataset takes one dataset, got {type(dataset).__name__} with {names}; pass one of them."
        )
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise TypeError(
            f"shard_dataset cannot split a {type(dataset).__name__}: it needs a datasets.Dataset, a "
            "datasets.IterableDataset, a torch IterableDataset, or a map-style dataset with __len__ and __getitem__. "
            "Let your dataset read its own part instead: DiLoCoPlugin().learner_id of num_shards."
        )
    size = len(dataset)
    if size < num_shards:
        raise ConfigError(
            f"the training set has {size} examples, fewer than num_shards={num_shards}: some learners would have "
            "nothing to read. Lower num_shards (HF_DILOCO_NUM_SHARDS) or use more data."
        )
    if isinstance(dataset, datasets.Dataset):
        return split_dataset_by_node(dataset, rank=shard, world_size=num_shards)
    share, extra = divmod(size, num_shards)
    first = shard * share + min(shard, extra)
    return Subset(cast(Dataset[Any], dataset), range(first, first + share + (shard < extra)))
