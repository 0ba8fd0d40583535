"""Which learner reads which shard of the training set: a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ABSENT_SECONDS = 120.0  # a learner that is away for longer has given its shard up


@dataclass
class _Lease:
    shard: int
    absent_since: float | None = None


class Leases:
    """Shards of the training set and the learners that hold them.

    A shard has one holder or none; two only while there are more learners than shards. A learner begins with its home
    shard, if nobody holds it. At the end of each pass over a shard it takes, of its own and those that nobody holds,
    the one that was read to its end least often (at a tie, not its own), so that shards without a learner are read in
    turn.

    A syncer that comes back learns from the learners' claims who reads what.

    Args:
        num_shards: of the training set.
        num_passes: how often each was read to its end so far.
    """

    def __init__(self, num_shards: int, num_passes: Sequence[int] = ()) -> None:
        self.num_shards = num_shards
        self.num_passes = list(num_passes) or [0] * num_shards
        self._leases: dict[int, _Lease] = {}  # by learner

    def claim(self, learner_id: int, shard: int, now: float) -> int:
        """A learner that is here again reads this shard, or would begin with it: the shard that it now holds."""
        taken = self._taken_from(learner_id, now)
        return self._give(learner_id, self._least_read(taken, shard) if shard in taken else shard)

    def next(self, learner_id: int, shard: int, now: float) -> int:
        """A learner has read this shard to its end: the shard that it now holds."""
        self.num_passes[shard] += 1
        return self._give(learner_id, self._least_read(self._taken_from(learner_id, now), shard))

    def away(self, learner_id: int, now: float) -> None:
        """Its link is down; it keeps its shard for ``ABSENT_SECONDS``."""
        if lease := self._leases.get(learner_id):
            lease.absent_since = now

    def end(self, learner_id: int) -> None:
        """It has left for good."""
        self._leases.pop(learner_id, None)

    def holders(self, shard: int, now: float) -> list[int]:
        """The learners that hold a shard."""
        return sorted(who for who, lease in self._held(now).items() if lease.shard == shard)

    def _held(self, now: float) -> dict[int, _Lease]:
        return {
            who: lease
            for who, lease in self._leases.items()
            if lease.absent_since is None or now - lease.absent_since <= ABSENT_SECONDS
        }

    def _taken_from(self, learner_id: int, now: float) -> set[int]:
        """Shards that others hold."""
        return {lease.shard for who, lease in self._held(now).items() if who != learner_id}

    def _least_read(self, taken: set[int], own: int) -> int:
        free = [shard for shard in range(self.num_shards) if shard not in taken]
        return min(free, key=lambda shard: (self.num_passes[shard], shard == own, shard), default=own)

    def _give(self, learner_id: int, shard: int) -> int:
        self._leases[learner_id] = _Lease(shard)
        return shard
