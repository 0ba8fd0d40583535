"""Whole runs in this process whose settings, links, learners and syncer deaths are drawn from a seed."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process_world import SECONDS, leave_at, parameters, train
from ranked import RankedLearner
from test_restarts import RestartWorld, check_tape

from hf_diloco.links.in_process import Weather
from hf_diloco.syncer.tape import read_tape


def random_run(path: Path, seed: int) -> None:
    """Two or three learners over links that delay, reorder and lose messages; the syncer may die and come back.

    In some runs in which it does not, one learner more takes leave in mid-run. (What it alone had applied, a syncer
    that dies afterwards could not get back.) In some the first learner has two ranks.
    """
    rng = random.Random(seed)
    num_learners, num_kills = rng.randint(2, 3), rng.choice([0, 0, 1, 2])
    leaver = num_learners if not num_kills and rng.random() < 0.5 else None
    weather = Weather(
        loss_chance=rng.choice([0.002, 0.01, 0.04]),
        max_down_seconds=rng.choice([0.0, 0.05, 0.2]),
        max_delay_seconds=rng.choice([0.0, 0.002, 0.02]),
    )
    settings: dict[str, Any] = {
        "num_fragments": rng.randint(1, 4),
        "sync_every": rng.randint(2, 8),
        "min_quorum": rng.randint(1, num_learners),
        "max_grace_seconds": rng.choice([0.0, 0.05, 2.0]),
        "wire_format": rng.choice(["fp32", "bf16", "int8", "int4"]),
        "on_arrival": rng.choice(["carry", "carry", "carry", "overwrite"]),
        "checkpoint_every_seconds": rng.choice([0.05, 0.3, 1000.0]),
        "link_timeout_seconds": 3.0,
    }
    steps = rng.randint(80, 250)
    world = RestartWorld(
        path, seed=seed, weather=weather, expected_learners=num_learners + (leaver is not None), **settings
    )
    ranked = RankedLearner(world, 0, steps=steps).start() if random.Random(f"{seed} ranks").random() < 0.4 else None
    for learner_id in range(1 if ranked else 0, num_learners):
        world.start(train, world, learner_id, steps=steps, pace_seconds=rng.choice([0.002, 0.004]))
    if leaver is not None:
        world.start(leave_at, world, leaver, rng.randint(5, steps // 2), drain_seconds=SECONDS, steps=steps)
    for _ in range(num_kills):
        _kill(world, rng)
    world.join()
    if ranked is not None:
        ranked.check_ranks_agree()
        assert ranked.ended[0] == "finished"
    check_run(world, num_learners, carry=settings["on_arrival"] == "carry")


def _kill(world: RestartWorld, rng: random.Random) -> None:
    """After some more merges; or not at all, if the run ends before."""
    deadline = time.monotonic() + SECONDS
    wanted = num_merges(world) + rng.randint(1, 40)
    while num_merges(world) < wanted:
        if not world.syncer_thread.is_alive():
            return
        assert time.monotonic() < deadline, "merges no longer come"
        threading.Event().wait(0.002)
    world.kill_syncer()
    if world.tape("finish"):
        return  # it had just ended by itself
    threading.Event().wait(rng.choice([0.0, 0.1, 0.5]))  # learners train on alone
    world.restart_syncer()


def num_merges(world: RestartWorld) -> int:
    return len(world.tape("round")) if world.directory.tape.exists() else 0


def check_run(world: RestartWorld, num_learners: int, *, carry: bool) -> None:
    first = parameters(world.models[0])
    assert all(torch.equal(parameters(world.models[who]), first) for who in range(1, num_learners))
    values, _, _ = world.syncer.model()
    assert all(torch.equal(values[name], value) for name, value in world.models[0].named_parameters())
    check_tape(world)
    check_applied(world)
    if carry:
        parted = {line["learner_id"] for line in world.tape("leave") if line["for_good"]}
        for row in world.accounts().values():
            if row["learner_id"] not in parted:
                continue  # what it said last of its tokens was lost with its link
            given_up = row["tokens_overwritten"]
            assert row["tokens_merged"] + given_up == pytest.approx(row["tokens_trained"], abs=1), row


def check_applied(world: RestartWorld) -> None:
    """What learners applied has the digest that the syncer gave it, and its versions never go back."""
    digests: dict[tuple[int, tuple[int, int]], str] = {}
    newest: dict[tuple[int, int], tuple[int, int]] = {}
    for line in read_tape(world.directory.tape):
        if line["kind"] == "values":
            initial = line["digests"]
        elif line["kind"] == "round":
            digests[line["fragment_index"], tuple(line["version"])] = line["digest"]
        elif line["kind"] == "recovered":
            for index, fragment in enumerate(line["fragments"]):
                digests[index, (line["incarnation"], fragment["adopted"][1])] = fragment["digest"]
        elif line["kind"] == "applied":
            who, index, version = line["learner_id"], line["fragment_index"], tuple(line["version"])
            is_initial = version[1] == 0 and (index, version) not in digests
            assert line["digest"] == (initial[index] if is_initial else digests[index, version]), line
            assert version >= newest.get((who, index), (0, 0)), "a learner saw a version go back"
            newest[who, index] = version
    assert {who for who, _ in newest} == world.models.keys()
