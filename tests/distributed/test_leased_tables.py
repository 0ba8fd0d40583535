"""Six shards of a table and two learners that are processes; one is killed for good, and the other reads its shard."""

from __future__ import annotations

import json
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from processes import Run, wait_until
from test_leased_streams import NUM_SHARDS, ROWS, changes, check_leases, is_start, leases_of, write_shards

pytestmark = [pytest.mark.distributed, pytest.mark.long, pytest.mark.timeout(600)]

ABSENT_SECONDS = 3
IMPATIENT_SYNCER = f"""
from hf_diloco.core import leases
leases.ABSENT_SECONDS = {ABSENT_SECONDS}
from hf_diloco.cli.main import main
main()
"""


def rows_read(run: Run, learner_id: int) -> list[list[int]]:
    lines = (run.path / f"learner-{learner_id}.reads").read_text().splitlines(keepends=True)
    return [row for line in lines if line.endswith("\n") for row in json.loads(line)]


def check_passes(rows: list[list[int]]) -> list[int]:
    """The shard of each pass; each pass is of one shard, whole, no row twice."""
    passes = [rows[first : first + ROWS] for first in range(0, len(rows), ROWS)]
    for one in passes:
        assert len({shard for shard, _ in one}) == 1
        assert len({row for _, row in one}) == len(one)
    assert all(len(one) == ROWS for one in passes[:-1])
    return [one[0][0] for one in passes]


def test_the_shard_of_a_learner_that_is_killed_for_good_is_read(start_run: Any, tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "shards")
    options = {"stream": folder, "map_style": 1, "num_workers": 2, "step_seconds": 0.1, "max_steps": 4000}
    run = start_run(
        syncer=["-c", IMPATIENT_SYNCER], expected_learners=2, num_fragments=4, sync_every=4, finish_wait_seconds=0
    )
    for learner_id in (0, 1):
        run.start_learner(learner_id, **options)

    leases = partial(leases_of, run)

    wait_until(lambda: run._alive() and len(leases(1)) >= 3, "passes of learner 1", 300)
    check_leases(run.tape())
    run.learners.pop(1).kill()
    of_the_dead, before = leases(1)[-1], len(leases(0))
    wait_until(lambda: run._alive() and of_the_dead in leases(0)[before:-1], "a pass over the shard of the dead")
    (learner,) = run.learners.values()
    learner.signal(signal.SIGTERM)
    assert learner.wait() == 0, learner.tail()
    read = check_passes(rows_read(run, 0))
    assert is_start(changes(read), changes(leases(0)))
    assert is_start(changes(check_passes(rows_read(run, 1))), changes(leases(1)))
    assert {*read, *check_passes(rows_read(run, 1))} == set(range(NUM_SHARDS))
    assert of_the_dead in read[before:]
    assert not [line for line in run.tape() if line["kind"] == "warning"]
