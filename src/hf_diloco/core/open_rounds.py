"""Rounds from their opening to the end of their merge: whom they ask, when they close, who was in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hf_diloco.core import events as ev
from hf_diloco.core.clock import DueFragments
from hf_diloco.core.members import Members
from hf_diloco.core.messages import RoundId, Version
from hf_diloco.core.pace import Pace, RoundsConfig


@dataclass
class OpenRound:
    """One round, from its opening to the end of its merge."""

    id: RoundId
    fragment_index: int
    outer_step: int  # of the version that it will make
    opened_at: float
    final: bool  # the last one of its fragment: waits for everybody who is present
    asked_at: dict[int, float] = field(default_factory=dict)
    answered: set[int] = field(default_factory=set)
    participants: list[tuple[int, str]] = field(default_factory=list)
    quorum_at: float | None = None
    grace_seconds: float = 0.0
    closed_at: float | None = None

    @property
    def collecting(self) -> bool:
        """It still takes updates."""
        return self.closed_at is None


class OpenRounds(dict[int, OpenRound]):
    """The open rounds by fragment, and of each fragment the round that closed last.

    Args:
        config: the run's settings.
        incarnation: of this syncer process.
        members: all learners.
        pace: takes the measurements of each round, and gives its grace window.
        last_closed: of each fragment; None: no round of it has closed yet.
    """

    def __init__(
        self,
        config: RoundsConfig,
        incarnation: int,
        members: Members,
        pace: Pace,
        last_closed: Sequence[RoundId | None],
    ) -> None:
        super().__init__()
        self.last_closed = list(last_closed)
        self._config, self._incarnation = config, incarnation
        self._members, self._pace = members, pace
        self._num_rounds = 0

    def open_due(self, due: DueFragments, current: Sequence[Version], now: float, *, final: bool) -> None:
        """Open a round of each fragment that is due, as long as more may be open and there is somebody to ask.

        Args:
            due: loses those whose rounds are opened.
            current: version of each fragment.
            now: the time.
            final: these are the last rounds; they wait for everybody.
        """
        limit = self._pace.most_open_rounds(self._members.pace_seconds(now))
        present = self._members.present(now)
        for fragment_index, outer_step in list(due.items()):
            if len(self) >= limit:
                return
            if fragment_index in self:
                continue
            if final and not present and not self._members.may_return(now):
                del due[fragment_index]  # nobody is left who could have something to merge
            elif final or any(member.may_be_asked(fragment_index) for member in present):
                del due[fragment_index]
                self._num_rounds += 1
                round_id = RoundId(self._incarnation, self._num_rounds)
                outer_step = max(outer_step, current[fragment_index].outer_step + 1)
                self[fragment_index] = OpenRound(round_id, fragment_index, outer_step, now, final)

    def ask(self, now: float) -> list[ev.Action]:
        """Ask those present who have not been asked."""
        actions: list[ev.Action] = []
        present = self._members.present(now)
        for round in self.values():
            if not round.collecting:
                continue
            learner_ids = tuple(
                member.learner_id
                for member in present
                if member.learner_id not in round.asked_at
                and member.learner_id not in round.answered
                and member.may_be_asked(round.fragment_index)
            )
            if learner_ids:
                round.asked_at.update(dict.fromkeys(learner_ids, now))
                for learner_id in learner_ids:
                    held = self._members[learner_id].fragments[round.fragment_index]
                    held.asked_round, held.asked_at = round.id, now
                actions.append(
                    ev.AskUpdates(learner_ids=learner_ids, round=round.id, fragment_index=round.fragment_index)
                )
        return actions

    def forget_asks(self, learner_id: int) -> None:
        """What was on its way on the old link is lost: ask again on the next one, unless the answer is here."""
        for round in self.values():
            if learner_id not in round.answered:
                round.asked_at.pop(learner_id, None)

    def close(self, now: float) -> list[ev.Action]:
        """Close the rounds in which all have answered, or whose grace window is over."""
        actions: list[ev.Action] = []
        present = {member.learner_id for member in self._members.present(now)}
        for round in list(self.values()):
            if not round.collecting:
                continue
            expected = present | self._members.may_return(now) if round.final else present & round.asked_at.keys()
            waiting = expected - round.answered
            if waiting and not round.final:
                needed = min(self._config.min_quorum, len(expected))
                if round.quorum_at is None and len(round.participants) >= max(needed, 1):
                    round.quorum_at = now
                    round.grace_seconds = self._grace(waiting, now)
                    self._pace.quorum_seconds.add(now - round.opened_at)
                if round.quorum_at is None or now < round.quorum_at + round.grace_seconds:
                    continue
            elif waiting:
                continue
            actions += self._close(round, now)
        return actions

    def _grace(self, waiting: set[int], now: float) -> float:
        members = [self._members[learner_id] for learner_id in waiting]
        slowest = max(member.step_seconds + member.return_trip_seconds.get(member.step_seconds) for member in members)
        return self._pace.grace_seconds(step_seconds=self._members.pace_seconds(now), slowest_seconds=slowest)

    def _close(self, round: OpenRound, now: float) -> list[ev.Action]:
        actions: list[ev.Action] = []
        fragment_index = round.fragment_index
        round.closed_at = now
        unanswered = tuple(sorted(self._members.linked(round.asked_at.keys() - round.answered)))
        if unanswered:
            actions.append(ev.CloseRound(learner_ids=unanswered, round=round.id, fragment_index=fragment_index))
        if not round.participants:
            self.last_closed[fragment_index] = round.id
            del self[fragment_index]
            return [*actions, ev.DiscardRound(round=round.id, fragment_index=fragment_index)]
        quorum_at = round.quorum_at if round.quorum_at is not None else now
        if round.quorum_at is None:
            self._pace.quorum_seconds.add(now - round.opened_at)
        merge = ev.MergeRound(
            round=round.id,
            fragment_index=fragment_index,
            version=Version(self._incarnation, round.outer_step),
            participants=tuple(round.participants),
            num_asked=len(round.asked_at),
            quorum_seconds=quorum_at - round.opened_at,
            grace_seconds=now - quorum_at,
        )
        return [*actions, merge]

    def take_merged(self, round_id: RoundId) -> OpenRound | None:
        """The round of this id whose merge is done, open no more; None: there is none that was being merged."""
        for fragment_index, round in self.items():
            if round.id == round_id and not round.collecting:
                self.last_closed[fragment_index] = round.id
                return self.pop(fragment_index)
        return None

    def merging(self) -> set[int]:
        """Fragments that are being merged."""
        return {fragment_index for fragment_index, round in self.items() if not round.collecting}

    def deadlines(self) -> list[float]:
        """When grace windows end."""
        return [
            round.quorum_at + round.grace_seconds
            for round in self.values()
            if round.collecting and round.quorum_at is not None
        ]
