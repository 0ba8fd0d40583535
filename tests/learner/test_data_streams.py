"""Shards of iterable data sets: disjoint and covering at every pass, wherever they are read, and moved by the lease."""

import gc
import json
import pickle
from itertools import chain

import datasets
import pytest
import torch
from torch.utils.data import DataLoader

from hf_diloco.config import DiLoCoPlugin
from hf_diloco.learner.data import shard_dataset
from hf_diloco.learner.lease import lease_of

pytestmark = pytest.mark.fast

NUM_FILES, NUM_ROWS = 6, 7
ALL = list(range(NUM_FILES * NUM_ROWS))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    for index in range(NUM_FILES):
        rows = range(index * NUM_ROWS, (index + 1) * NUM_ROWS)
        (folder / f"{index}.jsonl").write_text("".join(json.dumps({"x": row}) + "\n" for row in rows))
    return [str(folder / f"{index}.jsonl") for index in range(NUM_FILES)]


def stream(files):
    return datasets.load_dataset("json", data_files=files, split="train", streaming=True)


def plugin(learner_id, num_shards):
    return DiLoCoPlugin(syncer="streams:1", learner_id=learner_id, num_shards=num_shards)


def read(dataset, epoch=0, **loader):
    if epoch and hasattr(dataset, "set_epoch"):
        dataset.set_epoch(epoch)  # as Trainer and Accelerate do
    if not loader:
        return [item["x"] for item in dataset]
    return [int(x) for batch in DataLoader(dataset, batch_size=2, **loader) for x in batch["x"]]


@pytest.mark.parametrize("num_shards", [2, 3, 6, 4])
def test_learners_at_different_passes_do_not_meet(files, num_shards):
    """4 shards of 6 files: by example. The order of the files changes with the epoch, the shards must not."""
    parts = [
        read(shard_dataset(stream(files), plugin=plugin(learner_id, num_shards)), epoch=learner_id)
        for learner_id in range(num_shards)
    ]
    assert sorted(chain(*parts)) == ALL
    again = read(shard_dataset(stream(files), plugin=plugin(1, num_shards)), epoch=7)
    assert sorted(again) == sorted(parts[1])


@pytest.mark.parametrize("num_shards", [3, 4])
def test_shuffled_before_or_after_and_mapped(files, num_shards):
    def make(learner_id):
        before = stream(files).shuffle(seed=1, buffer_size=10)
        part = shard_dataset(before, plugin=plugin(learner_id, num_shards))
        return part.map(lambda row: {"x": row["x"], "y": -row["x"]}).shuffle(seed=learner_id, buffer_size=5)

    parts = [make(learner_id) for learner_id in range(num_shards)]
    for epoch in (0, 1, 5):
        assert sorted(chain(*(read(part, epoch + index) for index, part in enumerate(parts)))) == ALL
    assert all(row["y"] == -row["x"] for row in parts[0])


@pytest.mark.parametrize("num_shards", [3, 4])
def test_the_next_pass_reads_the_shard_that_the_lease_has_moved_to(files, num_shards):
    dataset = shard_dataset(stream(files), plugin=plugin(0, num_shards)).map(lambda row: row)
    lease = lease_of(plugin(0, num_shards))
    seen = []
    for shard in range(num_shards):
        lease.move(shard)
        seen.append(read(dataset, epoch=shard))
    assert sorted(chain(*seen)) == ALL
    lease.move(0)
    iterator = iter(dataset)
    first = next(iterator)["x"]
    lease.move(1)  # in mid-pass: the pass goes on where it is
    assert sorted([first, *(row["x"] for row in iterator)]) == sorted(seen[0])


@pytest.mark.parametrize("num_shards", [3, 4])
@pytest.mark.parametrize("persistent", [False, True])
def test_workers_read_the_leased_shard_once(files, num_shards, persistent):
    dataset = shard_dataset(stream(files), plugin=plugin(0, num_shards))
    lease = lease_of(plugin(0, num_shards))
    loader = DataLoader(dataset, batch_size=2, num_workers=2, persistent_workers=persistent)
    seen = []
    for shard in range(num_shards):
        lease.move(shard)
        seen.append([int(x) for batch in loader for x in batch["x"]])
    assert sorted(chain(*seen)) == ALL


def test_ranks_split_what_their_learner_reads(files):
    dataset = shard_dataset(stream(files), plugin=plugin(1, 3))
    ranks = [datasets.distributed.split_dataset_by_node(dataset, rank=rank, world_size=2) for rank in range(2)]
    before = [read(rank) for rank in ranks]
    assert sorted(chain(*before)) == sorted(read(dataset))
    lease_of(plugin(1, 3)).move(2)
    assert not set(chain(*(read(rank) for rank in ranks))) & set(chain(*before))


def test_a_torch_stream_moves_too():
    class Numbers(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter({"x": x} for x in ALL)

    dataset = shard_dataset(Numbers(), plugin=plugin(2, 4))
    seen = [read(dataset)]
    for shard in (3, 0, 1):
        lease_of(plugin(2, 4)).move(shard)
        seen.append(read(dataset))
    assert seen[0] == ALL[2::4]
    assert sorted(chain(*seen)) == ALL


def test_the_state_of_a_pass_can_be_taken_up(files):
    dataset = shard_dataset(stream(files), plugin=plugin(0, 3))
    iterator = iter(dataset)
    begun = [next(iterator)["x"] for _ in range(9)]
    state = dataset.state_dict()
    other = shard_dataset(stream(files), num_shards=3, shard=0)
    other.load_state_dict(state)
    assert begun + read(other) == read(shard_dataset(stream(files), num_shards=3, shard=0))


def test_the_lease_lives_as_long_as_its_data_sets(files):
    one = shard_dataset(stream(files), plugin=plugin(7, 3))
    two = shard_dataset(stream(files), plugin=plugin(7, 3))
    lease_of(plugin(7, 3)).move(2)
    assert read(one) == read(two)
    assert read(pickle.loads(pickle.dumps(one))) == read(one)
    del one, two
    gc.collect()
    assert lease_of(plugin(7, 3)) is None
    assert read(shard_dataset(stream(files), plugin=plugin(7, 3))) == read(
        shard_dataset(stream(files), num_shards=3, shard=1)
    )
