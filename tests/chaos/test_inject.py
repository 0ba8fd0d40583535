"""Faults that overlap are undone when the last of them is over."""

from __future__ import annotations

import os
import resource
import subprocess
import types
from collections.abc import Iterator

import pytest

from hf_diloco.chaos import census
from hf_diloco.chaos.faults import Fault, Victim
from hf_diloco.chaos.inject import Injector

pytestmark = pytest.mark.distributed


@pytest.fixture
def victim() -> Iterator[census.Process]:
    environment = {**os.environ, census.MARK: "test_inject"}
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"here\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"here\n"  # it is `cat` by now
        (found,) = census.processes("test_inject")
        yield found
        process.stdin.close()


@pytest.mark.parametrize("first_to_end", [0, 1])
def test_a_disk_that_is_full_twice_has_room_again(victim, tmp_path, first_to_end):
    tape = tmp_path / "tape.jsonl"
    tape.write_bytes(b"x" * 5000)
    run = types.SimpleNamespace(
        process=lambda _learner_id: victim,
        processes=lambda: [victim],
        directory=types.SimpleNamespace(tape=tape),
    )
    before = resource.prlimit(victim.pid, resource.RLIMIT_FSIZE)
    injector = Injector(run)
    for _ in range(2):
        injector.begin(Fault(kind="disk_full", victim=Victim(part="syncer"), at_seconds=0, seconds=60))
    assert resource.prlimit(victim.pid, resource.RLIMIT_FSIZE) == (5000, before[1])
    injector._end(first_to_end)
    assert resource.prlimit(victim.pid, resource.RLIMIT_FSIZE) == (5000, before[1]), "the other one goes on"
    injector.end_all()
    assert resource.prlimit(victim.pid, resource.RLIMIT_FSIZE) == before
