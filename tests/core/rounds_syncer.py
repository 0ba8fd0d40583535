"""The syncer of the protocol tests: symbolic values, and a disk that outlives the process.

A value says of each learner process up to which of its inner steps it is in there. Durable are the tape, a line when
it is written, and a checkpoint once all its fragments have been copied, one after the other, while merges go on.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from rounds_learner import Learner, Merge, Shipped, Value

from hf_diloco.config import SyncerConfig
from hf_diloco.core import events as ev
from hf_diloco.core.messages import RoundId, Version
from hf_diloco.core.recovery import Recovered, Recovery
from hf_diloco.core.rounds import Rounds
from hf_diloco.syncer.history import History


@dataclass(frozen=True)
class Kept:
    """One fragment in a checkpoint."""

    version: Version
    value: Value
    merged: Mapping[int, str]


@dataclass
class Checkpoint:
    known: frozenset[int]
    outer_step: int
    started: bool
    incarnation: int
    final: bool
    num_lines: int  # of the tape when it was begun
    fragments: list[Kept] = field(default_factory=list)


@dataclass
class Disk:
    tape: list[dict] = field(default_factory=list)
    checkpoint: Checkpoint | None = None
    published: dict[tuple[int, Version], Value] = field(default_factory=dict)  # for the checks, not for the syncer
    void: set[tuple[int, Version]] = field(default_factory=set)  # ... and what a recovery went on without
    merged_in: dict[str, tuple[int, Version]] = field(default_factory=dict)  # by update id: fragment and version
    merges: list[Merge] = field(default_factory=list)


class Syncer:
    """One syncer process."""

    def __init__(self, config: SyncerConfig, disk: Disk) -> None:
        self.config, self.disk, self.alive = config, disk, True
        self.incarnation = 1 + sum(line["kind"] == "start" for line in disk.tape)
        num, kept = config.num_fragments, disk.checkpoint
        self.rounds = Rounds(config, incarnation=self.incarnation)
        self.recovery: Recovery | None = None
        self.fragments = [Kept(Version(self.incarnation, 0), {}, {})] * num
        self.previous: list[Value] = [{}] * num
        self.accepted: dict[RoundId, list[tuple[Learner, Shipped]]] = {}
        self.known: set[int] = set()
        self.linked: dict[int, Learner] = {}
        self._events: deque[ev.Event] = deque()
        self._history: History | None = None
        if kept is not None:
            self._read(kept)
        else:
            for index in range(num):
                self._publishable(index)
        disk.tape.append({"kind": "start", "incarnation": self.incarnation})

    def _read(self, kept: Checkpoint) -> None:
        self.fragments = list(kept.fragments)
        held, merged = [each.version for each in kept.fragments], [each.merged for each in kept.fragments]
        history = History(
            held, merged, set(kept.known), kept.incarnation, kept.outer_step, final=kept.final,
            all_left=kept.started and not kept.known,
        )  # fmt: skip
        self._history = history.read(self.disk.tape[kept.num_lines :])
        self._started = kept.started
        self.known = set(history.known_learners)
        self._ended = history.final or (kept.started and history.all_left)
        vouched = [made.keys() for made in history.made]
        self.recovery = Recovery(history.held, history.known_learners, vouched, ended=self._ended)

    # ------------------------------------------------------------------------------------------------- what it is told

    def tell(self, event: ev.Event, now: float, perform: Callable[[ev.Action], None]) -> None:
        """Take one event in, and do what follows from it: here what concerns values, by ``perform`` the rest."""
        self._events.append(event)
        while self._events:
            for action in (self.recovery or self.rounds).handle(self._events.popleft(), now):
                if isinstance(action, ev.EndRecovery):
                    self._end_recovery()
                else:
                    perform(action)

    def join(self, learner: Learner, hello: ev.Joined) -> None:
        self.known.add(learner.learner_id)
        self.linked[learner.learner_id] = learner
        self.disk.tape.append({"kind": "join", "learner_id": learner.learner_id})

    def leave(self, event: ev.Left) -> None:
        self.linked.pop(event.learner_id, None)
        if event.for_good:
            self.known.discard(event.learner_id)
        self.disk.tape.append({"kind": "leave", "learner_id": event.learner_id, "for_good": event.for_good})

    def merge(self, action: ev.MergeRound, now: float, given_up: Mapping[tuple[str, int], int]) -> None:
        """Under ``carry`` every update must begin where the last one of its process ended in this very value."""
        index, updates = action.fragment_index, self.accepted.pop(action.round)
        assert [(who.learner_id, update.update_id) for who, update in updates] == list(action.participants)
        before = self.fragments[index]
        value, merged = dict(before.value), dict(before.merged)
        for who, update in updates:
            end = value.get(who.incarnation, 0)
            if self.config.on_arrival == "carry" and update.first != given_up.get((who.incarnation, index)):
                assert update.first == end, f"{who.incarnation}: {update.first}..{update.last} merged after 0..{end}"
            assert update.first >= end
            value[who.incarnation], merged[who.learner_id] = update.last, update.update_id
            assert update.update_id not in self.disk.merged_in, "merged twice"
            self.disk.merged_in[update.update_id] = index, action.version
        assert action.version > before.version
        self.previous[index], self.fragments[index] = before.value, Kept(action.version, value, merged)
        self._publishable(index)
        self.disk.merges.append(Merge(now, action, self.rounds.phase))
        participants = [{"learner_id": who, "update_id": update_id} for who, update_id in action.participants]
        self.disk.tape.append(
            {"kind": "round", "fragment_index": index, "version": list(action.version), "digest": digest(value),
             "participants": participants}
        )  # fmt: skip

    def _publishable(self, index: int) -> None:
        key = (index, self.fragments[index].version)
        assert self.disk.published.setdefault(key, self.fragments[index].value) == self.fragments[index].value

    # ------------------------------------------------------------------------------------------------------ checkpoint

    def begin_checkpoint(self) -> Checkpoint:
        return Checkpoint(
            frozenset(self.known),
            self.rounds.outer_step,
            self.rounds.started,
            self.incarnation,
            self.rounds.phase == "saving",
            len(self.disk.tape),
        )

    def may_checkpoint(self) -> bool:
        return self.recovery is None and self.rounds.has_values and self.rounds.phase in ("training", "draining")

    # -------------------------------------------------------------------------------------------------------- recovery

    def take(self, index: int, version: Version, value: Value) -> bool:
        """A value that a learner handed back; whether it is what the tape says."""
        history = self._history
        assert history is not None
        if version not in history.made[index] or version <= self.fragments[index].version:
            return False
        assert history.digest(index, version) == digest(value)
        self.fragments[index] = Kept(version, value, history.merged_in(index, version))
        return True

    def _end_recovery(self) -> None:
        assert self.recovery is not None
        assert self._history is not None
        adopted = [kept.version for kept in self.fragments]
        assert adopted == self.recovery.held
        for learner in self.linked.values():  # all of them have reported, and applied nothing since
            for holding, version in zip(learner.fragments, adopted, strict=True):
                assert holding.anchor is None or holding.anchor <= version or learner.link_is_lost, (
                    f"{learner.incarnation} reports {holding.anchor}, the run goes on from {version}"
                )
        self.disk.void |= {(index, version) for index, version in self.disk.published if version > adopted[index]}
        self.disk.merged_in = {who: where for who, where in self.disk.merged_in.items() if where not in self.disk.void}
        outer_step = max(self._history.outer_step, *(version.outer_step for version in adopted))
        recovered = Recovered(
            held=adopted, merged=[kept.merged for kept in self.fragments], outer_step=outer_step,
            started=self._started, ended=self._ended,
        )  # fmt: skip
        lines = [{"adopted": list(kept.version), "digest": digest(kept.value)} for kept in self.fragments]
        self.disk.tape.append(
            {"kind": "recovered", "incarnation": self.incarnation, "outer_step": outer_step, "fragments": lines}
        )
        self.previous = [kept.value for kept in self.fragments]
        self.fragments = [
            Kept(Version(self.incarnation, kept.version.outer_step), kept.value, kept.merged) for kept in self.fragments
        ]
        for index in range(len(self.fragments)):
            self._publishable(index)
        self._events.extend([*self.recovery.said(), ev.Tick()])
        self.rounds = Rounds(self.config, incarnation=self.incarnation, recovered=recovered)
        self.recovery = None


def digest(value: Value) -> str:
    return repr(sorted(value.items()))
