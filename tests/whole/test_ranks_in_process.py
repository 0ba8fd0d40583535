"""Learners of several ranks in whole runs inside this process: all ranks do the same, and nothing is lost."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process_world import SECONDS, World, make_model, parameters, train
from ranked import RankedLearner
from torch import nn

from hf_diloco.core import messages as ms
from hf_diloco.links.in_process import InProcessHub

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(
    ("wire_format", "on_arrival", "local_mix"),
    [("bf16", "carry", 0.0), ("int4", "carry", 0.0), ("fp32", "overwrite", 0.0), ("bf16", "overwrite", 0.3)],
)
def test_a_learner_of_two_ranks_beside_one_of_one(
    tmp_path: Path, wire_format: str, on_arrival: str, local_mix: float
) -> None:
    world = World(
        tmp_path, expected_learners=2, num_fragments=3, sync_every=6, wire_format=wire_format, on_arrival=on_arrival,
        local_mix=local_mix, min_quorum=2,
    )  # fmt: skip
    ranked = RankedLearner(world, 0).start()
    world.start(train, world, 1, pace_seconds=0.008)
    world.join()
    ranked.check_ranks_agree()
    assert ranked.ended[0] == "finished"
    assert torch.equal(parameters(world.models[0]), parameters(world.models[1]))
    values, _, _ = world.syncer.model()
    assert all(torch.equal(values[name], value) for name, value in world.models[0].named_parameters())
    merged = [who["learner_id"] for line in world.tape("round") for who in line["participants"]]
    assert merged.count(0) >= 6
    row = world.accounts()[0]
    assert row["tokens_trained"] == 8 * len(ranked.seen[0])
    assert row["tokens_merged"] + row["tokens_overwritten"] == pytest.approx(row["tokens_trained"], abs=1), row
    if on_arrival == "carry":
        assert row["tokens_merged"] == row["tokens_trained"]


def test_alone_it_is_plain_training(tmp_path: Path) -> None:
    world = World(tmp_path, num_fragments=3, sync_every=6, outer_lr=1.0, outer_momentum=0.0, wire_format="fp32")
    ranked = RankedLearner(world, 0, num_ranks=3).start()
    world.join()
    ranked.check_ranks_agree()
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generators = [torch.Generator().manual_seed(rank) for rank in range(3)]
    for _ in range(60):
        for generator in generators:
            inputs = torch.randn(4, 4, generator=generator)
            (nn.functional.mse_loss(model(inputs), inputs[:, :2] * 2) / 3).backward()
        optimizer.step()
        optimizer.zero_grad()
    moved = (parameters(model) - parameters(make_model())).norm()
    assert (parameters(world.models[0]) - parameters(model)).norm() <= 1e-5 * moved
    assert len(world.tape("round")) >= 8


class Withholding(InProcessHub):
    """Values for learner 0 are lost while ``withholds``; what is said to it arrives."""

    withholds = False

    def send(self, learner_ids: list[int], message: ms.Message, payload: torch.Tensor | None = None) -> None:
        kept = [who for who in learner_ids if not (self.withholds and who == 0 and isinstance(message, ms.Publication))]
        super().send(kept, message, payload)


def test_on_a_new_link_all_ranks_take_over_the_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once: it is not the first value that brings it."""
    monkeypatch.setattr("in_process_world.InProcessHub", Withholding)
    world = World(tmp_path, expected_learners=2, num_fragments=2, sync_every=4)
    ranked = RankedLearner(world, 0, steps=500, pace_seconds=0.05).start()
    world.start(train, world, 1, steps=500)

    def wait_until(condition: Any) -> None:
        while not condition():
            assert not any(ranked.ended), ranked.ended
            threading.Event().wait(0.001)

    def step(rank: int) -> int:
        learner = ranked.learners[rank]
        return 0 if learner is None else learner.global_step

    wait_until(lambda: ranked.seen[0] and len(world.tape("round")) >= 4)
    world.hub.cut(0)
    wait_until(lambda: world.syncer.status()["outer_step"] >= step(0) + 60)
    world.hub.withholds, clock = True, world.syncer.status()["outer_step"]
    world.hub.heal(0)
    num_seen = len(ranked.seen[0])
    wait_until(lambda: min(step(0), step(1)) >= clock)
    assert len(ranked.seen[0]) < num_seen + 30, "it got there step by step"
    world.hub.withholds = False
    world.hub.cut(0)
    world.hub.heal(0)
    world.join()
    ranked.check_ranks_agree()
    assert ranked.ended[0] == "finished"


def test_all_ranks_start_over_at_the_same_step(tmp_path: Path) -> None:
    world = World(tmp_path, expected_learners=2, num_fragments=2, sync_every=4)

    def poison(rank: int) -> Any:
        def fault(ranked: RankedLearner) -> None:
            with torch.no_grad():
                for parameter in ranked.models[rank].parameters():
                    parameter.mul_(float("nan"))

        return fault

    ranked = RankedLearner(world, 0, steps=150, at={(rank, 60): poison(rank) for rank in (0, 1)}).start()
    world.start(train, world, 1, steps=150, pace_seconds=0.015)
    world.join()
    ranked.check_ranks_agree()
    refusals = world.tape("refusal")
    assert [line["start_over"] for line in refusals].count(True) >= 1
    last = refusals[-1]["seconds"]
    later = [line for line in world.tape("round") if line["seconds"] > last]
    assert any(who["learner_id"] == 0 for line in later for who in line["participants"]), "it was never merged again"
    assert torch.equal(parameters(world.models[0]), parameters(world.models[1]))
    assert bool(torch.isfinite(parameters(world.models[0])).all())


@pytest.mark.parametrize("told", [0, 1])
def test_one_rank_told_to_stop_takes_all_along(tmp_path: Path, told: int) -> None:
    world = World(tmp_path, expected_learners=2, num_fragments=3, sync_every=60)
    ranked = RankedLearner(
        world, 0, steps=10_000, at={(told, 20): lambda ranked: ranked.told_to_stop[told].set()}
    ).start()
    world.start(train, world, 1, steps=10_000, at={150: world.syncer.stop}, ends=False)
    world.join()
    ranked.check_ranks_agree()
    assert ranked.ended == ["left", "left"]
    assert 20 < len(ranked.seen[0]) <= 22
    row = world.accounts()[0]
    assert row["tokens_merged"] == row["tokens_trained"] == 8 * len(ranked.seen[0])
    assert [line["for_good"] for line in world.tape("leave") if line["learner_id"] == 0] == [False]


def test_told_to_stop_at_the_start_gate(tmp_path: Path) -> None:
    world = World(tmp_path, expected_learners=2, num_fragments=2)
    ranked = RankedLearner(world, 0).start()
    while not world.directory.tape.exists() or not world.tape("join"):
        threading.Event().wait(0.01)
    ranked.told_to_stop[1].set()
    while not all(ranked.ended):
        threading.Event().wait(0.01)
    world.syncer.stop()
    world.join()
    assert ranked.ended == ["at the gate", "at the gate"]


def test_what_rank_0_is_refused_for_ends_all_ranks(tmp_path: Path) -> None:
    world = World(tmp_path, num_fragments=1000)
    ranked = RankedLearner(world, 0).start()
    while not all(ranked.ended):
        threading.Event().wait(0.01)
    world.syncer_thread.join(SECONDS)
    assert "1000" in str(world.failures.pop()), "the syncer ends: it was its setting"
    world.join()
    assert "LearnerRefusedError" in ranked.ended[0]
    assert "1000" in ranked.ended[0]
    assert "rank 0 of learner 0 failed" in ranked.ended[1]


@pytest.mark.parametrize("has_donor", [True, False])
def test_all_ranks_begin_with_the_same_optimizer_state(tmp_path: Path, has_donor: bool) -> None:
    def adamw(params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=0.01)

    world = World(tmp_path, num_fragments=2, sync_every=4)
    started = threading.Event()
    first = RankedLearner(
        world, 0, steps=200, make_optimizer=adamw if has_donor else torch.optim.SGD,
        at={(0, 10): lambda ranked: started.set()},
    ).start()  # fmt: skip
    assert started.wait(60)
    second = RankedLearner(world, 1, steps=200, make_optimizer=adamw).start()
    world.join()
    for ranked in (first, second):
        ranked.check_ranks_agree()
        assert ranked.ended[0] == "finished"
    mine, other = second.begins_with
    assert bool(mine) == has_donor
    assert mine.keys() == other.keys()
    assert all(torch.equal(mine[key], other[key]) for key in mine)
    if has_donor:
        assert any(float(value.abs().sum()) > 0 for key, value in mine.items() if "exp_avg" in key)


@pytest.mark.parametrize("is_restored", [True, False])
def test_an_optimizer_whose_state_is_not_exchanged_keeps_its_own(
    tmp_path: Path, is_restored: bool, caplog: pytest.LogCaptureFixture
) -> None:
    class Other(torch.optim.AdamW):
        """None of torch's own; a peer's state is not for it."""

    world = World(tmp_path, num_fragments=2, sync_every=4)
    started = threading.Event()
    first = RankedLearner(world, 0, steps=200, make_optimizer=Other, at={(0, 10): lambda ranked: started.set()}).start()
    assert started.wait(60)
    second = RankedLearner(world, 1, steps=200, make_optimizer=Other)
    for optimizer in second.optimizers if is_restored else ():
        for group in optimizer.param_groups:
            for tensor in group["params"]:
                tensor.grad = torch.ones_like(tensor)
        optimizer.step()
        optimizer.zero_grad()
    with caplog.at_level("INFO", "hf_diloco"):
        second.start()
        world.join()
    for ranked in (first, second):
        ranked.check_ranks_agree()
        assert ranked.ended[0] == "finished"
    (line,) = world.tape("state")
    assert line["source"] == ("own" if is_restored else "warm-up")
    assert line["reason"] == "" if is_restored else line["reason"].endswith("Other is not an optimizer of torch.optim")
    assert caplog.text.count("is warmed up") == (0 if is_restored else 2)
