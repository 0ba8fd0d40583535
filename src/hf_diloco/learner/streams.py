"""One shard of an iterable data set; which one, is looked up when a pass begins.

``datasets`` has no public way to say at the beginning of a pass what is to be read, so two of its private names are
used here: a data set's source of examples (``_ex_iterable``) and the base class of such sources. A shard is selected
before anything is shuffled: ``split_dataset_by_node`` selects after the order of the files was shuffled by the epoch,
which differs between learners, so that they would read each other's files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from operator import methodcaller
from typing import Any

import datasets
import torch
from datasets.iterable_dataset import StepExamplesIterable, _BaseExamplesIterable

from hf_diloco.learner.lease import ShardLease


def shard_of_iterable(dataset: datasets.IterableDataset, lease: ShardLease) -> datasets.IterableDataset:
    """The leased shard of a ``datasets.IterableDataset``, as another one.

    Whole files, if they can be dealt out evenly; else every ``num_shards``-th example, in an order that stays the same
    from pass to pass.
    """
    source = dataset._ex_iterable
    is_by_files = source.num_shards % lease.num_shards == 0
    leased = _LeasedDataset(
        _Files(source, lease) if is_by_files else _Examples(source, lease),
        info=dataset._info.copy(),
        split=dataset._split,
        formatting=dataset._formatting,
        distributed=dataset._distributed,
        token_per_repo_id=dataset._token_per_repo_id,
    )
    leased.lease = lease
    return leased


class _LeasedDataset(datasets.IterableDataset):  # type: ignore[misc]
    """Its epochs go on where they were before an interruption: the order of a pass depends on its epoch."""

    lease: ShardLease

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch + self.lease.first_epoch)


class ShardOfStream(torch.utils.data.IterableDataset[Any]):
    """Every ``num_shards``-th example of an iterable torch data set, which must yield the same ones at all learners."""

    def __init__(self, dataset: torch.utils.data.IterableDataset[Any], lease: ShardLease) -> None:
        self.dataset, self.lease = dataset, lease

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.dataset), self.lease.shard, None, self.lease.num_shards)


class _Leased(_BaseExamplesIterable):  # type: ignore[misc]
    """What ``datasets`` asks of a source of examples, answered by the source that is selected as a pass begins."""

    _selected: Any = None

    def _select(self) -> Any:
        raise NotImplementedError

    def _init_state_dict(self) -> dict[str, Any]:  # called as each pass begins
        self._selected = self._select()
        self._state_dict = {"examples_iterable": self._selected._init_state_dict(), "type": type(self).__name__}
        return self._state_dict

    def __iter__(self) -> Iterator[tuple[Any, dict[str, Any]]]:
        return iter(self._selected if self._selected is not None else self._select())

    @property
    def iter_arrow(self) -> Callable[[], Iterator[tuple[Any, Any]]] | None:
        selected = self._selected if self._selected is not None else self._select()
        return selected.iter_arrow  # type: ignore[no-any-return]

    @property
    def is_typed(self) -> bool:
        return self._select().is_typed  # type: ignore[no-any-return]

    @property
    def features(self) -> datasets.Features | None:
        return self._select().features

    @property
    def num_shards(self) -> int:
        return self._select().num_shards  # type: ignore[no-any-return]

    @property
    def sleep_on_threads_shutdown(self) -> bool:
        return self._select().sleep_on_threads_shutdown  # type: ignore[no-any-return]

    def reshard_data_sources(self) -> _Leased:
        return self


class _Files(_Leased):
    """The files of the leased shard, and then what was asked for: shuffled, split over ranks and workers."""

    def __init__(self, ex_iterable: Any, lease: ShardLease, then: tuple[Callable[[Any], Any], ...] = ()) -> None:
        super().__init__()
        self.ex_iterable, self._lease, self._then = ex_iterable, lease, then  # datasets looks for `ex_iterable`

    def _select(self) -> Any:
        source = self.ex_iterable.shard_data_sources(self._lease.num_shards, self._lease.shard, contiguous=False)
        for operation in self._then:
            source = operation(source)
        return source

    def shuffle_data_sources(self, generator: Any) -> _Files:
        return self._and(methodcaller("shuffle_data_sources", generator))

    def shard_data_sources(self, num_shards: int, index: int, contiguous: bool = True) -> _Files:
        return self._and(methodcaller("shard_data_sources", num_shards, index, contiguous=contiguous))

    def _and(self, operation: Callable[[Any], Any]) -> _Files:
        return _Files(self.ex_iterable, self._lease, (*self._then, operation))


class _Examples(_Leased):
    """Every ``num_shards``-th example, in one piece: with other orders or workers at other learners they would meet."""

    def __init__(self, whole: Any, lease: ShardLease) -> None:
        super().__init__()
        self._whole, self._lease = whole, lease  # not `ex_iterable`: datasets would give that another seed

    def _select(self) -> Any:
        return StepExamplesIterable(self._whole, step=self._lease.num_shards, offset=self._lease.shard)

    @property
    def num_shards(self) -> int:
        return 1

    def shuffle_data_sources(self, generator: Any) -> _Examples:
        return self

    def shard_data_sources(self, num_shards: int, index: int, contiguous: bool = True) -> _Examples:
        return self
