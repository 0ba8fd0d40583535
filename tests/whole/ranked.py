"""A learner of several ranks for runs in this process: each rank is a thread with a model of its own."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from in_process_world import SECONDS, World, make_model, parameters
from torch import nn

from hf_diloco import DiLoCoPlugin
from hf_diloco.learner.follower import Follower
from hf_diloco.learner.learner import Learner
from hf_diloco.learner.parameters import ModelParameters
from hf_diloco.learner.ranks import SeveralRanks

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05)


class RankedLearner:
    """Trains as DDP does: each rank on its own data, with averaged gradients.

    Args:
        world: the run.
        learner_id: of the learner.
        steps: how long the run is.
        at: by (rank, step): what happens there.
    """

    def __init__(
        self,
        world: World,
        learner_id: int,
        *,
        steps: int = 60,
        num_ranks: int = 2,
        pace_seconds: float = 0.003,
        make_optimizer: MakeOptimizer = sgd,
        make: Callable[[], nn.Module] = make_model,
        at: dict[tuple[int, int], Callable[[RankedLearner], None]] | None = None,
    ) -> None:
        self.learner_id, self._world, self._steps, self._num_ranks = learner_id, world, steps, num_ranks
        self._pace_seconds, self._at = pace_seconds, at or {}
        self.models = [make() for _ in range(num_ranks)]
        self.optimizers = [make_optimizer(model.parameters()) for model in self.models]
        self.told_to_stop = [threading.Event() for _ in range(num_ranks)]
        self.learners: list[Learner | Follower | None] = [None] * num_ranks
        self.seen: list[list[tuple[int, torch.Tensor]]] = [[] for _ in range(num_ranks)]  # after each step
        self.ended: list[str] = [""] * num_ranks
        self.begins_with: list[Any] = [None] * num_ranks  # state of the inner optimizers
        self._store = dist.HashStore()
        world.models[learner_id] = self.models[0]

    def start(self) -> RankedLearner:
        for rank in range(self._num_ranks):
            self._world.start(self._run, rank)
        return self

    def _group(self, name: str, rank: int) -> Any:
        store = dist.PrefixStore(name, self._store)
        return dist.ProcessGroupGloo(store, rank, self._num_ranks, datetime.timedelta(seconds=SECONDS))

    def _make(self, rank: int) -> Learner | Follower:
        ranks = SeveralRanks(self._group("control", rank), self._group("bulk", rank))
        content = ModelParameters(self.models[rank])
        plugin = DiLoCoPlugin(syncer="in-process:1", learner_id=self.learner_id)
        if rank:
            return Follower(content, plugin, ranks=ranks, optimizer=self.optimizers[rank])
        return Learner(
            content,
            plugin,
            total_steps=self._steps,
            optimizer=self.optimizers[rank],
            link=self._world.hub.connect(self.learner_id, incarnation=str(id(self))),
            ranks=ranks,
        )

    def _run(self, rank: int) -> None:
        learner = self.learners[rank] = self._make(rank)
        gradients = self._group("gradients", rank)
        try:
            if not learner.join(interrupted=self.told_to_stop[rank].is_set):
                learner.leave("told to stop")
                self.ended[rank] = "at the gate"
                return
            self.begins_with[rank] = {
                key: value.clone()
                for index, entry in self.optimizers[rank].state_dict()["state"].items()
                for key, value in ((f"{index} {name}", one) for name, one in entry.items())
                if value is not None
            }
            self._train(rank, learner, gradients)
        except Exception as error:
            self.ended[rank] = f"{type(error).__name__}: {error}"
        finally:
            learner.close()

    def _train(self, rank: int, learner: Learner | Follower, gradients: Any) -> None:
        model, optimizer = self.models[rank], self.optimizers[rank]
        generator = torch.Generator().manual_seed(100 * self.learner_id + rank)
        for step in range(1, 10 * self._steps):
            inputs = torch.randn(4, 4, generator=generator)
            nn.functional.mse_loss(model(inputs), inputs[:, :2] * 2).backward()
            for parameter in model.parameters():
                gradients.allreduce([parameter.grad]).wait()
                parameter.grad.div_(self._num_ranks)
            optimizer.step()
            optimizer.zero_grad()
            if (rank, step) in self._at:
                self._at[rank, step](self)
            threading.Event().wait(self._pace_seconds)
            goes_on = learner.step(tokens=4)
            self.seen[rank].append((learner.global_step, parameters(model).clone()))
            if learner.interrupted:
                learner.leave("told to stop", drain_seconds=SECONDS, for_good=False)
                self.ended[rank] = "left"
                return
            if not goes_on:
                break
        self.ended[rank] = "finished" if learner.finish() else "gave up"

    def check_ranks_agree(self) -> None:
        """All ranks have had the same clock and the same parameters after each step, and ended alike."""
        assert len(set(self.ended)) == 1, self.ended
        assert self.seen[0]
        for others in self.seen[1:]:
            assert len(others) == len(self.seen[0])
            for (step, values), (other_step, other_values) in zip(self.seen[0], others, strict=True):
                assert step == other_step
                assert torch.allclose(values, other_values, rtol=0, atol=0, equal_nan=True), f"at step {step}"
        assert all(torch.equal(parameters(model), parameters(self.models[0])) for model in self.models)
