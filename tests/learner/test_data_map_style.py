"""Shards of map-style data sets: equally long, covering, moved by the lease; and what `datasets` makes of them."""

import copy
import gc
import multiprocessing
import pickle
from itertools import chain

import datasets
import pytest
import torch
from torch.utils.data import DataLoader

from hf_diloco.config import DiLoCoPlugin
from hf_diloco.errors import ConfigError, UnsupportedError
from hf_diloco.learner import data
from hf_diloco.learner.data import shard_dataset
from hf_diloco.learner.lease import lease_of

pytestmark = [
    pytest.mark.fast,
    pytest.mark.filterwarnings("ignore:Specifying null_placement:FutureWarning"),  # of datasets' sort, by pyarrow
]

SIZE = 23
ALL = list(range(SIZE))
KINDS = ["table", "rows of a table", "list", "torch"]


def plugin(learner_id, num_shards):
    return DiLoCoPlugin(syncer="map-style:1", learner_id=learner_id, num_shards=num_shards)


class Batches(torch.utils.data.Dataset):
    """Remembers in what portions it was read."""

    def __init__(self):
        self.portions = []

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        raise AssertionError("a batch is read at once")

    def __getitems__(self, indices):
        self.portions.append(list(indices))
        return [{"x": index} for index in indices]


def table():
    return datasets.Dataset.from_dict({"x": ALL, "name": [f"n{x}" for x in ALL]})


def make(kind):
    if kind == "list":
        return [{"x": x} for x in ALL]
    if kind == "torch":
        return torch.utils.data.StackDataset(x=torch.arange(SIZE))
    if kind == "table":
        return table()
    return datasets.concatenate_datasets([table(), table()]).select([*range(SIZE - 1, -1, -1)])


def read(dataset, **loader):
    if loader:
        return [int(x) for batch in DataLoader(dataset, **{"batch_size": 4, **loader}) for x in batch["x"]]
    return [int(example["x"]) for example in dataset]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_shards", [1, 4, 23])
def test_shards_are_equally_long_and_cover(kind, num_shards):
    parts = [shard_dataset(make(kind), plugin=plugin(index, num_shards)) for index in range(num_shards)]
    length = -(-SIZE // num_shards)
    assert {len(part) for part in parts} == {length}
    shards = [read(part) for part in parts]
    own = [shard[:-1] if shard[-1] == shard[0] and length > 1 else shard for shard in shards]
    assert sorted(chain(*own)) == ALL
    assert all(len(shard) == length for shard in shards)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workers", [0, 2])
def test_the_next_pass_reads_the_shard_that_the_lease_has_moved_to(kind, workers):
    dataset = shard_dataset(make(kind), plugin=plugin(0, 3))
    loader = DataLoader(
        dataset, batch_size=2, shuffle=True, num_workers=workers, persistent_workers=workers > 0
    )  # prefetches
    seen = []
    for shard in range(3):
        lease_of(plugin(0, 3)).move(shard)
        seen.append([int(x) for batch in loader for x in batch["x"]])
        assert sorted(seen[-1]) == sorted(read(dataset))
    assert [len(one) for one in seen] == [8, 8, 8]
    assert {*chain(*seen)} == {*ALL}


@pytest.mark.long  # each worker imports torch
def test_workers_that_are_spawned_see_the_lease_move():
    for kind in ("table", "torch"):
        dataset = shard_dataset(make(kind), plugin=plugin(0, 3))
        context = multiprocessing.get_context("spawn")
        loader = DataLoader(
            dataset, batch_size=4, num_workers=1, persistent_workers=True, multiprocessing_context=context
        )
        seen = []
        for shard in range(3):
            lease_of(plugin(0, 3)).move(shard)
            seen.append([int(x) for batch in loader for x in batch["x"]])
        assert seen == [[*range(8)], [*range(8, 16)], [*range(16, 23), 16]]
        del loader


def test_a_torch_data_set_is_indexed_as_a_list_and_read_in_batches():
    inner = Batches()
    dataset = shard_dataset(inner, plugin=plugin(2, 3))
    assert read(dataset, batch_size=3) == [*range(16, 23), 16]
    assert inner.portions == [[16, 17, 18], [19, 20, 21], [22, 16]]
    numbers = shard_dataset(ALL, plugin=plugin(2, 3))
    assert numbers[-1] == numbers[7] == numbers[0] == 16
    for index in (8, -9):
        with pytest.raises(IndexError):
            numbers[index]


# -------------------------------------------------------------------------------------------- what datasets makes of it


CHANGES = {
    "drop a column": lambda dataset: dataset.remove_columns("name"),
    "keep a column": lambda dataset: dataset.select_columns(["x"]),
    "rename a column": lambda dataset: dataset.rename_column("name", "y"),
    "cast a column": lambda dataset: dataset.cast_column("x", datasets.Value("int32")),
    "format": lambda dataset: dataset.with_format("torch"),
    "transform": lambda dataset: dataset.with_transform(lambda batch: {"x": batch["x"]}),
    "copy": copy.copy,
    "deep copy": copy.deepcopy,
    "map": lambda dataset: dataset.map(lambda row: {"y": -row["x"]}),
    "map an empty function": lambda dataset: dataset.map(),
    "map in processes": lambda dataset: dataset.map(lambda row: {"y": -row["x"]}, num_proc=2),
    "map arrow": lambda dataset: dataset.with_format("arrow").map(lambda rows: rows, batched=True).with_format(None),
    "filter": lambda dataset: dataset.filter(lambda row: row["x"] >= 0),
    "class labels": lambda dataset: dataset.class_encode_column("name"),
    "again": lambda dataset: shard_dataset(dataset, plugin=plugin(0, 3)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_keeps_the_lease(change):
    before = shard_dataset(make("rows of a table"), plugin=plugin(0, 3))
    shards = []
    for shard in range(3):
        lease_of(plugin(0, 3)).move(shard)
        shards.append(read(before))
    lease_of(plugin(0, 3)).move(1)
    after = CHANGES[change](before)
    assert isinstance(after, datasets.Dataset)
    del before
    assert len(after) == 8
    for shard in (0, 2, 1):
        lease_of(plugin(0, 3)).move(shard)
        assert read(after) == [int(x) for x in after["x"]] == shards[shard]
        assert [int(row["x"]) for row in after.__getitems__([7, 0])] == [shards[shard][7], shards[shard][0]]


SELECTIONS = {
    "select": lambda dataset: dataset.select(range(8)),
    "select in another order": lambda dataset: dataset.select([7, 6, 5, 4, 3, 2, 1, 0]),
    "shuffle": lambda dataset: dataset.shuffle(seed=1),
    "sort": lambda dataset: dataset.sort("x", reverse=True),
    "split": lambda dataset: dataset.train_test_split(test_size=1, seed=0)["train"],
    "flatten": lambda dataset: dataset.flatten_indices(),
    "add a column": lambda dataset: dataset.add_column("z", [*range(8)]),
    "concatenate": lambda dataset: datasets.concatenate_datasets([dataset]),
    "beside another": lambda dataset: datasets.concatenate_datasets(
        [dataset.select_columns(["x"]), dataset.select_columns(["name"])], axis=1
    ),
    "part of it": lambda dataset: datasets.distributed.split_dataset_by_node(dataset, rank=0, world_size=1),
}


@pytest.mark.parametrize("selection", SELECTIONS)
def test_what_keeps_the_shard_that_is_held(selection):
    before = shard_dataset(table(), plugin=plugin(1, 3))
    selected = SELECTIONS[selection](before)
    assert type(selected) is datasets.Dataset
    found = read(selected)
    assert {*found} <= {*range(8, 16)}
    assert len(found) == (7 if selection == "split" else 8)
    lease_of(plugin(1, 3)).move(0)
    assert read(selected) == found
    assert read(before) == [*range(8)]


def test_what_is_done_with_all_shards_is_done_with_all():
    seen = []
    dataset = shard_dataset(table(), plugin=plugin(1, 3))
    even = dataset.filter(lambda row: seen.append(row["x"]) or row["x"] % 2 == 0)
    assert seen == ALL
    assert read(even) == [8, 10, 12, 14]
    assert read(even.map(lambda rows: {"x": [x for x in rows["x"] if x]}, batched=True, remove_columns="name")) == [
        10, 12, 14, 16,
    ]  # fmt: skip
    assert sorted(dataset.unique("x")) == ALL
    with pytest.raises(ConfigError, match="2 examples, fewer than num_shards=3"):
        dataset.filter(lambda row: row["x"] < 2)


BY_NUMBER = {
    "map": lambda dataset: dataset.map(lambda row, index: {"y": index}, with_indices=True),
    "map by position": lambda dataset: dataset.map(lambda row, index: {"y": index}, True),
    "filter": lambda dataset: dataset.filter(lambda row, index: index < 5, with_indices=True),
    "filter by position": lambda dataset: dataset.filter(lambda row, index: index < 5, True),
    "batch by column": lambda dataset: dataset.batch(by_column="x"),
}


@pytest.mark.parametrize("way", BY_NUMBER)
def test_row_numbers_of_other_shards_are_refused(way):
    with pytest.raises(
        ConfigError, match=r"with_indices=True.*before shard_dataset.*shard=DiLoCoPlugin\(\).learner_id"
    ):
        BY_NUMBER[way](shard_dataset(table(), plugin=plugin(1, 3)))
    BY_NUMBER[way](shard_dataset(table(), plugin=plugin(1, 1)))  # the only shard has all rows


@pytest.mark.parametrize(("learner_id", "shard"), [("1", range(8, 16)), (None, range(SIZE))])
def test_values_for_the_rows_of_one_shard(monkeypatch, learner_id, shard):
    """As trainers do with what they work out before training; the same line serves a script that runs alone."""
    if learner_id:
        for name, value in {"SYNCER": "map-style:1", "LEARNER_ID": learner_id, "NUM_SHARDS": "3"}.items():
            monkeypatch.setenv(f"HF_DILOCO_{name}", value)
    dataset = shard_dataset(table(), shard=DiLoCoPlugin().learner_id)
    values = [-row["x"] for row in dataset]
    assert dataset.map(lambda row, index: {"y": values[index]}, with_indices=True)["y"] == [-x for x in shard]


def test_learners_with_one_cache_do_not_get_each_others_shards(tmp_path):
    table().save_to_disk(tmp_path / "data")

    def learner(learner_id):
        dataset = shard_dataset(datasets.load_from_disk(tmp_path / "data"), plugin=plugin(learner_id, 3))
        assert dataset.cache_files
        mapped = dataset.with_format("numpy").map(lambda row: {"y": -row["x"]})
        return [read(one) for one in (mapped, mapped.shuffle(seed=1), dataset.shuffle(seed=2), dataset.sort("x"))]

    first = [learner(learner_id) for learner_id in range(3)]
    files = set(tmp_path.rglob("cache-*"))
    assert files
    again = [learner(learner_id) for learner_id in range(3)]
    assert set(tmp_path.rglob("cache-*")) == files, "the second time all is in the cache"
    assert first == again
    for learner_id in range(3):
        for found in first[learner_id]:
            assert {*found} == {*ALL[learner_id * 8 : learner_id * 8 + 8]}


def test_it_can_be_saved_and_pickled(tmp_path):
    dataset = shard_dataset(table(), plugin=plugin(2, 3))
    dataset.save_to_disk(tmp_path / "saved")
    dataset.to_parquet(tmp_path / "saved.parquet")
    for found in (
        datasets.load_from_disk(tmp_path / "saved"),
        datasets.Dataset.from_parquet(str(tmp_path / "saved.parquet"), cache_dir=tmp_path),
        pickle.loads(pickle.dumps(dataset)),
        dataset.to_iterable_dataset(),
    ):
        assert read(found) == [*range(16, 23), 16]


def test_the_original_is_left_alone():
    original = table()
    fingerprint = original._fingerprint
    dataset = shard_dataset(original, plugin=plugin(0, 3))
    dataset.set_format("torch")
    dataset.set_transform(lambda batch: {"x": [0] * len(batch["x"])})
    assert read(original) == ALL
    assert original._fingerprint == fingerprint
    assert read(dataset) == [0] * 8


def test_the_lease_lives_as_long_as_its_data_sets():
    for kind in KINDS:
        dataset = shard_dataset(make(kind), plugin=plugin(7, 3))
        assert lease_of(plugin(7, 3)).shard == 1
        del dataset
        gc.collect()
        assert lease_of(plugin(7, 3)) is None


def test_an_unknown_version_of_datasets_is_refused(monkeypatch):
    monkeypatch.setattr(data, "PRIVATE_NAMES", ("_data", "_rows_as_they_may_be_called_one_day"))
    with pytest.raises(UnsupportedError, match=r"datasets .*without _rows_as.*constraints\.txt"):
        shard_dataset(table(), plugin=plugin(0, 3))
