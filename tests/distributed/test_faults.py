"""Learners die by SIGKILL in the middle of a run; the others go on, and who comes back is merged again."""

from __future__ import annotations

import itertools
import signal
import statistics
from typing import Any

import pytest
from processes import Run, wait_until

from hf_diloco.core.codec import digest
from hf_diloco.syncer.run_directory import RunDirectory
from hf_diloco.syncer.saved_run import latest_run

pytestmark = [pytest.mark.distributed, pytest.mark.alone]

PACE = {"step_seconds": 0.15, "max_steps": 260}
SETTINGS = {"num_fragments": 6, "sync_every": 6, "wire_format": "bf16"}


def ids(line: dict[str, Any]) -> set[int]:
    return {participant["learner_id"] for participant in line["participants"]}


def incarnations(line: dict[str, Any]) -> set[str]:
    return {participant["update_id"].partition("/")[0] for participant in line["participants"]}


def joins(run: Run, learner_id: int) -> list[str]:
    lines = [line for line in run.tape() if line["kind"] == "join" and line["learner_id"] == learner_id]
    return list(dict.fromkeys(line["incarnation"] for line in lines))


def kill_and_measure(run: Run, victim: int) -> float:
    """SIGKILL; returns when the others have merged ten times more: their longest wait beyond the usual one."""
    before = [line["seconds"] for line in run.rounds()]
    usual = statistics.median(later - earlier for earlier, later in itertools.pairwise(before))
    run.learners.pop(victim).kill()
    wait_until(lambda: len(run.rounds()) >= len(before) + 10, f"merges without learner {victim}")
    times = [line["seconds"] for line in run.rounds()][len(before) - 1 :]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    return max(gaps) - usual


def check_end(run: Run, finished: set[int]) -> None:
    """Everybody ends with exit code 0 and holds the very values that the syncer wrote."""
    for learner_id in finished:
        assert run.learners[learner_id].wait() == 0, run.learners[learner_id].tail()
    assert run.syncer.wait() == 0, run.syncer.tail()
    saved = latest_run(RunDirectory(run.directory, create=False)).tensors()
    digests = {name: digest(value) for name, value in saved.items()}
    for learner_id in finished:
        assert run.result(learner_id)["digests"] == digests
    versions = {}
    for line in run.rounds():  # versions of a fragment only grow
        assert line["version"] > versions.get(line["fragment_index"], [0, 0])
        versions[line["fragment_index"]] = line["version"]


def test_a_killed_learner_comes_back(start_run: Any) -> None:
    run = start_run(expected_learners=2, **SETTINGS)
    for learner_id in (0, 1):
        run.start_learner(learner_id, **PACE)
    run.wait_for_rounds(12, lambda line: ids(line) == {0, 1}, "merges of both learners")
    assert kill_and_measure(run, victim=1) < 2.0
    assert ids(run.rounds()[-1]) == {0}

    run.start_learner(1, **PACE)
    wait_until(lambda: len(joins(run, 1)) == 2, "learner 1 to join again")
    newcomer = joins(run, 1)[1]
    run.wait_for_rounds(6, lambda line: newcomer in incarnations(line), "merges of the learner that came back")
    check_end(run, {0, 1})

    tape = run.tape()
    joined_at = next(number for number, line in enumerate(tape) if line.get("incarnation") == newcomer)
    applied = [line for line in tape[joined_at:] if line["kind"] == "applied" and line["learner_id"] == 1]
    first_merge = next(
        number for number, line in enumerate(tape) if line["kind"] == "round" and newcomer in incarnations(line)
    )
    healed = [line for line in tape[joined_at:first_merge] if line["kind"] == "applied" and line["learner_id"] == 1]
    assert {line["fragment_index"] for line in healed} == set(range(6)), "merged before it held the global parameters"
    assert applied


@pytest.mark.long
def test_a_second_learner_dies_while_the_first_one_joins(start_run: Any) -> None:
    run = start_run(expected_learners=3, **SETTINGS)
    pace = {**PACE, "step_seconds": 0.25, "max_steps": 240}
    for learner_id in (0, 1, 2):
        run.start_learner(learner_id, **pace)
    run.wait_for_rounds(12, lambda line: len(ids(line)) >= 2, "merges of the learners")
    run.learners.pop(1).kill()
    run.start_learner(1, **pace)
    wait_until(lambda: len(joins(run, 1)) == 2, "learner 1 to join again")
    assert kill_and_measure(run, victim=2) < 2.0
    run.start_learner(2, **pace)
    for learner_id in (1, 2):
        wait_until(lambda learner_id=learner_id: len(joins(run, learner_id)) == 2, f"learner {learner_id} to return")
        newcomer = joins(run, learner_id)[1]
        run.wait_for_rounds(3, lambda line, who=newcomer: who in incarnations(line), f"merges of learner {learner_id}")
    check_end(run, {0, 1, 2})


@pytest.mark.long
def test_a_learner_that_never_comes_back(start_run: Any) -> None:
    run = start_run(expected_learners=2, **SETTINGS)
    for learner_id in (0, 1):
        run.start_learner(learner_id, **{**PACE, "max_steps": 120})
    run.wait_for_rounds(8, lambda line: ids(line) == {0, 1}, "merges of both learners")
    assert kill_and_measure(run, victim=0) < 2.0
    check_end(run, {1})
    leaves = [line for line in run.tape() if line["kind"] == "leave" and line["learner_id"] == 0]
    assert [line["for_good"] for line in leaves] == [False]


@pytest.mark.long
def test_a_stopped_learner_is_not_waited_for_and_loses_nothing(start_run: Any) -> None:
    run = start_run(expected_learners=2, link_timeout_seconds=3, **SETTINGS)
    for learner_id in (0, 1):
        run.start_learner(learner_id, **PACE)
    run.wait_for_rounds(8, lambda line: ids(line) == {0, 1}, "merges of both learners")
    stopped = run.learners[1]
    stopped.signal(signal.SIGSTOP)
    wait_until(lambda: any(line["kind"] == "leave" for line in run.tape()), "the syncer to notice", 30)
    count = len(run.rounds())
    run.wait_for_rounds(count + 6, lambda line: True, "merges without the stopped learner")
    stopped.signal(signal.SIGCONT)
    count = len(run.rounds())
    wait_until(lambda: any(1 in ids(line) for line in run.rounds()[count:]), "the learner to be merged again")
    check_end(run, {0, 1})
    assert len(joins(run, 1)) == 1, "it kept its incarnation, and with it its unmerged progress"
    account = run.accounts()[1]
    assert account["tokens_merged"] == account["tokens_trained"]
