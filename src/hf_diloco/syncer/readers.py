"""Finds learners that read the same training data."""

from __future__ import annotations

from hf_diloco.core import messages as ms
from hf_diloco.core.data_digest import SAME_DATA_OVERLAP, overlap
from hf_diloco.links.base import SyncerLinks
from hf_diloco.syncer.tape import Tape


class Readers:
    """What the learners that are here have read; two that have read the same are told so, once.

    Only learners that are here at the same time are compared: who takes the place of another, or a shard that another
    has given up, reads it again rightly.

    Args:
        links: to send on.
        tape: to write to.
    """

    def __init__(self, links: SyncerLinks, tape: Tape) -> None:
        self._links, self._tape = links, tape
        self._digests: dict[int, tuple[int, ...]] = {}  # by learner
        self._told: set[tuple[int, int]] = set()

    def compare(self, learner_id: int, digest: tuple[int, ...]) -> None:
        """A learner says what it has read."""
        self._digests[learner_id] = digest
        for other, others in self._digests.items():
            pair = min(other, learner_id), max(other, learner_id)
            if other != learner_id and pair not in self._told and overlap(digest, others) >= SAME_DATA_OVERLAP:
                self._told.add(pair)
                self._tell(pair)

    def forget(self, learner_id: int) -> None:
        """The learner is gone, or reads something else from now on."""
        self._digests.pop(learner_id, None)

    def _tell(self, pair: tuple[int, int]) -> None:
        text = (
            f"learners {pair[0]} and {pair[1]} read the same training data, so the second adds little. Give each its "
            "own part: train_dataset=shard_dataset(dataset) in the training script, with HF_DILOCO_NUM_SHARDS at "
            "least the number of learners."
        )
        self._tape.warn(text, pair)
        self._links.send(list(pair), ms.Notice(text=text))
