"""The syncer's clock t, and which fragments are due as it goes on."""

from __future__ import annotations

from collections.abc import Iterable

from hf_diloco.core.members import Member
from hf_diloco.core.pace import RoundsConfig


class DueFragments(dict[int, int]):
    """Fragments that wait for their rounds: outer step of the next version by fragment, the oldest first.

    Fragment p is due at each step s with s mod H = floor(p * H / P). Due again while it waits, it keeps its place and
    takes the newer step.
    """

    def __init__(self, config: RoundsConfig) -> None:
        super().__init__()
        self._every, self._num_fragments = config.sync_every, config.num_fragments

    def advance(self, old: int, new: int) -> None:
        """t has gone on from ``old`` to ``new``; each fragment is due at most once for that."""
        for step in range(max(old + 1, new - self._every + 1), new + 1):
            for fragment_index in range(self._num_fragments):
                if step % self._every == fragment_index * self._every // self._num_fragments:
                    self[fragment_index] = step

    def hasten(self, present: Iterable[Member], open_fragments: Iterable[int], outer_step: int) -> None:
        """Who is about to leave does not wait for its fragments' turns."""
        for member in present:
            for fragment_index in member.to_merge.difference(self, open_fragments):
                if member.may_be_asked(fragment_index):
                    self[fragment_index] = outer_step

    def all_at(self, outer_step: int) -> None:
        """Once more, and for the last time, every fragment is due."""
        self.clear()
        self.update(dict.fromkeys(range(self._num_fragments), outer_step))
