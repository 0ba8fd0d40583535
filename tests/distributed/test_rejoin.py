"""A killed learner comes back: what it has for its optimizer, and how long it takes until it is merged again."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest
import torch
from processes import Run, wait_until

from hf_diloco import last_checkpoint

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]

PACE = {"step_seconds": 0.2, "max_steps": 2000}
SETTINGS = {"num_fragments": 6, "sync_every": 6, "finish_wait_seconds": 0}
START_SECONDS = 300.0
REJOIN_SECONDS = 120.0  # starting Python and torch takes its time on a machine that has other work
HEAL_SECONDS = 15.0  # from joining again to the first merge


def rejoin(run: Run, learner_id: int, **options: Any) -> dict[str, Any]:
    """Kill a learner, start it again; the tape's line on its optimizer state.

    Prints how long each part took, from the start of the new process to its first merge.
    """
    run.learners.pop(learner_id).kill()
    wait_until(lambda: any(line["kind"] == "leave" for line in run.tape()), "the syncer to notice")
    (begin,) = (line for line in run.tape() if line["kind"] == "start")
    started = time.time()
    run.start_learner(learner_id, **options)

    join = wait_until(lambda: run._alive() and second_join(run.tape(), learner_id), "it to join again")
    merged = wait_until(lambda: run._alive() and first_merge(run.tape(), join["incarnation"]), "its first merge")
    (state,) = (line for line in run.tape() if line["kind"] == "state")
    assert join["seconds"] < state["seconds"] < merged["seconds"]
    marks = [begin["time"] + line["seconds"] - begin["seconds"] for line in (join, state, merged)]
    seconds = [later - earlier for earlier, later in zip([started, *marks], marks, strict=False)]
    print("rejoin: start {:.1f} s, values and optimizer state {:.1f} s, first merge {:.1f} s".format(*seconds))
    assert marks[-1] - started < REJOIN_SECONDS
    assert marks[-1] - marks[0] < HEAL_SECONDS
    return state


def second_join(tape: list[dict[str, Any]], learner_id: int) -> dict[str, Any] | None:
    joins = [line for line in tape if line["kind"] == "join" and line["learner_id"] == learner_id]
    return joins[-1] if joins[-1]["incarnation"] != joins[0]["incarnation"] else None


def first_merge(tape: list[dict[str, Any]], incarnation: str) -> dict[str, Any] | None:
    return next((line for line in tape if line["kind"] == "round" and incarnation in incarnations(line)), None)


def incarnations(line: dict[str, Any]) -> set[str]:
    return {participant["update_id"].partition("/")[0] for participant in line["participants"]}


def start(start_run: Any, **options: Any) -> Run:
    run = start_run(expected_learners=2, **SETTINGS)
    for learner_id in (0, 1):
        run.start_learner(learner_id, **options)

    def both() -> int:
        return sum(len(line["participants"]) == 2 for line in run.rounds())

    wait_until(lambda: run._alive() and both() >= 12, "merges of both learners", START_SECONDS)
    return run


def beginning(run: Run, learner_id: int) -> dict[str, Any]:
    return json.loads((run.path / f"learner-{learner_id}.begin.json").read_text())


def test_without_a_checkpoint_its_peer_gives_it_the_state(start_run: Any) -> None:
    options = {**PACE, "hidden_size": 256}
    run = start(start_run, **options)
    state = rejoin(run, 1, **options)
    assert (state["source"], state["donor_ids"], state["reason"]) == ("peer", [0], "")
    sent = re.findall(r"piece (\d+) of its optimizer state for learner 1: (\w+)", run.learners[0].tail(1 << 20))
    digests = dict(sent)
    assert len(sent) == len(digests) == state["num_pieces"] >= 3
    began = beginning(run, 1)
    assert began["pieces"] == [digests[str(number)] for number in range(len(digests))]
    assert began["trainer_step"] == 0
    assert began["steps"][0] >= 12
    assert re.search(r"state of the inner optimizer: that of learner 0: .* MB in", run.learners[1].tail(1 << 20))


@pytest.mark.long
def test_its_own_checkpoint_gives_it_the_state(start_run: Any) -> None:
    options = {**PACE, "save_steps": 5}
    run = start(start_run, **options)
    directory = run.path / "out" / "learner-1"
    run.learners[1].kill()
    checkpoint = last_checkpoint(str(directory))
    assert checkpoint is not None
    state = rejoin(run, 1, **options)
    assert (state["source"], state["donor_ids"]) == ("own", [])
    assert "piece" not in run.learners[0].tail(1 << 20)
    saved = torch.load(f"{checkpoint}/optimizer.pt")["state"]
    began = beginning(run, 1)
    assert began["steps"] == sorted({float(entry["step"]) for entry in saved.values()})
    assert began["trainer_step"] == int(checkpoint.rpartition("-")[2]) > 0
