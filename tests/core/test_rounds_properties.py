"""Properties that every sequence of events must keep: raw events, senseless ones too, and faults in a whole world."""

from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from rounds_learner import Speed
from rounds_world import NOTHING, World

from hf_diloco.config import SyncerConfig
from hf_diloco.core import events as ev
from hf_diloco.core.messages import RoundId, Version
from hf_diloco.core.rounds import Rounds

pytestmark = pytest.mark.fast

relaxed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


# ------------------------------------------------------------------------------------------------------- raw events


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
    absent_since: float = 0.0

    def present(self, now: float) -> bool:
        if not self.linked or not self.training or self.released or None in self.versions:
            return False
        if self.finished:
            return True
        return self.progressed_at is not None and now < self.progressed_at + max(30.0, 10 * self.step_seconds)


@dataclass
class SeenRound:
    fragment_index: int
    final: bool
    asked: set[int] = field(default_factory=set)
    answered: set[int] = field(default_factory=set)
    num_participants: int = 0
    quorum_at: float | None = None
    close_at: float = 0.0


class Onlooker:
    """Feeds one machine and works out by itself which rounds must be open after each event."""

    def __init__(self, config: SyncerConfig) -> None:
        self.config, self.rounds, self.now = config, Rounds(config), 0.0
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
                seen.linked, seen.released = True, False
            case ev.Left() if seen:
                seen.absent_since = self.now if seen.linked else seen.absent_since
                seen.linked, seen.left = False, seen.left or event.for_good
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
                    round.asked.discard(event.learner_id)
        round = self.collecting.get(event.round) if isinstance(event, ev.Answered) and seen else None
        if round is None or round.fragment_index != event.fragment_index:
            return False
        if event.learner_id in round.answered or event.learner_id not in round.asked:
            return False
        round.answered.add(event.learner_id)
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
        waiting = (present & round.asked) - round.answered
        if not waiting:
            return True
        if round.quorum_at is None and round.num_participants >= max(
            min(self.config.min_quorum, len(present & round.asked)), 1
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
                    round.asked.add(who)
            case ev.MergeRound():
                assert list(action.participants) == self.participants.pop(action.round)
                self.merging.append(action)
                self.num_merges += 1
            case ev.DiscardRound():
                assert action.round not in self.participants
            case ev.Publish():
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


NUM_FRAGMENTS = 3
raw_configs = st.builds(
    SyncerConfig,
    num_fragments=st.just(NUM_FRAGMENTS),
    sync_every=st.integers(2, 5),
    min_quorum=st.integers(1, 3),
    expected_learners=st.just(3),
    start_timeout_seconds=st.sampled_from([0.0, 5.0]),
    max_open_rounds=st.integers(1, 3),
    max_grace_seconds=st.sampled_from([0.0, 2.0]),
    finish_wait_seconds=st.just(20.0),
    on_arrival=st.sampled_from(["carry", "overwrite"]),
)
# each four bytes are an event: what, learner, and two numbers that choose among what there is, or nonsense
raw_bytes = st.binary(min_size=200, max_size=900)


def make_event(what: int, who: int, a: int, b: int, onlooker: Onlooker, steps: dict[int, int]) -> ev.Event:
    if what >= 20:
        what, who, a, b = make_sensible(what, who, a, b, onlooker)
    rounds, current, seen = onlooker.rounds, onlooker.rounds.current, onlooker.learners.get(who)
    fragment = a % (NUM_FRAGMENTS + 1) if b == 7 else a % NUM_FRAGMENTS
    if what <= 1:
        held = [(), tuple(current), (NOTHING,) * NUM_FRAGMENTS, tuple(current[:1])][b % 4]
        return ev.Joined(learner_id=who, incarnation=f"{a // 4}", global_step=a, held=held)
    if what == 2:
        return ev.Left(learner_id=who, for_good=a == 0)
    if what == 3:
        return ev.ValuesSupplied()
    if what <= 7:
        steps[who] = steps.get(who, 0) + a % 3
        g, finished = rounds.outer_step + b - 3, what == 4 and b == 0
        seconds = [0.0, 1e-320, 1e9, 0.5, 1.0, 1.0, 1.0, 1.0][b]
        return ev.Reported(learner_id=who, global_step=g, steps=steps[who], step_seconds=seconds, finished=finished)
    if what <= 12:
        open_ids = [round.id for round in rounds.open_rounds.values()]
        choice = [*open_ids, *onlooker.known_rounds[-3:], RoundId(1, 10**6)] if a == 7 else open_ids or [RoundId(1, 1)]
        round_id = choice[b % len(choice)]
        fragments = {round.id: round.fragment_index for round in rounds.open_rounds.values()}
        anchor = seen.versions[0] if seen and seen.versions[0] and a == 1 else current[fragments.get(round_id, 0)]
        return ev.Answered(
            learner_id=who,
            round=round_id,
            fragment_index=fragment if a == 6 else fragments.get(round_id, fragment),
            update_id=f"{who}/{round_id.number}",
            steps=a,
            weight=float(a),
            anchor=anchor,
            held_seconds=b * 0.3,
            refused=a == 5,
        )
    if what <= 14 and onlooker.merging:
        return ev.Merged(round=onlooker.merging.pop(a % len(onlooker.merging)).round)
    if what <= 17:
        in_flight = [f for f in range(NUM_FRAGMENTS) if seen and seen.in_flight[f]]
        index = in_flight[a % len(in_flight)] if in_flight else fragment
        version = (seen.in_flight[index] if in_flight else None) or Version(1, a)
        return ev.Acknowledged(learner_id=who, fragment_index=index, version=version)
    if what == 18:
        if a > 5:
            return ev.FullNeeded(learner_id=who, fragment_index=fragment)
        return ev.Saved() if a == 5 else ev.Merged(round=RoundId(1, b))
    onlooker.now = onlooker.wake_at if a < 4 and onlooker.wake_at else onlooker.now + [0.1, 1.0, 15.0, 40.0][b % 4]
    return ev.Tick()


def make_sensible(what: int, who: int, a: int, b: int, onlooker: Onlooker) -> tuple[int, int, int, int]:
    """Most events are those that an honest world would bring next."""
    if what < 34:
        open_rounds = [round for round in onlooker.rounds.open_rounds.values() if round.collecting]
        waiting = [(n, who) for n, r in enumerate(open_rounds) for who in sorted(r.asked_at.keys() - r.answered)]
        if waiting and what < 30:
            n, who = waiting[a % len(waiting)]
            return 8, who, (2, 2, 3, 4, 1, 0, 5, 6)[b], n
        return 13, who, a, b
    if what < 44:
        owing = [(who, seen) for who, seen in sorted(onlooker.learners.items()) if any(seen.in_flight)]
        return (15, owing[a % len(owing)][0], b, b) if owing else (6, who, 1, 4)
    return 6, who, 1 + a % 2, 3 + b % 3


def settled_onlooker(config: SyncerConfig) -> Onlooker:
    """Three learners that hold everything and train, as most interesting sequences begin."""
    onlooker = Onlooker(config)
    for who in range(3):
        onlooker.handle(ev.Joined(learner_id=who, incarnation="0", global_step=0, held=()))
    onlooker.handle(ev.ValuesSupplied())
    for who in range(3):
        for index in range(NUM_FRAGMENTS):
            onlooker.handle(ev.Acknowledged(learner_id=who, fragment_index=index, version=Version(1, 0)))
        onlooker.handle(ev.Reported(learner_id=who, global_step=1, steps=1, step_seconds=1.0, finished=False))
    return onlooker


@settings(relaxed, max_examples=250)
@given(raw_configs, raw_bytes, st.booleans(), st.booleans())
def test_no_sequence_of_events_breaks_the_machine(config, raw, settled, finishing):
    onlooker = settled_onlooker(config) if settled else Onlooker(config)
    steps = dict.fromkeys(range(3), 1)
    for index, (what, who, a, b) in enumerate(zip(*[iter(raw)] * 4, strict=False)):
        onlooker.now += 0.05
        if finishing and 30 <= index < 33:
            done = ev.Reported(learner_id=index - 30, global_step=9, steps=99, step_seconds=1.0, finished=True)
            onlooker.handle(done)
        onlooker.handle(make_event(what % 60, who % 3, a % 8, b % 8, onlooker, steps))
    event(f"merges: {min(onlooker.num_merges, 5)}")
    event(f"phase: {onlooker.rounds.phase}")


# -------------------------------------------------------------------------------------------------- faults in a world

speeds = st.builds(
    Speed,
    step_seconds=st.sampled_from([0.1, 0.2, 0.5]),
    jitter=st.sampled_from([1.0, 2.0]),
    up_seconds=st.sampled_from([0.005, 0.1, 0.6]),
    down_seconds=st.sampled_from([0.005, 0.1, 0.6]),
    link_jitter=st.sampled_from([1.0, 3.0]),
)
faults = st.lists(
    st.tuples(
        st.floats(0, 50),
        st.sampled_from(["cut", "silent cut", "crash", "die", "stop", "hang", "leave", "join", "take leave", "kill", "kill late"]),
        st.integers(0, 3),
        st.floats(0.05, 40),
    ),
    max_size=8,
)


@st.composite
def worlds(draw):
    num_learners = draw(st.integers(1, 4))
    config = SyncerConfig(
        num_fragments=draw(st.integers(1, 6)),
        sync_every=draw(st.integers(2, 12)),
        min_quorum=draw(st.integers(1, num_learners)),
        expected_learners=num_learners,
        start_timeout_seconds=10.0,
        max_grace_seconds=2.0,
        finish_wait_seconds=5.0,
        link_timeout_seconds=3.0,
        on_arrival=draw(st.sampled_from(["carry", "carry", "overwrite"])),
    )
    learners = [draw(speeds) for _ in range(num_learners)]
    return World(config, learners, total_steps=draw(st.integers(1, 120)), seed=draw(st.integers(0, 999)))


def inject(world: World, kind: str, learner_id: int, seconds: float) -> None:
    if kind == "join" and (learner_id not in world.learners or not world.learners[learner_id].alive):
        world.join(learner_id, Speed(step_seconds=0.2))
    elif kind == "kill":
        world.kill_syncer(seconds)
    elif kind == "kill late":  # this learner takes some seconds to link again: often too many
        world.kill_syncer(min(seconds, 1.0), {learner_id: seconds})
    elif learner_id in world.learners:
        match kind:
            case "cut" | "silent cut":
                world.cut(learner_id, seconds, silent=kind != "cut")
            case "crash" | "die":
                world.crash(learner_id, seconds if kind == "crash" else None)
            case "stop":
                world.stop(learner_id, seconds)
            case "hang":
                world.hang(learner_id, seconds)
            case "leave":
                world.leave(learner_id)
            case "take leave":
                world.take_leave(learner_id)


def check_world(world: World, faults: list[tuple[float, str, int, float]]) -> None:
    for time, kind, learner_id, seconds in faults:
        world.at(time, lambda args=(kind, learner_id, seconds): inject(world, *args))
    slowest_seconds = max(learner.speed.step_seconds for learner in world.processes) * 2
    fault_seconds = sum(seconds for _, _, _, seconds in faults)
    world.run_until(slowest_seconds * world.total_steps + fault_seconds + 200)
    alive = [learner for learner in world.learners.values() if learner.alive]
    event(f"alive at the end: {len(alive)}")
    event(f"syncers: {min(world.syncer.incarnation, 4)}")
    event(f"steps given up: {bool(world.steps_given_up)}")
    left = world.rounds.started and all(member.left for member in world.rounds.members.values())
    assert world.done or not (alive or left), world.describe()
    released = {who for who, member in world.rounds.members.items() if member.released or member.left}
    assert all(learner.learner_id in released or not learner.linked for learner in alive), world.describe()
    check_conservation(world, hit={learner_id for _, kind, learner_id, _ in faults if kind != "kill"})
    held_up = sum(min(seconds, 30.0) for _, kind, _, seconds in faults if kind in ("stop", "hang"))
    held_up += sum(world.config.link_timeout_seconds for _, kind, _, _ in faults if kind == "silent cut")
    assert world.longest_gap <= held_up + world.config.sync_every * slowest_seconds * 2 + 12


@settings(relaxed, max_examples=120)
@given(worlds(), faults)
def test_no_fault_stalls_the_run_or_loses_progress(world, faults):
    check_world(world, faults)


def check_conservation(world: World, hit: set[int]) -> None:
    """Under ``carry`` the world has checked already that merged ranges neither overlap nor leave gaps."""
    for learner in world.processes:
        for index, holding in enumerate(learner.fragments):
            merged = world.merged_until.get((learner.incarnation, index), 0)
            assert merged <= learner.steps
            if world.config.on_arrival == "carry" and learner.learner_id not in hit:
                assert merged == learner.steps == holding.first_unmerged  # nothing was lost, and it knows


@settings(relaxed, max_examples=25)
@given(worlds())
def test_a_run_without_faults_merges_everything(world):
    world.run(400)
    if world.config.on_arrival == "carry":
        world.check_everything_merged()
