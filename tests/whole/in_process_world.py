"""A whole run inside this process: the real syncer, real learners in threads, links that fail on demand."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_diloco import DiLoCoPlugin, SyncerConfig
from hf_diloco.learner.learner import Learner
from hf_diloco.learner.parameters import ModelParameters
from hf_diloco.links.in_process import InProcessHub, Weather
from hf_diloco.syncer.run_directory import RunDirectory
from hf_diloco.syncer.service import Syncer
from hf_diloco.syncer.tape import read_tape

SECONDS = 60.0


class World:
    """A syncer in a thread, and learners in threads of their own."""

    def __init__(
        self,
        path: Path,
        *,
        seed: int | None = None,
        weather: Weather | None = None,
        syncer_class: type[Syncer] = Syncer,
        **settings: Any,
    ) -> None:
        self.hub = InProcessHub(seed=seed, weather=weather)
        self.directory = RunDirectory(path / "run")
        self.syncer = syncer_class(SyncerConfig(**settings), self.hub, self.directory)
        self.models: dict[int, nn.Module] = {}
        self.failures: list[BaseException] = []
        self._threads: list[threading.Thread] = []
        self.syncer_thread = self.start(self.syncer.run)

    def start(self, target: Callable[..., None], *args: Any, **kwargs: Any) -> threading.Thread:
        def run() -> None:
            try:
                target(*args, **kwargs)
            except SystemExit:  # a death that a test asked for
                pass
            except BaseException as error:
                self.failures.append(error)

        thread = threading.Thread(target=run, daemon=True)
        self._threads.append(thread)
        thread.start()
        return thread

    def learner(
        self,
        learner_id: int,
        *,
        model: nn.Module | None = None,
        steps: int | None = 60,
        steps_from_epochs: bool = False,
    ) -> Learner:
        model = model if model is not None else make_model()
        self.models[learner_id] = model
        plugin = DiLoCoPlugin(syncer="in-process:1", learner_id=learner_id)
        link = self.hub.connect(learner_id, incarnation=str(id(model)))
        return Learner(
            ModelParameters(model), plugin, total_steps=steps, steps_from_epochs=steps_from_epochs, link=link
        )

    def tape(self, kind: str) -> list[dict[str, Any]]:
        return [line for line in read_tape(self.directory.tape) if line["kind"] == kind]

    def join(self) -> None:
        for thread in self._threads:
            thread.join(SECONDS)
            assert not thread.is_alive(), "a thread did not end"
        assert not self.failures, self.failures

    def accounts(self) -> dict[int, dict[str, Any]]:
        """What the syncer says of each learner that was there."""
        rows = {row["learner_id"]: row for row in self.syncer.status()["learners"]}
        assert rows.keys() == self.models.keys()
        return rows


def make_model(*, width: int = 8, frozen: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 2))
    model.register_buffer("scale", torch.tensor([frozen]))
    return model


def train(
    world: World,
    learner_id: int,
    *,
    steps: int = 60,
    at: dict[int, Callable[[], None]] | None = None,
    lr: float = 0.05,
    pace_seconds: float = 0.003,
    ends: bool = True,
    **options: Any,
) -> None:
    """Train a model as a user's loop would; ``at`` are faults by step."""
    learner = world.learner(learner_id, steps=steps, **options)
    model = world.models[learner_id]
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    generator = torch.Generator().manual_seed(learner_id)
    learner.join()
    for step in range(1, 10 * steps):
        inputs = torch.randn(8, 4, generator=generator)
        nn.functional.mse_loss(model(inputs), inputs[:, :2] * 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        if at and step in at:
            at[step]()
        threading.Event().wait(pace_seconds)
        if not learner.step(tokens=8):
            break
        if not ends and world.syncer.stopping:
            learner.close()
            return
    assert learner.finish()


def parameters(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def leave_at(world: World, learner_id: int, step: int, *, drain_seconds: float, steps: int = 10_000) -> None:
    learner = world.learner(learner_id, steps=steps)
    learner.join()
    optimizer = torch.optim.SGD(world.models[learner_id].parameters(), lr=0.05)
    for _ in range(step):
        inputs = torch.randn(8, 4)
        nn.functional.mse_loss(world.models[learner_id](inputs), inputs[:, :2] * 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        threading.Event().wait(0.003)
        learner.step(tokens=8)
    learner.leave("enough", drain_seconds=drain_seconds)
