"""An onlooker of one protocol machine: works out by itself what must follow from each event, from the rules alone."""

from dataclasses import dataclass, field

from rounds_world import NOTHING

from hf_diloco.config import SyncerConfig
from hf_diloco.core import events as ev
from hf_diloco.core.messages import RoundId, Version
from hf_diloco.core.recovery import Recovered
from hf_diloco.core.rounds import Rounds


@dataclass
class Seen:
    """What an onlooker knows of one learner from the events and actions alone."""

    incarnation: str
    versions: list[Version | None]
    in_flight: list[Version | None]
    linked: bool = True
    left: bool = False
    training: bool = False
    finished: bool = False
    released: bool = False
    steps: int = 0
    step_seconds: float = 1.0
    progressed_at: float | None = None
    to_merge: set[int] = field(default_factory=set)
    leaving_at: float = 0.0
    absent_since: float = 0.0

    def present(self, now: float) -> bool:
        if not self.linked or not self.training or self.released or None in self.versions:
            return False
        if self.finished or self.to_merge:
            return True
        return self.progressed_at is not None and now < self.progressed_at + max(30.0, 10 * self.step_seconds)


@dataclass
class SeenRound:
    fragment_index: int
    final: bool
    asked: dict[int, float] = field(default_factory=dict)
    answered: set[int] = field(default_factory=set)
    num_participants: int = 0
    quorum_at: float | None = None
    close_at: float = 0.0


class Onlooker:
    """Feeds one machine and works out by itself which rounds must be open after each event."""

    def __init__(self, config: SyncerConfig, recovered: Recovered | None = None) -> None:
        self.config, self.now = config, 0.0
        self.rounds = Rounds(config, incarnation=2 if recovered else 1, recovered=recovered)
        self.learners: dict[int, Seen] = {}
        self.collecting: dict[RoundId, SeenRound] = {}
        self.known_rounds: list[RoundId] = []
        self.merging: list[ev.MergeRound] = []
        self.participants: dict[RoundId, list[tuple[int, str]]] = {}
        self.wake_at: float | None = None
        self.num_merges = 0

    def handle(self, event: ev.Event) -> None:
        t, versions = self.rounds.outer_step, list(self.rounds.current)
        answer_counts = self._observe(event)
        actions = self.rounds.handle(event, self.now)
        assert isinstance(actions[-1], ev.WaitUntil)
        self.wake_at = actions[-1].time
        assert self.wake_at is None or self.wake_at > self.now
        assert sum(isinstance(action, ev.WaitUntil) for action in actions) == 1
        assert self.rounds.outer_step >= t
        assert all(new >= old for new, old in zip(self.rounds.current, versions, strict=True))
        self._check_acceptance(event, answer_counts, actions)
        self._check_closing(actions)
        for action in actions:
            self._take_action(action)
        assert len(self.rounds.open_rounds) <= self.config.max_open_rounds
        assert {r.id for r in self.rounds.open_rounds.values() if r.collecting} == self.collecting.keys()

    def _observe(self, event: ev.Event) -> bool:
        """Note the event; whether it is an answer that counts."""
        seen = self.learners.get(getattr(event, "learner_id", -1))
        match event:
            case ev.Joined():
                if seen is None or seen.left or seen.incarnation != event.incarnation:
                    num = self.config.num_fragments
                    seen = self.learners[event.learner_id] = Seen(event.incarnation, [None] * num, [None] * num)
                if len(event.held) == self.config.num_fragments:
                    seen.versions = [None if version == NOTHING else version for version in event.held]
                seen.in_flight = [None] * self.config.num_fragments
                seen.linked, seen.released, seen.to_merge = True, False, set()
            case ev.Left() if seen:
                seen.absent_since = self.now if seen.linked else seen.absent_since
                seen.linked, seen.left = False, seen.left or event.for_good
            case ev.Leaving() if seen and seen.linked:
                seen.to_merge, seen.leaving_at = set(range(self.config.num_fragments)), self.now
            case ev.Reported() if seen and seen.linked:
                seen.step_seconds = event.step_seconds or seen.step_seconds
                if event.steps > seen.steps:
                    seen.steps, seen.progressed_at = event.steps, self.now
                seen.finished |= event.finished
            case ev.Acknowledged() if seen and 0 <= event.fragment_index < self.config.num_fragments:
                if seen.in_flight[event.fragment_index] == event.version:
                    seen.in_flight[event.fragment_index], seen.versions[event.fragment_index] = None, event.version
            case ev.FullNeeded() if seen and 0 <= event.fragment_index < self.config.num_fragments:
                seen.versions[event.fragment_index] = seen.in_flight[event.fragment_index] = None
        if isinstance(event, ev.Joined | ev.Left):
            for round in self.collecting.values():
                if event.learner_id not in round.answered:
                    round.asked.pop(event.learner_id, None)
        round = self.collecting.get(event.round) if isinstance(event, ev.Answered) and seen else None
        if round is None or round.fragment_index != event.fragment_index:
            return False
        if event.learner_id in round.answered or event.learner_id not in round.asked:
            return False
        round.answered.add(event.learner_id)
        if round.asked[event.learner_id] >= seen.leaving_at:
            seen.to_merge.discard(event.fragment_index)
        return not event.refused and event.steps > 0 and event.weight > 0

    def _check_acceptance(self, event: ev.Event, counts: bool, actions: list[ev.Action]) -> None:
        accepted = [action for action in actions if isinstance(action, ev.AcceptUpdate)]
        if self.config.on_arrival == "carry":
            assert len(accepted) == counts
        assert len(accepted) <= counts
        for action in accepted:
            assert action.round in self.collecting
            self.collecting[action.round].num_participants += 1
            self.participants.setdefault(action.round, []).append((event.learner_id, event.update_id))

    def _check_closing(self, actions: list[ev.Action]) -> None:
        started = {action.learner_id for action in actions if isinstance(action, ev.StartTraining)}
        for learner_id in started:
            self.learners[learner_id].training = True
        closed = {action.round for action in actions if isinstance(action, ev.MergeRound | ev.DiscardRound)}
        for round_id, round in list(self.collecting.items()):
            assert (round_id in closed) == self._should_close(round_id, round), (round_id, round, self.now)
            if round_id in closed:
                del self.collecting[round_id]

    def _should_close(self, round_id: RoundId, round: SeenRound) -> bool:
        present = {who for who, seen in self.learners.items() if seen.present(self.now)}
        if round.final:
            timeout = self.config.link_timeout_seconds
            gone = {who for who, seen in self.learners.items() if seen.training and not seen.linked and not seen.left}
            away = {who for who in gone if self.now < self.learners[who].absent_since + timeout}
            return present | away <= round.answered
        waiting = (present & round.asked.keys()) - round.answered
        if not waiting:
            return True
        if round.quorum_at is None and round.num_participants >= max(
            min(self.config.min_quorum, len(present & round.asked.keys())), 1
        ):
            round.quorum_at = self.now
            slowest = max(self.learners[who].step_seconds for who in waiting)
            open_round = self.rounds.open_rounds.get(round.fragment_index)
            if open_round is not None and open_round.id == round_id:
                grace, most = open_round.grace_seconds, self.config.max_grace_seconds
                assert min(slowest, most) <= grace <= most
                round.close_at = self.now + grace
            else:
                round.close_at = self.now  # only right if the window can be empty
                assert self.config.max_grace_seconds == 0
        return round.quorum_at is not None and self.now >= round.close_at

    def _take_action(self, action: ev.Action) -> None:
        match action:
            case ev.AskUpdates():
                assert action.learner_ids
                if action.round not in self.known_rounds:
                    self.known_rounds.append(action.round)
                for who in action.learner_ids:
                    round, seen = self._round(action.round, action.fragment_index), self.learners[who]
                    assert who not in round.asked, "asked twice"
                    assert seen.present(self.now), "asked while absent, idle or unhealed"
                    round.asked[who] = self.now
            case ev.MergeRound():
                assert action.version > self.rounds.current[action.fragment_index]
                assert list(action.participants) == self.participants.pop(action.round)
                self.merging.append(action)
                self.num_merges += 1
            case ev.DiscardRound():
                assert action.round not in self.participants
            case ev.Publish():
                open_round = self.rounds.open_rounds.get(action.fragment_index)
                assert open_round is None or open_round.collecting, "a value that may have been replaced already"
                for who in action.learner_ids:
                    seen = self.learners[who]
                    assert seen.linked
                    assert seen.in_flight[action.fragment_index] is None, "two publications under way"
                    assert action.base is None or action.base == seen.versions[action.fragment_index]
                    seen.in_flight[action.fragment_index] = action.version
            case ev.Release():
                seen = self.learners[action.learner_id]
                assert seen.versions == self.rounds.current
                seen.released = True
        for open_round in self.rounds.open_rounds.values():
            if open_round.collecting:  # also one that waits with nobody asked yet: a final one
                self._round(open_round.id, open_round.fragment_index)

    def _round(self, round_id: RoundId, fragment_index: int) -> SeenRound:
        if round_id not in self.collecting:
            final = self.rounds.open_rounds[fragment_index].final
            self.collecting[round_id] = SeenRound(fragment_index, final)
        return self.collecting[round_id]
