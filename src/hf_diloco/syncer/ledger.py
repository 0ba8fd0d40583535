"""Who has trained what, and what was merged of it: for the people who watch, and for checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hf_diloco.links.base import SyncerLinks
from hf_diloco.syncer.roster import Account
from hf_diloco.syncer.saved_run import Facts


class Ledger:
    """The accounts of all learner ids, and the count of merges.

    Args:
        num_fragments: a learner's tokens count as merged by the mean over the fragments.
    """

    def __init__(self, num_fragments: int) -> None:
        self.accounts: dict[int, Account] = {}
        self.num_merges = 0
        self.num_participants = 0  # of all merges
        self.last_participants: list[int] = []
        self._num_fragments = num_fragments

    def restore(self, facts: Facts) -> None:
        """Go on from a checkpoint's."""
        self.accounts = {values["learner_id"]: Account(**values) for values in facts.accounts}
        self.num_merges, self.num_participants = facts.num_merges, facts.num_participants

    def account(self, learner_id: int) -> Account:
        """Of this id; a new one if it has none."""
        return self.accounts.setdefault(learner_id, Account(learner_id))

    def add_merge(self, participants: Sequence[Mapping[str, Any]]) -> None:
        """One merge more, with what the tape says of its participants."""
        for participant in participants:
            self.account(participant["learner_id"]).tokens_merged += participant["tokens"] / self._num_fragments
        self.num_merges += 1
        self.num_participants += len(participants)
        self.last_participants = sorted(participant["learner_id"] for participant in participants)

    def status(self, states: Mapping[int, str], links: SyncerLinks) -> dict[str, Any]:
        """Its part of ``status.json``; ``states`` in one word each."""
        moved = [links.bytes_moved(learner_id) for learner_id in self.accounts]
        return {
            "merges": self.num_merges,
            "last_participants": self.last_participants,
            "mean_participants": self.num_participants / self.num_merges if self.num_merges else None,
            "bytes_received": sum(received for received, _ in moved),
            "bytes_sent": sum(sent for _, sent in moved),
            "learners": [
                account.to_dict(states.get(learner_id, "absent"))
                for learner_id, account in sorted(self.accounts.items())
            ],
        }
