"""Give each learner its own shard of the training set, in its own order."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, cast

import datasets
from datasets.distributed import split_dataset_by_node
from torch.utils.data import Dataset, IterableDataset, Subset

from hf_diloco.config import DiLoCoPlugin
from hf_diloco.errors import ConfigError, UnsupportedError
from hf_diloco.learner.lease import ShardLease, lease_for
from hf_diloco.learner.map_style import PRIVATE_NAMES, LeasedExamples, check_size, leased_table, shard_of_examples


def shard_dataset(
    dataset: Any, *, num_shards: int | None = None, shard: int | None = None, plugin: DiLoCoPlugin | None = None
) -> Any:
    """The shard of a training set that this learner reads; the shards are disjoint and cover it.

    Call it before the dataset goes to Trainer or to a DataLoader, which then split the shard over the learner's own
    ranks. Without a syncer (and without ``shard``) the dataset is returned as it is. Each pass may read another shard,
    as the syncer leases them; what is shuffled before must be shuffled with one seed at all learners
    (``docs/data.md``).

    Args:
        dataset: A ``datasets.Dataset`` or a map-style torch dataset (contiguous shards), a
            ``datasets.IterableDataset`` (its files if ``num_shards`` divides their number, else every
            ``num_shards``-th example), or an iterable torch dataset (every ``num_shards``-th example).
        num_shards: Number of shards; equal at all learners, and at least as large as the number of learners there will
            ever be. Default: ``HF_DILOCO_NUM_SHARDS``.
        shard: Which shard, for good; nobody else knows of it. Default: the learner's id modulo ``num_shards``, at
            first.
        plugin: Where the defaults come from. Default: ``DiLoCoPlugin()``, that is, the environment.

    Raises:
        ConfigError: the number of shards is unknown or out of range, a shard would be empty, or the dataset is one.
        TypeError: the dataset can neither be indexed nor is iterable as Trainer wants it.
        UnsupportedError: this version of datasets is not known.
    """
    plugin = plugin or DiLoCoPlugin()
    if shard is None and not plugin.syncer:
        return dataset
    num_shards = plugin.num_shards if num_shards is None else num_shards
    if num_shards is None:
        raise ConfigError(
            "num_shards is not known. Set HF_DILOCO_NUM_SHARDS (or shard_dataset(num_shards=...)) to the same number "
            "at all learners: at least as many as there will ever be learners."
        )
    if num_shards < 1:
        raise ConfigError(f"num_shards={num_shards} is out of range; it must be at least 1.")
    if shard is not None and not 0 <= shard < num_shards:
        raise ConfigError(
            f"shard={shard} is out of range; with num_shards={num_shards} it must be 0 to {num_shards - 1}."
        )
    if isinstance(earlier := getattr(dataset, "lease", None), ShardLease):  # what it gave before
        if shard is None and earlier.num_shards == num_shards:
            return dataset
        raise ConfigError(
            f"shard_dataset got one of {earlier.num_shards} shards: most of the data would be left unread. Call it "
            "once, on the whole training set."
        )
    is_stream = isinstance(dataset, datasets.IterableDataset | IterableDataset)
    if not is_stream:
        _check_map_style(dataset)
        if shard is not None:
            return _fixed(dataset, num_shards, shard)
    lease = lease_for(plugin, num_shards) if shard is None else ShardLease(num_shards, shard)
    return _leased_stream(dataset, lease) if is_stream else _leased_examples(dataset, lease)


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


def _leased_stream(dataset: Any, lease: ShardLease) -> Any:
    try:
        from hf_diloco.learner.streams import ShardOfStream, shard_of_iterable
    except ImportError as error:
        raise _unknown_version(error) from error
    if isinstance(dataset, datasets.IterableDataset):
        return shard_of_iterable(dataset, lease)
    return ShardOfStream(dataset, lease)


def _leased_examples(dataset: Any, lease: ShardLease) -> Any:
    if not isinstance(dataset, datasets.Dataset):
        return LeasedExamples(dataset, lease)
    if missing := set(PRIVATE_NAMES) - vars(dataset).keys():
        raise _unknown_version(f"a data set without {min(missing)}")
    return leased_table(dataset, lease)


def _unknown_version(reason: object) -> UnsupportedError:
    return UnsupportedError(
        f"datasets {datasets.__version__} reads its sources in a way that shard_dataset does not know ({reason}). "
        "Install a version of datasets that hf-diloco was tested with (constraints.txt)."
    )


def _check_map_style(dataset: Any) -> None:
    if isinstance(dataset, Mapping):
        names = ", ".join(map(str, list(dataset)[:4]))
        raise TypeError(
            f"shard_dataset takes one dataset, got {type(dataset).__name__} with {names}; pass one of them."
        )
    if isinstance(dataset, str | bytes | bytearray):
        raise TypeError(
            f"shard_dataset takes a data set, got {dataset[:80]!r}; load it first: datasets.load_dataset(..., "
            "split='train')."
        )
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise TypeError(
            f"shard_dataset cannot split a {type(dataset).__name__}: it needs a datasets.Dataset, a "
            "datasets.IterableDataset, a torch IterableDataset, or a map-style dataset with __len__ and __getitem__. "
            "Let your dataset read its own part instead: DiLoCoPlugin().learner_id of num_shards."
        )


def _fixed(dataset: Any, num_shards: int, shard: int) -> Any:
    check_size(len(dataset), num_shards)
    if isinstance(dataset, datasets.Dataset):
        return split_dataset_by_node(dataset, rank=shard, world_size=num_shards)
    return Subset(cast(Dataset[Any], dataset), shard_of_examples(len(dataset), num_shards, shard))
