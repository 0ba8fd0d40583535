"""One shard of a map-style data set; which one, is looked up as each example is read, and changes between passes only.

All shards are equally long: Trainer takes the number of steps, the sampler and the place to resume at from the length,
once, before the learner has joined. A shard that would be one example shorter than others ends with its first again.

``datasets`` has no public way to read other rows of a table from some time on, so private names of it are used here
(``PRIVATE_NAMES``): a data set's table, the rows of it that the data set is made of (None: all), and what its content
is called in caches.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import torch
from datasets.table import InMemoryTable

from hf_diloco.errors import ConfigError
from hf_diloco.learner.lease import ShardLease

PRIVATE_NAMES = ("_data", "_indices", "_fingerprint")


def check_size(size: int, num_shards: int) -> None:
    """A data set has something for each shard.

    Raises:
        ConfigError: it has not.
    """
    if size < num_shards:
        raise ConfigError(
            f"the training set has {size} examples, fewer than num_shards={num_shards}: some learners would have "
            "nothing to read. Lower num_shards (HF_DILOCO_NUM_SHARDS) or use more data."
        )


def shard_of_examples(size: int, num_shards: int, shard: int) -> range:
    """The examples of a shard: contiguous, and as many as of the others, or one more."""
    share, extra = divmod(size, num_shards)
    first = shard * share + min(shard, extra)
    return range(first, first + share + (shard < extra))


def _num_examples(size: int, num_shards: int) -> int:
    """Of the longest shard, and as seen from outside of each."""
    return -(-size // num_shards)


class LeasedExamples(torch.utils.data.Dataset[Any]):
    """The leased shard of a map-style torch data set."""

    def __init__(self, dataset: Any, lease: ShardLease) -> None:
        self.dataset, self.lease = dataset, lease
        self._size = len(dataset)
        check_size(self._size, lease.num_shards)

    def __len__(self) -> int:
        return _num_examples(self._size, self.lease.num_shards)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[self._place(index)]

    def __getitems__(self, indices: Sequence[int]) -> Sequence[Any]:
        places = [self._place(index) for index in indices]
        read = getattr(self.dataset, "__getitems__", None)
        return read(places) if callable(read) else [self.dataset[place] for place in places]

    def _place(self, index: int) -> int:
        examples = shard_of_examples(self._size, self.lease.num_shards, self.lease.shard)
        return examples[range(len(self))[index] % len(examples)]


def leased_table(dataset: datasets.Dataset, lease: ShardLease) -> LeasedTable:
    """The leased shard of a ``datasets.Dataset``, as another one."""
    check_size(dataset.num_rows, lease.num_shards)
    same = copy.deepcopy(dataset)  # but for its tables, which are not copied; it deletes its attributes when it goes
    leased = LeasedTable.__new__(LeasedTable)
    leased.__setstate__({**same.__dict__, "lease": lease})
    return leased


class LeasedTable(datasets.Dataset):  # type: ignore[misc]
    """A data set that keeps its whole table and reads the rows of the leased shard.

    What changes columns or the format copies the table's state, and so keeps the lease. ``map`` and ``filter`` work on
    all shards and keep it, too. What selects or orders rows makes a plain data set of the shard that is held then.
    """

    lease: ShardLease
    _rows: tuple[int, Any] | None = None  # those of the shard that was read last

    @property
    def _indices(self) -> Any:
        shard = self.lease.shard
        if self._rows is None or self._rows[0] != shard:
            self._rows = shard, self._rows_of(shard)
        return self._rows[1]

    @property
    def _fingerprint(self) -> str:
        # Files of a cache are named after it: those of one shard must not be taken for another's.
        return f"{self.__dict__['_fingerprint']}-shard-{self.lease.shard}-of-{self.lease.num_shards}"

    @_fingerprint.setter
    def _fingerprint(self, fingerprint: str) -> None:
        self.__dict__["_fingerprint"] = fingerprint

    def __del__(self) -> None:  # as datasets has it, of what this object itself holds
        for name in ("_data", "_indices", "_rows"):
            self.__dict__.pop(name, None)

    def map(self, function: Any = None, with_indices: bool = False, *args: Any, **kwargs: Any) -> LeasedTable:
        """As of all shards, of which the result has the leased one."""
        self._check_indices("map", with_indices)
        return leased_table(self._whole().map(function, with_indices, *args, **kwargs), self.lease)

    def filter(self, function: Any = None, with_indices: bool = False, *args: Any, **kwargs: Any) -> LeasedTable:
        """As of all shards, of which the result has the leased one."""
        self._check_indices("filter", with_indices)
        return leased_table(self._whole().filter(function, with_indices, *args, **kwargs), self.lease)

    def unique(self, column: str) -> Any:
        """As of all shards: ``class_encode_column`` numbers with it what it maps."""
        return self._whole().unique(column)

    def flatten_indices(self, *args: Any, **kwargs: Any) -> datasets.Dataset:
        """As a plain data set."""
        return self._plain(self._indices, self._fingerprint).flatten_indices(*args, **kwargs)

    def _check_indices(self, method: str, with_indices: bool) -> None:
        """Row numbers would be those of all shards; whoever asks for them has seen the rows of one."""
        if with_indices and self.lease.num_shards > 1:
            raise ConfigError(
                f"{method}(with_indices=True) on what shard_dataset gave: its row numbers would be those of the whole "
                "data set, not of the shard that this learner holds. Number the rows before shard_dataset and use that "
                "column, or keep one shard for good: shard_dataset(dataset, shard=DiLoCoPlugin().learner_id), at all "
                "learners, with num_shards above every learner_id. Trainers that work values out for all rows first "
                "(precompute_ref_log_probs=True of TRL's DPO and KTO) need the latter."
            )

    def _whole(self) -> datasets.Dataset:
        return self._plain(self.__dict__["_indices"], self.__dict__["_fingerprint"])

    def _plain(self, rows: Any, fingerprint: str) -> datasets.Dataset:
        state = {name: value for name, value in self.__dict__.items() if name not in ("lease", "_rows")}
        plain = datasets.Dataset.__new__(datasets.Dataset)
        plain.__setstate__({**state, "_indices": rows, "_fingerprint": fingerprint})
        return plain

    def _rows_of(self, shard: int) -> Any:
        whole = self.__dict__["_indices"]
        size, num_shards = (self._data if whole is None else whole).num_rows, self.lease.num_shards
        examples = shard_of_examples(size, num_shards, shard)
        places = np.arange(examples.start, examples.stop, dtype=np.uint64)
        rows = pa.array(np.resize(places, _num_examples(size, num_shards)))
        return InMemoryTable.from_arrays([rows if whole is None else whole.column(0).take(rows)], names=["indices"])
