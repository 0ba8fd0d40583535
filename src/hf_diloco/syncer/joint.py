"""A checkpoint of the whole run: the syncer's values, and the Trainer checkpoints of learners that belong to them."""

from __future__ import annotations

from collections.abc import Collection

WAIT_SECONDS = 120.0  # for learners that save their own; who takes longer is left out


class JointCheckpoint:
    """One that learners are writing their parts of.

    Args:
        outer_step: at which it was asked for.
        learner_ids: who was asked.
        now: seconds.
    """

    def __init__(self, outer_step: int, learner_ids: Collection[int], now: float) -> None:
        self.outer_step = outer_step
        self.paths: dict[int, str] = {}  # where each learner has saved, on its own machine
        self._waiting = set(learner_ids)
        self._deadline = now + WAIT_SECONDS

    def saved(self, learner_id: int, outer_step: int, path: str) -> None:
        """A learner has saved its part."""
        if outer_step == self.outer_step and learner_id in self._waiting:
            self._waiting.discard(learner_id)
            self.paths[learner_id] = path

    def gone(self, learner_id: int) -> None:
        """A learner is away: its part will not come."""
        self._waiting.discard(learner_id)

    def ready(self, now: float) -> bool:
        """All have saved that will."""
        return not self._waiting or now >= self._deadline
