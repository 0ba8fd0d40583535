"""All ranks of a learner but rank 0: they do what rank 0 plans, at the same step boundaries."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hf_diloco.config import DiLoCoPlugin
from hf_diloco.core.fragments import FragmentLayout
from hf_diloco.core.message_json import from_wire
from hf_diloco.errors import DiLoCoError
from hf_diloco.learner.operations import Plan, Word
from hf_diloco.learner.parameters import ModelParameters
from hf_diloco.learner.rank import Rank, never
from hf_diloco.learner.ranks import Ranks
from hf_diloco.learner.shared_state import receive_state


class Follower(Rank):
    """Has the methods of :class:`~hf_diloco.learner.learner.Learner`, but no link, and decides nothing.

    Args:
        parameters: the live model.
        plugin: which learner this is.
        ranks: the processes of this learner.
        optimizer: the inner optimizer.
    """

    def __init__(
        self,
        parameters: ModelParameters,
        plugin: DiLoCoPlugin,
        *,
        ranks: Ranks,
        optimizer: Optimizer | None = None,
    ) -> None:
        assert ranks.rank > 0
        super().__init__(parameters, plugin, ranks, optimizer)

    def join(self, *, interrupted: Callable[[], bool] = never) -> bool:
        """As rank 0 does; it has the values from there."""
        self._interrupted = interrupted
        if self._follow() is Word.GIVE_UP:
            return False
        self.global_step, self.total_steps, takes_state, shard = json.loads(self._ranks.share(None))
        if self._lease is not None and shard is not None:
            self._lease.move(shard)
        if takes_state:
            self._has_own_state()
            self._follow()
            if receive_state(self._ranks, self._optimizer_state) == "warm-up":
                self._warm_up()
        return not self.interrupted

    def step(self, tokens: int, *, loss: float | None = None, data_digest: tuple[int, ...] | None = None) -> bool:
        """Count one inner step; do what rank 0 planned. ``loss`` and ``data_digest`` are for rank 0 to tell."""
        self.global_step = min(self.global_step + 1, self.total_steps)
        word = self._boundary(Plan(tokens=tokens)).word
        self._check(word)
        return word is not Word.STOP and self.global_step < self.total_steps

    def saved_checkpoint(self, outer_step: int, path: str) -> None:
        """Rank 0 says it."""

    def metrics(self) -> dict[str, float]:
        """Rank 0 has them, and it is the one that logs."""
        return {}

    def finish(self, *, interrupted: Callable[[], bool] = never) -> bool:
        """Wait until rank 0 has the final global values, and take them from there."""
        self._interrupted = interrupted
        if self._follow() is Word.GIVE_UP:
            return False
        self.restore()
        self._ranks.share(None)
        return True

    def leave(self, reason: str, *, drain_seconds: float = 0.0, for_good: bool = True) -> None:
        """Go on with rank 0 until that has taken leave."""
        self._follow()
        self._ranks.share(None)

    def _follow(self) -> Word:
        """Boundary after boundary, until rank 0 says how its loop ended."""
        word = Word.GO_ON
        while word not in (Word.DONE, Word.GIVE_UP):
            word = self._boundary(Plan()).word
            self._check(word)
        return word

    def _check(self, word: Word) -> None:
        if word is Word.FAILED:
            raise DiLoCoError(
                f"rank 0 of learner {self.learner_id} failed, and with it this process (rank {self._ranks.rank}). The "
                "log of rank 0 says why."
            )

    def _count(self, steps: int, tokens: int) -> None:
        """Rank 0 keeps the accounts."""

    def _on_welcome(self) -> None:
        welcome: Any = from_wire(json.loads(self._ranks.share(None)))
        self._welcome = welcome
        layout = FragmentLayout.build(self._parameters.shapes, welcome.num_fragments, welcome.averaged)
        self._fragments = layout.fragments
        self._ranks.expect([fragment.num_parameters for fragment in layout.fragments])

    def _next_shard(self, own: int, interrupted: Callable[[], bool]) -> None:
        """Rank 0 has asked."""

    def _supply(self) -> None:
        for fragment in self._fragments:
            self._parameters.read(fragment)
        for _ in self._parameters.constants():
            pass

    def _value(self, fragment_index: int) -> Tensor:
        return torch.empty(self._fragments[fragment_index].num_parameters, dtype=torch.float32)
