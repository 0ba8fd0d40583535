"""How fast things go: the grace window (paper Eq. 3) and the averages that feed it."""

from __future__ import annotations

import math
from typing import Protocol

_WEIGHT_OF_NEWEST = 0.2


def grace_seconds(
    *,
    step_seconds: float,
    quorum_seconds: float,
    sync_seconds: float,
    overlap_steps: int,
    grace_fraction: float,
    max_grace_seconds: float,
) -> float:
    """How long a round may wait for stragglers without delaying anybody (paper Eq. 3).

    ``gamma * (tau * step - (quorum + sync))``, within 0 and ``max_grace_seconds``.

    Args:
        step_seconds: inner step of the learner that sets the pace (xi_step).
        quorum_seconds: from the opening of a round to its quorum (xi_quorum).
        sync_seconds: from its closing to the merged value being applied (xi_sync).
        overlap_steps: inner steps that a merge may take (tau).
        grace_fraction: share of the slack that may be used (gamma).
        max_grace_seconds: upper bound.
    """
    slack_seconds = overlap_steps * step_seconds - (quorum_seconds + sync_seconds)
    return min(max(grace_fraction * slack_seconds, 0.0), max_grace_seconds)


class Average:
    """Exponential moving average that starts at its first value."""

    def __init__(self) -> None:
        self.value: float | None = None

    def add(self, value: float) -> None:
        """Take one measurement in; negative ones (a clock set back) count as 0."""
        value = max(value, 0.0)
        self.value = value if self.value is None else self.value + _WEIGHT_OF_NEWEST * (value - self.value)

    def get(self, default: float = 0.0) -> float:
        """The average, or ``default`` before the first value."""
        return default if self.value is None else self.value


class RoundsConfig(Protocol):
    """The settings that the protocol needs; :class:`hf_diloco.SyncerConfig` has them."""

    @property
    def num_fragments(self) -> int: ...  # noqa: D102
    @property
    def sync_every(self) -> int: ...  # noqa: D102
    @property
    def min_quorum(self) -> int: ...  # noqa: D102
    @property
    def expected_learners(self) -> int: ...  # noqa: D102
    @property
    def start_timeout_seconds(self) -> float: ...  # noqa: D102
    @property
    def overlap_steps(self) -> int: ...  # noqa: D102
    @property
    def max_open_rounds(self) -> int: ...  # noqa: D102
    @property
    def grace_fraction(self) -> float: ...  # noqa: D102
    @property
    def max_grace_seconds(self) -> float: ...  # noqa: D102
    @property
    def on_arrival(self) -> str: ...  # noqa: D102
    @property
    def finish_wait_seconds(self) -> float: ...  # noqa: D102
    @property
    def linger_seconds(self) -> float: ...  # noqa: D102
    @property
    def link_timeout_seconds(self) -> float: ...  # noqa: D102


class Pace:
    """What the run has measured of itself, and the two decisions that follow from it."""

    def __init__(self, config: RoundsConfig) -> None:
        self._config = config
        self.quorum_seconds = Average()  # from opening to quorum
        self.sync_seconds = Average()  # from closing to applied
        self.round_seconds = Average()  # from opening to merged
        self.steps_between_merges = Average()  # outer steps, of one fragment

    def grace_seconds(self, *, step_seconds: float, slowest_seconds: float) -> float:
        """Eq. 3 with a floor.

        Without the floor the slack is negative as soon as a return trip takes tau steps, and everybody merges alone.

        Args:
            step_seconds: inner step of the learner that sets the pace.
            slowest_seconds: the floor: the longest inner step plus return trip among those who may still answer.
        """
        by_eq_3 = grace_seconds(
            step_seconds=step_seconds,
            quorum_seconds=self.quorum_seconds.get(),
            sync_seconds=self.sync_seconds.get(),
            overlap_steps=self._config.overlap_steps,
            grace_fraction=self._config.grace_fraction,
            max_grace_seconds=self._config.max_grace_seconds,
        )
        return min(max(by_eq_3, slowest_seconds), self._config.max_grace_seconds)

    def most_open_rounds(self, step_seconds: float) -> int:
        """As many as fragments fall due while one round lasts, at least tau; fewer would stretch H."""
        due_every_seconds = step_seconds * self._config.sync_every / self._config.num_fragments
        most = self._config.max_open_rounds
        if self.round_seconds.get() >= most * due_every_seconds:
            return most
        return min(max(math.ceil(self.round_seconds.get() / due_every_seconds), self._config.overlap_steps), most)
