"""Checkpoints of the whole run: the syncer's values, and the Trainer checkpoints of learners that belong to them."""

from __future__ import annotations

from collections.abc import Collection

WAIT_SECONDS = 120.0  # for learners that save their own; who takes longer is left out


class JointCheckpoints:
    """One after the other: asked for, then written by the learners, then by the syncer.

    Args:
        every: outer steps between two of them; None: there are none.
        outer_step: t.
    """

    def __init__(self, every: int | None, outer_step: int) -> None:
        self._every = every
        self._outer_step = outer_step  # at which the last one was asked for
        self._paths: dict[int, str] = {}  # where each learner has saved its part, on its own machine
        self._waiting: set[int] = set()
        self._deadline: float | None = None  # while learners are writing

    def due(self, outer_step: int) -> bool:
        """It is time for the next, and none is being written."""
        if self._every is None or self._deadline is not None:
            return False
        return outer_step >= (self._outer_step // self._every + 1) * self._every

    def begin(self, outer_step: int, learner_ids: Collection[int], now: float) -> None:
        """These learners were asked for their parts."""
        self._outer_step, self._paths, self._waiting = outer_step, {}, set(learner_ids)
        self._deadline = now + WAIT_SECONDS

    def saved(self, learner_id: int, outer_step: int, path: str) -> None:
        """A learner has saved its part."""
        if outer_step == self._outer_step and learner_id in self._waiting:
            self._waiting.discard(learner_id)
            self._paths[learner_id] = path

    def gone(self, learner_id: int) -> None:
        """A learner is away: its part will not come."""
        self._waiting.discard(learner_id)

    def take(self, now: float) -> dict[int, str]:
        """The learners' parts, once, when all have saved that will; else empty."""
        if self._deadline is None or (self._waiting and now < self._deadline):
            return {}
        self._deadline = None
        return self._paths
