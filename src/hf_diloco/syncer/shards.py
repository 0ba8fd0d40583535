"""Leases shards of the training set to learners."""

from __future__ import annotations

from collections.abc import Sequence

from hf_diloco.core import messages as ms
from hf_diloco.core.leases import Leases
from hf_diloco.errors import MessageError
from hf_diloco.links.base import SyncerLinks
from hf_diloco.syncer.tape import Tape

_MOST_SHARDS = 1 << 20  # what a learner says is not to fill the syncer's memory


class Shards:
    """The table of leases, made when the first learner wants one, and what is said about it.

    Args:
        links: to send on.
        tape: to write to.
        num_passes: over each shard so far, of a run that goes on.
    """

    def __init__(self, links: SyncerLinks, tape: Tape, num_passes: Sequence[int] = ()) -> None:
        self._links, self._tape = links, tape
        self._table = Leases(len(num_passes), num_passes) if num_passes else None
        self._told: set[int] = set()  # learners that know that they share

    @property
    def num_passes(self) -> list[int]:
        """How often each shard was read to its end; empty if no learner leases."""
        return list(self._table.num_passes) if self._table is not None else []

    def join(self, learner_id: int, hello: ms.Hello, now: float) -> None:
        """A learner is here and may say what it reads.

        Raises:
            MessageError: there is no such shard, or there would be too many.
        """
        if hello.shard is None:
            return
        if self._table is None:
            num_shards = hello.num_shards or 0
            if not 0 < num_shards <= _MOST_SHARDS:
                raise MessageError(f"num_shards={num_shards} is out of range; it must be 1 to {_MOST_SHARDS}")
            self._table = Leases(num_shards)
        _check(hello.shard, self._table)
        self._lease(self._table, learner_id, self._table.claim(learner_id, hello.shard, now), now)

    def next(self, learner_id: int, message: ms.WantShard, now: float) -> bool:
        """A learner has read a shard to its end; True if it gets another one.

        Raises:
            MessageError: there is no such shard.
        """
        if self._table is None:
            raise MessageError("a learner that has not said which shard it reads wants the next")
        _check(message.shard, self._table)
        shard = self._table.next(learner_id, message.shard, now)
        self._lease(self._table, learner_id, shard, now, num_passes=message.num_passes)
        return shard != message.shard

    def leave(self, learner_id: int, now: float, *, for_good: bool) -> None:
        """A learner's link is gone, or it took leave."""
        if self._table is None:
            return
        if for_good:
            self._table.end(learner_id)
        else:
            self._table.away(learner_id, now)

    def _lease(self, table: Leases, learner_id: int, shard: int, now: float, *, num_passes: int = 0) -> None:
        self._tape.write("lease", learner_id=learner_id, shard=shard)
        self._links.send([learner_id], ms.LeaseShard(shard=shard, num_passes=num_passes))
        others = [other for other in table.holders(shard, now) if other != learner_id]
        if others and learner_id not in self._told:
            self._told.add(learner_id)
            text = (
                f"learner {learner_id} reads shard {shard} of the training set, as learner {others[0]} does: there are "
                f"more learners than shards (num_shards={table.num_shards}). Start the run with HF_DILOCO_NUM_SHARDS "
                "at least the number of learners there will ever be."
            )
            self._tape.warn(text, [learner_id, others[0]])
            self._links.send([learner_id], ms.Notice(text=text))


def _check(shard: int, table: Leases) -> None:
    if not 0 <= shard < table.num_shards:
        raise MessageError(f"there is no shard {shard}, there are {table.num_shards}")
