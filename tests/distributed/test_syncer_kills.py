"""The syncer dies by SIGKILL at random instants; learners train on, and the next one goes on from its run directory."""

from __future__ import annotations

import random
import re
import signal
import time
from typing import Any

import pytest
from processes import Run, wait_until

pytestmark = [pytest.mark.distributed, pytest.mark.alone]

SETTINGS = {"num_fragments": 6, "sync_every": 6, "wire_format": "bf16", "checkpoint_every_seconds": 3}


def applied_at_learner(run: Run, learner_id: int) -> list[tuple[int, tuple[int, int], int]]:
    """Fragment, version and the learner's step of all it ever applied, by its own log."""
    text = (run.path / f"learner-{learner_id}.debug").read_text()
    pattern = r"step (\d+)\] applied fragment (\d+) of version \((\d+), (\d+)\)"
    return [(int(index), (int(inc), int(step)), int(g)) for g, index, inc, step in re.findall(pattern, text)]


def kill_and_restart(run: Run) -> float:
    """SIGKILL to the syncer; a new one. Seconds from its address being there to the first merge."""
    run.syncer.kill()
    count = len(run.rounds())
    run.start_syncer()
    wait_until(lambda: run.status().get("pid") == run.syncer.pid, "the new syncer to listen")
    up_at = time.monotonic()
    wait_until(lambda: len(run.rounds()) > count, "a merge of the new syncer")
    return time.monotonic() - up_at


def check_kills(run: Run, num_kills: int, learner_ids: tuple[int, ...]) -> None:
    recovered = [line for line in run.tape() if line["kind"] == "recovered"]
    assert len(recovered) >= num_kills - 1  # one may have been killed before it had recovered
    for learner_id in learner_ids:
        newest: dict[int, tuple[int, int]] = {}
        last_step = 0
        for index, version, step in applied_at_learner(run, learner_id):
            assert version >= newest.get(index, (0, 0)), "a learner saw a version go back"
            assert step >= last_step, "a learner saw its step go back"
            newest[index], last_step = version, step
    check_chain(run, {who: applied_at_learner(run, who) for who in learner_ids})


def check_chain(run: Run, applied: dict[int, list[tuple[int, tuple[int, int], int]]]) -> None:
    """What learners applied is never void afterwards, and no update is in the run's values twice."""
    chains: dict[int, dict[tuple[int, int], list[str]]] = {}
    void: set[tuple[int, tuple[int, int]]] = set()
    for line in run.tape():
        if line["kind"] == "round":
            chain = chains.setdefault(line["fragment_index"], {})
            assert tuple(line["version"]) > max(chain, default=(0, 0))
            chain[tuple(line["version"])] = [who["update_id"] for who in line["participants"]]
        elif line["kind"] == "recovered":
            for index, fragment in enumerate(line["fragments"]):
                chain, adopted = chains.setdefault(index, {}), tuple(fragment["adopted"])
                void |= {(index, version) for version in chain if version > adopted}
                chains[index] = {version: ids for version, ids in chain.items() if version <= adopted}
                chains[index][line["incarnation"], adopted[1]] = []
    for chain in chains.values():
        ids = [update_id for merged in chain.values() for update_id in merged]
        assert len(ids) == len(set(ids)), "an update was merged twice"
    lost = void & {(index, version) for each in applied.values() for index, version, _ in each}
    assert not lost, f"merges that a learner had applied are void: {sorted(lost)}"


def run_kills(start_run: Any, num_kills: int, max_steps: int, seed: int) -> None:
    run = start_run(expected_learners=2, **SETTINGS)
    for learner_id in (0, 1):
        run.start_learner(learner_id, step_seconds=0.1, max_steps=max_steps)
    run.wait_for_rounds(8, lambda line: len(line["participants"]) == 2, "merges of both learners")
    random_ = random.Random(seed)
    for _ in range(num_kills):
        count, more = len(run.rounds()), random_.randrange(1, 20)
        wait_until(lambda count=count, more=more: len(run.rounds()) >= count + more, "more merges")
        time.sleep(random_.uniform(0, 0.1))  # not always just after a merge: this is the instant of the kill
        seconds = kill_and_restart(run)
        assert seconds < 10.0, f"{seconds:.1f} s from the new syncer to its first merge"
    for learner in run.learners.values():
        assert learner.running() or learner.wait() == 0, learner.tail()
    run.syncer.signal(signal.SIGTERM)
    run.syncer.wait()
    check_kills(run, num_kills, (0, 1))


@pytest.mark.long
def test_a_killed_syncer_goes_on(start_run: Any) -> None:
    run_kills(start_run, num_kills=2, max_steps=4000, seed=0)


@pytest.mark.long
def test_thirty_kills(start_run: Any) -> None:
    run_kills(start_run, num_kills=30, max_steps=20000, seed=1)


@pytest.mark.long
def test_the_run_ends_normally_after_a_restart(start_run: Any) -> None:
    run = start_run(expected_learners=2, **SETTINGS)
    for learner_id in (0, 1):
        run.start_learner(learner_id, step_seconds=0.1, max_steps=150)
    run.wait_for_rounds(8, lambda line: len(line["participants"]) == 2, "merges of both learners")
    kill_and_restart(run)
    for learner in run.learners.values():
        assert learner.wait() == 0, learner.tail()
    assert run.syncer.wait() == 0, run.syncer.tail()
    check_kills(run, 1, (0, 1))
    digests = [run.result(learner_id)["digests"] for learner_id in (0, 1)]
    assert digests[0] == digests[1]
    for row in run.status()["learners"]:
        assert row["tokens_merged"] == row["tokens_trained"], row
    run.start_syncer()
    assert run.syncer.wait() == 0, run.syncer.tail()
    assert "has ended; its global model is in" in run.syncer.tail()
