"""Whether two learners read the same examples, told from a few hashes of what each has read.

A learner keeps the ``NUM_HASHES`` smallest hashes of the different examples that it has read. Which ones these are
depends neither on the order of reading nor on how often an example came; and the smallest hashes of two learners
together are a fair sample of all that the two have read (bottom-k sketch, Cohen and Kaplan 2007).
"""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Iterable, Sequence

NUM_HASHES = 64
SAME_DATA_OVERLAP = 0.2  # from here on two learners read the same data: parts of one data set have 0, but for repeats
_BITS = 61  # what a message takes


class DataDigest:
    """The smallest hashes of the examples that were added."""

    def __init__(self) -> None:
        self.num_examples = 0  # with repeats
        self._hashes: list[int] = []  # in order

    def add(self, examples: Iterable[int]) -> None:
        """Add examples, each as a number that stands for its content (64 bits, signed)."""
        for example in examples:
            self.num_examples += 1
            content = hashlib.blake2b(example.to_bytes(8, "little", signed=True), digest_size=8).digest()
            value = int.from_bytes(content, "little") >> (64 - _BITS)
            if len(self._hashes) == NUM_HASHES and value >= self._hashes[-1]:
                continue
            place = bisect.bisect_left(self._hashes, value)
            if place == len(self._hashes) or self._hashes[place] != value:
                self._hashes.insert(place, value)
                del self._hashes[NUM_HASHES:]

    @property
    def hashes(self) -> tuple[int, ...]:
        """At most ``NUM_HASHES``, the smallest first."""
        return tuple(self._hashes)


def overlap(first: Sequence[int], second: Sequence[int]) -> float:
    """How much of what two learners have read, both have read: examples in common / examples in all, estimated.

    0.0 while one of the two has read fewer than ``NUM_HASHES`` different examples: too few to judge.
    """
    if min(len(first), len(second)) < NUM_HASHES:
        return 0.0
    sample = sorted({*first, *second})[:NUM_HASHES]
    return len(set(first) & set(second) & set(sample)) / len(sample)
