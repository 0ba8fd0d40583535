"""Parts of a training set: disjoint, covering, and an order of its own for each learner."""

import datasets
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

from hf_diloco.config import DiLoCoPlugin
from hf_diloco.errors import ConfigError
from hf_diloco.learner.data import data_seed, shard_dataset

pytestmark = pytest.mark.fast


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch):
    for name in ("SYNCER", "LEARNER_ID", "NUM_SHARDS"):
        monkeypatch.delenv(f"HF_DILOCO_{name}", raising=False)


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, size):
        self.size = size

    def __iter__(self):
        return iter(range(self.size))


def make(kind, size=23):
    if kind == "stream":
        return Stream(size)
    if kind == "list":
        return list(range(size))
    if kind == "torch":
        return TensorDataset(torch.arange(size))
    table = datasets.Dataset.from_dict({"x": list(range(size))})
    return table if kind == "map" else table.to_iterable_dataset(num_shards=int(kind))


def values(dataset):
    return [int(item["x"] if isinstance(item, dict) else item[0] if isinstance(item, tuple) else item)
            for item in dataset]  # fmt: skip


@pytest.mark.parametrize("kind", ["list", "torch", "map", "stream", "1", "4", "5"])
@pytest.mark.parametrize("num_shards", [1, 2, 4, 7])
def test_parts_are_disjoint_and_cover(kind, num_shards):
    parts = [values(shard_dataset(make(kind), num_shards=num_shards, shard=index)) for index in range(num_shards)]
    assert all(parts)
    assert sorted(value for part in parts for value in part) == list(range(23))


@given(size=st.integers(1, 60), num_shards=st.integers(1, 60))
@settings(max_examples=60, deadline=None)
def test_parts_are_even_or_refused(size, num_shards):
    if size < num_shards:
        with pytest.raises(ConfigError, match=f"{size} examples, fewer than num_shards={num_shards}.*Lower num_shards"):
            shard_dataset(list(range(size)), num_shards=num_shards, shard=0)
        return
    parts = [values(shard_dataset(list(range(size)), num_shards=num_shards, shard=i)) for i in range(num_shards)]
    assert sorted(value for part in parts for value in part) == list(range(size))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_without_a_syncer_the_dataset_is_as_it_was():
    dataset = make("map")
    assert shard_dataset(dataset) is dataset
    assert shard_dataset(dataset, num_shards=3) is dataset


def test_the_environment_says_which_part(monkeypatch):
    monkeypatch.setenv("HF_DILOCO_SYNCER", "localhost:29600")
    monkeypatch.setenv("HF_DILOCO_LEARNER_ID", "1")
    with pytest.raises(ConfigError, match="Set HF_DILOCO_NUM_SHARDS"):
        shard_dataset(make("map"))
    monkeypatch.setenv("HF_DILOCO_NUM_SHARDS", "2")
    assert values(shard_dataset(make("map"))) == [*range(12, 23), 12], "as long as the other part"
    assert values(shard_dataset(make("map"), num_shards=3)) == list(range(8, 16))


def test_more_learners_than_parts_share():
    plugin = DiLoCoPlugin(syncer="localhost:29600", learner_id=4, num_shards=2)
    assert values(shard_dataset(make("map"), plugin=plugin)) == list(range(12))


@pytest.mark.parametrize(
    ("num_shards", "shard", "message"), [(0, 0, "at least 1"), (2, 2, "0 to 1"), (2, -1, "0 to 1")]
)
def test_numbers_out_of_range(num_shards, shard, message):
    with pytest.raises(ConfigError, match=message):
        shard_dataset(make("map"), num_shards=num_shards, shard=shard)


@pytest.mark.parametrize("kind", ["list", "torch", "map", "stream", "4"])
def test_a_shard_is_not_split_again(kind):
    plugin = DiLoCoPlugin(syncer="localhost:29600", learner_id=1, num_shards=2)
    dataset = shard_dataset(make(kind), plugin=plugin)
    assert shard_dataset(dataset, plugin=plugin) is dataset
    for options in ({"num_shards": 3}, {"shard": 0}):
        with pytest.raises(ConfigError, match=r"one of 2 shards: .*Call it once, on the whole"):
            shard_dataset(dataset, plugin=plugin, **options)


def test_what_cannot_be_split_is_named():
    with pytest.raises(TypeError, match="cannot split a generator"):
        shard_dataset((number for number in range(3)), num_shards=2, shard=0)
    for text in ("imdb", b"imdb"):
        with pytest.raises(TypeError, match=r"got b?'imdb'; load it first: datasets.load_dataset"):
            shard_dataset(text, num_shards=2, shard=0)
    with pytest.raises(TypeError, match="DatasetDict with train, test"):
        shard_dataset(datasets.DatasetDict(train=make("map"), test=make("map")), num_shards=2, shard=0)


def test_seeds_do_not_meet_in_later_epochs():
    seeds = {data_seed(seed, learner) + epoch for seed in (0, 42) for learner in range(32) for epoch in range(100)}
    assert len(seeds) == 2 * 32 * 100
    assert all(0 <= seed < 2**31 + 100 for seed in seeds)
    assert data_seed(42, 1) == data_seed(42, 1) == 1190202022
