"""Leases over links that fail, with more learners than shards, and over the death of the syncer."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from in_process_world import SECONDS, World
from test_restarts import RestartWorld

from hf_diloco import DiLoCoPlugin
from hf_diloco.errors import DiLoCoWarning, LearnerRefusedError
from hf_diloco.learner.lease import ShardLease, lease_for
from hf_diloco.syncer.saved_run import latest_run

pytestmark = pytest.mark.fast


def lease(learner_id: int, num_shards: int) -> ShardLease:
    """As ``shard_dataset`` makes it; it lives as long as somebody holds it."""
    return lease_for(DiLoCoPlugin(syncer="in-process:1", learner_id=learner_id), num_shards)


def read(
    world: World, leased: ShardLease, learner_id: int, *, passes: int, at: dict[int, Callable[[], None]] | None = None
) -> list[int]:
    """Train for some passes of three steps each, then leave; the shards that were read."""
    learner = world.learner(learner_id, steps=10_000)
    learner.join()
    shards = []
    for number in range(passes):
        shards.append(leased.shard)
        for _ in range(3):
            learner.step(tokens=1)
            threading.Event().wait(0.002)
        if at and number in at:
            at[number]()
        learner.end_pass()
    learner.leave("enough")
    return shards


def test_without_a_link_it_reads_its_own_shard_again(tmp_path: Path) -> None:
    world = World(tmp_path, num_fragments=2, sync_every=4)
    leased = lease(0, 4)
    seen: list[int] = []
    up_again = threading.Event()

    def heal() -> None:
        world.hub.heal(0)
        for _ in range(int(SECONDS / 0.01)):
            if len(world.tape("join")) == 2:
                return
            up_again.wait(0.01)
        raise AssertionError("the link did not come back")

    world.start(lambda: seen.extend(read(world, leased, 0, passes=8, at={1: lambda: world.hub.cut(0), 3: heal})))
    world.join()
    # Cut at the end of the second pass: shard 1 again, and again; then the two that were never read, and on.
    assert seen[:4] == [0, 1, 1, 1]
    assert sorted(seen[4:6]) == [2, 3]
    assert [line["shard"] for line in world.tape("lease")][:3] == [0, 1, 1]


def test_more_learners_than_shards_share_and_are_told(tmp_path: Path) -> None:
    world = World(tmp_path, expected_learners=2, num_fragments=2, sync_every=4)
    leases = [lease(learner_id, 1) for learner_id in (0, 1)]
    caught: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DiLoCoWarning)
        for learner_id in (0, 1):
            world.start(lambda i: caught.append(str(read(world, leases[i], i, passes=4))), learner_id)
        world.join()
    assert caught == ["[0, 0, 0, 0]"] * 2
    said = world.tape("warning")
    assert {tuple(sorted(line["learner_ids"])) for line in said} == {(0, 1)}
    assert len(said) <= 2, "each learner is told once"
    assert all("HF_DILOCO_NUM_SHARDS" in line["text"] for line in said)


def test_another_number_of_shards_is_refused_with_the_remedy(tmp_path: Path) -> None:
    world = World(tmp_path, num_fragments=2, sync_every=4, num_shards=3)
    leased = lease(0, 4)
    with pytest.raises(LearnerRefusedError, match=r"into 4 shards, the run into 3\. Set HF_DILOCO_NUM_SHARDS=3"):
        world.learner(0).join()
    del leased
    world.syncer.stop()
    world.join()


def test_a_syncer_that_comes_back_knows_what_was_read_and_asks_who_reads_what(tmp_path: Path) -> None:
    world = RestartWorld(tmp_path, num_fragments=2, sync_every=2, checkpoint_every_seconds=0.01)
    leased = lease(0, 3)
    seen: list[int] = []

    def restart() -> None:
        known: Any = None
        for _ in range(int(SECONDS / 0.01)):
            known = latest_run(world.directory)
            if known is not None and sum(known.facts.shard_passes) == 4:
                break
            learner_waits.wait(0.01)
        assert known is not None
        assert known.facts.shard_passes == [2, 1, 1]
        world.kill_syncer()
        world.restart_syncer()
        for _ in range(int(SECONDS / 0.01)):
            if len(world.tape("join")) == 2:
                return
            learner_waits.wait(0.01)
        raise AssertionError("the link did not come back")

    learner_waits = threading.Event()
    world.start(lambda: seen.extend(read(world, leased, 0, passes=9, at={4: restart})))
    world.join()
    assert seen == [0, 1, 2, 0, 1, 2, 0, 1, 2]
