"""Where every token went: merged once, lost with a killed process, overwritten, or held; from tape and witnesses.

Within one learner process (incarnation) and one fragment, the updates that were merged must cover the learner's steps
one after the other: the first one its steps 1 to a, the second a + 1 to b, and so on; nothing twice, nothing left out
but what the learner overwrote and wrote down. Each must carry exactly the tokens that the learner's witness saw in
those steps. What lies behind the last one is held, or was lost if the process is gone.

Pure functions over the lines of :func:`hf_diloco.syncer.tape.read_tape` and of :mod:`hf_diloco.chaos.witness`.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

Line = Mapping[str, Any]


@dataclass
class Trained:
    """What one learner process did, by its witness."""

    learner_id: int
    incarnation: str
    tokens: list[int] = field(default_factory=list)  # of each step
    applied: dict[int, list[Line]] = field(default_factory=lambda: defaultdict(list))  # by fragment, in order
    finished: bool = False  # it holds the final values


@dataclass
class Account:
    """Tokens of one learner process: a mean over the fragments, but ``trained``."""

    learner_id: int
    incarnation: str
    trained: int
    merged: float
    overwritten: float
    voided: float  # merged and applied, by a syncer that died and whose successor knew nothing of it
    unmerged: float  # held if it finished or lives, lost if it was killed
    finished: bool


@dataclass
class Books:
    """All accounts, and whatever does not add up."""

    accounts: list[Account]
    errors: list[str]

    @property
    def trained(self) -> int:
        """Tokens trained by all."""
        return sum(account.trained for account in self.accounts)

    @property
    def merged(self) -> float:
        """Tokens merged, each once."""
        return sum(account.merged for account in self.accounts)

    @property
    def overwritten(self) -> float:
        """Tokens that learners overwrote (and wrote down)."""
        return sum(account.overwritten for account in self.accounts)

    @property
    def voided(self) -> float:
        """Tokens of merges that went with a syncer, while the only learners that had them were away."""
        return sum(account.voided for account in self.accounts)

    @property
    def lost(self) -> float:
        """Tokens that went with processes that did not live to the end."""
        return sum(account.unmerged for account in self.accounts if not account.finished)

    @property
    def held(self) -> float:
        """Tokens that processes which came to the end of the run still had."""
        return sum(account.unmerged for account in self.accounts if account.finished)


def read_witness(path: Path) -> list[dict[str, Any]]:
    """All whole lines of a witness; none if it has not begun."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().split("\n")[:-1] if line]


@dataclass
class Merges:
    """The merges on a tape that count, and those that do not: made by a syncer that died before anybody had them."""

    valid: list[Line] = field(default_factory=list)
    void: dict[tuple[str, int], Line] = field(default_factory=dict)  # participant, by its update and fragment
    # Learners that had told the next syncer what they hold: nothing they had applied may be void.
    reporters: dict[tuple[str, int], set[int]] = field(default_factory=dict)


def read_merges(tape: Iterable[Line]) -> Merges:
    """All merges; where a syncer came back, those of before that are newer than what it goes on from are void."""
    found = Merges()
    reporters: set[int] = set()
    for line in tape:
        if line["kind"] == "start":
            reporters = set()
        elif line["kind"] == "join":
            reporters.add(line["learner_id"])
        elif line["kind"] == "round":
            found.valid.append(line)
        elif line["kind"] == "recovered":
            adopted = [fragment["adopted"] for fragment in line["fragments"]]
            void = [round for round in found.valid if round["version"] > adopted[round["fragment_index"]]]
            found.valid = [round for round in found.valid if round["version"] <= adopted[round["fragment_index"]]]
            for round in void:
                for participant in round["participants"]:
                    key = (participant["update_id"], round["fragment_index"])
                    found.void[key], found.reporters[key] = participant, set(reporters)
    return found


def keep_books(tape: Sequence[Line], witnesses: Mapping[int, Sequence[Line]]) -> Books:
    """Hold the tape against what the witnesses saw.

    Args:
        tape: of the syncer, from the beginning of the run.
        witnesses: lines by learner.
    """
    merges = read_merges(tape)
    everybody = {one.incarnation: one for learner_id, lines in witnesses.items() for one in _trained(learner_id, lines)}
    errors = [*_merged_twice(merges.valid), *_versions_that_go_back(merges.valid, everybody.values())]
    updates: dict[tuple[str, int], dict[str, Line]] = defaultdict(dict)
    for round in merges.valid:
        for participant in round["participants"]:
            incarnation = participant["update_id"].partition("/")[0]
            updates[incarnation, round["fragment_index"]][participant["update_id"]] = participant
    for incarnation in sorted({incarnation for incarnation, _ in updates} - everybody.keys()):
        errors.append(f"updates of {incarnation} were merged, a process that no witness knows")
    num_fragments = next((line["num_fragments"] for line in tape if line["kind"] == "layout"), 1)
    accounts = []
    for one in everybody.values():
        mine = [updates.get((one.incarnation, index), {}) for index in range(num_fragments)]
        account, wrong = _settle(one, mine, merges)
        accounts.append(account)
        errors += wrong
    return Books(accounts, errors)


def _trained(learner_id: int, lines: Iterable[Line]) -> list[Trained]:
    found: dict[str, Trained] = {}
    for line in lines:
        if not line["incarnation"]:
            continue
        one = found.setdefault(line["incarnation"], Trained(learner_id, line["incarnation"]))
        if line["kind"] == "step":
            one.tokens.append(line["tokens"])
        elif line["kind"] == "applied":
            one.applied[line["fragment_index"]].append(line)
        elif line["kind"] == "finished":
            one.finished = bool(line["holds_global"])
    return list(found.values())


def _merged_twice(rounds: Iterable[Line]) -> list[str]:
    counts = Counter(
        (participant["update_id"], round["fragment_index"]) for round in rounds for participant in round["participants"]
    )
    return [
        f"update {update_id} of fragment {index} was merged {count} times"
        for (update_id, index), count in counts.items()
        if count > 1
    ]


def _versions_that_go_back(rounds: Iterable[Line], everybody: Iterable[Trained]) -> list[str]:
    """On the tape, and as each learner saw them (which, told to start over, takes the same one again)."""
    errors = []
    made: dict[int, list[Any]] = defaultdict(list)
    for round in rounds:
        made[round["fragment_index"]].append(round["version"])
    for index, versions in made.items():
        errors += [_went_back(index, pair, "on the tape") for pair in pairwise(versions) if pair[1] <= pair[0]]
    for one in everybody:
        for index, lines in one.applied.items():
            pairs = pairwise(line["version"] for line in lines)
            errors += [_went_back(index, pair, f"at learner {one.learner_id}") for pair in pairs if pair[1] < pair[0]]
    return errors


def _went_back(index: int, pair: tuple[Any, Any], where: str) -> str:
    return f"fragment {index} went from version {pair[0]} to {pair[1]} {where}"


@dataclass
class _Settlement:
    """One process and one fragment: its steps, settled one after the other."""

    where: str
    total: Sequence[int]  # tokens of its first so many steps
    position: int = 0  # steps settled so far
    merged: int = 0
    overwritten: int = 0
    voided: int = 0
    errors: list[str] = field(default_factory=list)

    def read(self, line: Line, unseen: dict[str, Line], merges: Merges, learner_id: int) -> None:
        """It took a new version; ``unseen``: its merged updates that it has not been told of."""
        if update_id := line["merged"]:
            key = (update_id, line["fragment_index"])
            if update := unseen.pop(update_id, None):
                self.merge(update)
            elif update := merges.void.get(key):
                self.voided += self._advance(update["steps"])
                if learner_id in merges.reporters[key]:
                    self._wrong(f"it had applied the merge of {update_id} and said so, yet that is void")
            else:
                self._wrong(f"it took {update_id} for merged, the tape does not")
        self.overwritten += self._advance(line["overwritten_steps"])

    def merge(self, update: Line) -> None:
        """This update is in the global parameters."""
        begin, tokens = self.position, self._advance(update["steps"])
        self.merged += update["tokens"]
        if self.position < begin + update["steps"]:
            self._wrong(f"{update['update_id']} reaches to step {begin + update['steps']} of {len(self.total) - 1}")
        if tokens != update["tokens"]:
            self._wrong(
                f"{update['update_id']} has {update['tokens']} tokens for steps {begin + 1} to {self.position}, in "
                f"which {tokens} were trained"
            )

    @property
    def unmerged(self) -> int:
        """Tokens of the steps that are not settled."""
        return self.total[-1] - self.total[self.position]

    def _advance(self, steps: int) -> int:
        begin, self.position = self.position, min(self.position + steps, len(self.total) - 1)
        return self.total[self.position] - self.total[begin]

    def _wrong(self, text: str) -> None:
        self.errors.append(f"{self.where}: {text}")


def _settle(one: Trained, updates: Sequence[Mapping[str, Line]], merges: Merges) -> tuple[Account, list[str]]:
    """The account of one process; ``updates``: its merged ones, by fragment and id."""
    total = [0, *accumulate(one.tokens)]
    fragments = []
    for index, mine in enumerate(updates):
        where = f"learner {one.learner_id} ({one.incarnation}), fragment {index}"
        fragment, unseen = _Settlement(where, total), dict(mine)
        for line in one.applied.get(index, []):
            fragment.read(line, unseen, merges, one.learner_id)
        if len(unseen) > 1:  # it is not asked again before it has applied what merged it
            names = ", ".join(unseen)
            fragment.errors.append(f"{where}: {len(unseen)} updates were merged that it never knew of: {names}")
        for update in unseen.values():
            fragment.merge(update)
        fragments.append(fragment)
    count = max(len(fragments), 1)
    account = Account(
        learner_id=one.learner_id,
        incarnation=one.incarnation,
        trained=total[-1],
        merged=sum(fragment.merged for fragment in fragments) / count,
        overwritten=sum(fragment.overwritten for fragment in fragments) / count,
        voided=sum(fragment.voided for fragment in fragments) / count,
        unmerged=sum(fragment.unmerged for fragment in fragments) / count,
        finished=one.finished,
    )
    return account, [text for fragment in fragments for text in fragment.errors]
