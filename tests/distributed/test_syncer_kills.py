"""The syncer dies by SIGKILL at random instants; learners train on, and the next one goes on from its run directory."""

from __future__ import annotations

import copy
import random
import re
import signal
import time
from dataclasses import dataclass
from typing import Any

import pytest
from processes import Run, wait_until

pytestmark = [pytest.mark.distributed, pytest.mark.alone]

SETTINGS = {"num_fragments": 6, "sync_every": 6, "wire_format": "bf16", "checkpoint_every_seconds": 3}


Version = tuple[int, int]
Tape = list[dict[str, Any]]


@dataclass
class Log:
    """What a learner has applied, in order, by its own log."""

    steps: list[int]  # its own, each time
    versions: list[tuple[int, Version]]  # each with its fragment


def log_of(run: Run, learner_id: int) -> Log:
    text = (run.path / f"learner-{learner_id}.debug").read_text()
    steps = re.findall(r"step (\d+)\] rank 0 applied fragment (\d+) of outer step (\d+)", text)
    held = re.findall(r"holds version \((\d+), (\d+)\) of fragment (\d+)", text)
    assert [(index, outer_step) for _, index, outer_step in steps] == [(index, step) for _, step, index in held]
    assert len({index for _, _, index in held}) == SETTINGS["num_fragments"]
    return Log([int(step) for step, _, _ in steps], [(int(index), (int(inc), int(step))) for inc, step, index in held])


def kill_and_restart(run: Run) -> float:
    """SIGKILL to the syncer; a new one. Seconds from its address being there to the first merge."""
    run.syncer.kill()
    count = len(run.rounds())
    run.start_syncer()
    wait_until(lambda: run.status().get("pid") == run.syncer.pid, "the new syncer to listen")
    up_at = time.monotonic()
    wait_until(lambda: len(run.rounds()) > count, "a merge of the new syncer")
    return time.monotonic() - up_at


def check_kills(run: Run, num_kills: int) -> None:
    """Nothing that a learner or the tape says goes back or is void; and these checks can fail."""
    tape, logs = run.tape(), [log_of(run, learner_id) for learner_id in (0, 1)]
    recovered = [number for number, line in enumerate(tape) if line["kind"] == "recovered"]
    assert len(recovered) >= max(1, num_kills - 1)  # one may have been killed before it had recovered
    check_logs(tape, logs)

    last, other = logs
    backwards = Log(last.steps, last.versions[::-1])
    with pytest.raises(AssertionError, match="version go back"):
        check_logs(tape, [backwards, other])
    with pytest.raises(AssertionError, match="step go back"):
        check_logs(tape, [Log(last.steps[::-1], last.versions), other])
    tampered = copy.deepcopy(tape)
    for fragment in tampered[recovered[0]]["fragments"]:
        fragment["adopted"] = [1, 0]
    with pytest.raises(AssertionError, match="had applied are void"):
        check_logs(tampered, logs)
    merge = next(line for line in tape if line["kind"] == "round")
    again = {**merge, "version": [99, 99]}
    with pytest.raises(AssertionError, match="merged twice"):
        check_logs([*tape, again], logs)


def check_logs(tape: Tape, logs: list[Log]) -> None:
    for log in logs:
        newest: dict[int, Version] = {}
        for index, version in log.versions:
            assert version >= newest.get(index, (0, 0)), "a learner saw a version go back"
            newest[index] = version
        assert log.steps == sorted(log.steps), "a learner saw its step go back"
    check_chain(tape, {held for log in logs for held in log.versions})


def check_chain(tape: Tape, applied: set[tuple[int, Version]]) -> None:
    """What learners applied is never void afterwards, and no update is in the run's values twice."""
    chains: dict[int, dict[Version, list[str]]] = {}
    void: set[tuple[int, Version]] = set()
    for line in tape:
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
    lost = sorted(void & applied)
    assert not lost, f"merges that a learner had applied are void: {lost}"


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
    check_kills(run, num_kills)


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
    check_kills(run, 1)
    digests = [run.result(learner_id)["digests"] for learner_id in (0, 1)]
    assert digests[0] == digests[1]
    for row in run.accounts().values():
        assert row["tokens_merged"] == row["tokens_trained"], row
    run.start_syncer()
    assert run.syncer.wait() == 0, run.syncer.tail()
    assert "has ended; its global model is in" in run.syncer.tail()
