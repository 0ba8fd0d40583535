"""Six shards and learners that are processes, of which one is killed and comes back: who reads what."""

from __future__ import annotations

import json
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from processes import Run, wait_until
from test_ranks import start_learner

pytestmark = [pytest.mark.distributed, pytest.mark.long, pytest.mark.timeout(600)]

NUM_SHARDS, ROWS = 6, 16  # four steps a pass


def write_shards(folder: Path) -> Path:
    folder.mkdir()
    for shard in range(NUM_SHARDS):
        rows = [[shard, row, *range(row, row + 14)] for row in range(ROWS)]
        lines = [json.dumps({"input_ids": ids, "labels": ids}) + "\n" for ids in rows]
        (folder / f"{shard}.jsonl").write_text("".join(lines))
    return folder


def shards_read(run: Run, learner_id: int) -> list[int]:
    """Of each step; the examples of one step are all of one shard."""
    path = run.path / f"learner-{learner_id}.reads"
    steps = [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    assert all(len({shard for shard, _ in step}) == 1 for step in steps)
    return [step[0][0] for step in steps]


def check_leases(tape: list[dict[str, Any]]) -> set[int]:
    """Nobody is given a shard that another one holds, and who is away for a short time holds its own."""
    held: dict[int, int] = {}
    for line in tape:
        if line["kind"] == "leave" and line["for_good"]:
            held.pop(line["learner_id"], None)
        elif line["kind"] == "lease":
            held[line["learner_id"]] = line["shard"]
            assert len(set(held.values())) == len(held), line
    return {line["shard"] for line in tape if line["kind"] == "lease"}


def leases_of(run: Run, learner_id: int) -> list[int]:
    """The shards that a learner was given."""
    lines = [line for line in run.tape() if line["kind"] == "lease" and line["learner_id"] == learner_id]
    return [line["shard"] for line in lines]


def changes(shards: list[int]) -> list[int]:
    """Without repetitions: of steps, or of a lease that was renewed."""
    return [shard for place, shard in enumerate(shards) if place == 0 or shards[place - 1] != shard]


def is_start(some: list[int], of: list[int]) -> bool:
    return bool(some) and some == of[: len(some)]


def test_a_learner_that_is_killed_keeps_its_shard_and_nothing_is_left_unread(start_run: Any, tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "shards")
    options = {"stream": folder, "step_seconds": 0.1, "max_steps": 4000}
    run = start_run(expected_learners=2, num_fragments=4, sync_every=4, finish_wait_seconds=0)
    for learner_id in (0, 1):
        run.start_learner(learner_id, **options)

    leases = partial(leases_of, run)

    wait_until(lambda: run._alive() and len(leases(1)) >= 3, "passes of learner 1", 300)
    run.learners.pop(1).kill()
    before, of_other = len(leases(1)), len(leases(0))
    wait_until(lambda: run._alive() and len(leases(0)) >= of_other + 5, "passes of learner 0 alone")
    run.start_learner(1, **options)
    wait_until(lambda: run._alive() and len(leases(1)) >= before + 3, "passes of the one that came back", 300)
    for learner in run.learners.values():
        learner.signal(signal.SIGTERM)
    for learner in run.learners.values():
        assert learner.wait() == 0, learner.tail()
    assert leases(0)[0] == 0
    assert leases(1)[0] == 1
    assert check_leases(run.tape()) == set(range(NUM_SHARDS))
    assert {*shards_read(run, 0), *shards_read(run, 1)} == set(range(NUM_SHARDS))
    assert is_start(changes(shards_read(run, 0)), changes(leases(0)))
    told = leases(1)  # when it was killed, it may not have read anything of its last shard
    may_be_read = [told, told[: before - 1] + told[before:]]
    assert any(is_start(changes(shards_read(run, 1)), changes(shards)) for shards in may_be_read)
    assert not [line for line in run.tape() if line["kind"] == "warning"]


@pytest.mark.parametrize(
    "options",
    [{"dispatch_batches": 0}, {"dispatch_batches": 1}, {"dispatch_batches": 0, "map_style": 1}],
    ids=["each rank reads", "rank 0 reads", "map-style"],
)
def test_two_ranks_share_what_their_learner_leases(start_run: Any, tmp_path: Path, options: dict[str, int]) -> None:
    folder = write_shards(tmp_path / "shards")
    run = start_run(num_fragments=4, sync_every=4)
    learner = start_learner(run, 0, "ddp", stream=folder, batch_size=2, max_steps=4 * (NUM_SHARDS + 1), **options)
    assert learner.wait(300) == 0, learner.tail()
    lines = [(run.path / f"ddp-0-1.rank-{rank}.reads").read_text().splitlines() for rank in (0, 1)]
    steps = [[*json.loads(first), *json.loads(second)] for first, second in zip(*lines, strict=True)]
    for number, shard in enumerate([*range(NUM_SHARDS), 0]):
        read = [row for step in steps[4 * number : 4 * number + 4] for row in step]
        assert sorted(read) == [[shard, row] for row in range(ROWS)]
