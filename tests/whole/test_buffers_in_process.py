"""What becomes of running statistics and other buffers that training changes, in whole runs inside this process."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from in_process_world import SECONDS, World
from torch import nn

pytestmark = pytest.mark.fast


class Counting(nn.Module):
    """A batch norm, a buffer of its own that training changes, and one that it does not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.head = nn.BatchNorm1d(4), nn.Linear(4, 2)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("scale", torch.ones(2))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.head(self.norm(inputs)) * self.scale


def train_some(world: World, learner_id: int, num_steps: int, *, ends: str = "leaves", steps: int = 10_000) -> None:
    model = Counting()
    learner = world.learner(learner_id, model=model, steps=steps)
    learner.join()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(num_steps):
        inputs = torch.randn(8, 4) + learner_id + 1
        nn.functional.mse_loss(model(inputs), inputs[:, :2]).backward()
        optimizer.step()
        optimizer.zero_grad()
        threading.Event().wait(0.003)
        if not learner.step(tokens=8):
            break
    if ends == "finishes":
        assert learner.finish()
    elif ends == "leaves":
        learner.leave("enough", drain_seconds=SECONDS)
    else:
        learner.close()


def between(value: torch.Tensor, ends: list[torch.Tensor]) -> bool:
    """An average: not beyond any of them, and not one of them."""
    low, high = torch.stack(ends).min(0).values, torch.stack(ends).max(0).values
    return bool(((low < value) & (value < high)).all())


def test_when_all_learners_leave_the_model_has_the_average_of_their_buffers(tmp_path: Path) -> None:
    world = World(tmp_path, expected_learners=2, num_fragments=2, sync_every=4)
    world.start(train_some, world, 0, 20)
    world.start(train_some, world, 1, 40)
    world.join()
    _, constants, _ = world.syncer.model()
    for name in ("norm.running_mean", "seen"):
        assert between(constants[name], [world.models[who].get_buffer(name) for who in (0, 1)]), name
    assert constants["norm.num_batches_tracked"] == 20, "of the first learner"
    assert torch.equal(constants["scale"], torch.ones(2))
    assert not world.tape("warning")


def test_buffers_of_those_who_come_to_the_end_win(tmp_path: Path) -> None:
    world = World(tmp_path, expected_learners=2, num_fragments=2, sync_every=4)
    world.start(train_some, world, 0, 10, steps=60)
    world.start(train_some, world, 1, 60, steps=60, ends="finishes")
    world.join()
    _, constants, _ = world.syncer.model()
    for name in ("norm.running_mean", "norm.num_batches_tracked", "seen"):
        assert torch.equal(constants[name], world.models[1].get_buffer(name)), name


def test_without_a_word_of_any_learner_the_syncer_warns(tmp_path: Path) -> None:
    world = World(tmp_path, num_fragments=2, sync_every=4)
    learner = world.start(train_some, world, 0, 30, ends="is gone")
    learner.join(SECONDS)
    world.syncer.stop()
    world.join()
    (warning,) = world.tape("warning")
    assert "norm.num_batches_tracked, norm.running_mean, norm.running_var" in warning["text"]
    _, constants, _ = world.syncer.model()
    assert torch.equal(constants["norm.running_mean"], torch.zeros(4))
