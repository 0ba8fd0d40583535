"""Properties that every sequence of events must keep: raw events, senseless ones too, and faults in a whole world."""

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from rounds_learner import Speed
from rounds_onlooker import Onlooker
from rounds_world import NOTHING, World

from hf_diloco.config import SyncerConfig
from hf_diloco.core import events as ev
from hf_diloco.core.messages import RoundId, Version
from hf_diloco.core.recovery import Recovered

pytestmark = pytest.mark.fast

relaxed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


# ------------------------------------------------------------------------------------------------------- raw events

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
    if what == 2 and a >= 5:
        return ev.Leaving(learner_id=who)
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


def settled_onlooker(config: SyncerConfig, recovered: Recovered | None) -> Onlooker:
    """Three learners that hold everything and train, as most interesting sequences begin."""
    onlooker = Onlooker(config, recovered)
    held = tuple(recovered.held) if recovered else ()
    for who in range(3):
        onlooker.handle(ev.Joined(learner_id=who, incarnation="0", global_step=0, held=held))
    onlooker.handle(ev.ValuesSupplied())
    for who in range(3):
        for index in range(NUM_FRAGMENTS):
            version = onlooker.rounds.current[index]
            onlooker.handle(ev.Acknowledged(learner_id=who, fragment_index=index, version=version))
        onlooker.handle(ev.Reported(learner_id=who, global_step=1, steps=1, step_seconds=1.0, finished=False))
    return onlooker


recoveries = st.builds(
    Recovered,
    held=st.lists(st.builds(Version, st.just(1), st.integers(0, 9)), min_size=NUM_FRAGMENTS, max_size=NUM_FRAGMENTS),
    merged=st.lists(
        st.dictionaries(st.integers(0, 2), st.just("before")), min_size=NUM_FRAGMENTS, max_size=NUM_FRAGMENTS
    ),
    outer_step=st.integers(9, 12),
    started=st.booleans(),
    ended=st.sampled_from([False, False, False, True]),
)


@st.composite
def sequences(draw):
    """A machine that is new, or goes on after its syncer died, and the bytes of the events that follow."""
    config, recovered = draw(raw_configs), draw(st.none() | recoveries)
    onlooker = settled_onlooker(config, recovered) if draw(st.booleans()) else Onlooker(config, recovered)
    return onlooker, draw(raw_bytes), draw(st.booleans())


def check_sequence(onlooker: Onlooker, raw: bytes, finishing: bool) -> None:
    steps = dict.fromkeys(range(3), 1)
    for index, (what, who, a, b) in enumerate(zip(*[iter(raw)] * 4, strict=False)):
        onlooker.now += 0.05
        if finishing and 30 <= index < 33:
            done = ev.Reported(learner_id=index - 30, global_step=9, steps=99, step_seconds=1.0, finished=True)
            onlooker.handle(done)
        onlooker.handle(make_event(what % 60, who % 3, a % 8, b % 8, onlooker, steps))
    event(f"merges: {min(onlooker.num_merges, 5)}")
    event(f"phase: {onlooker.rounds.phase}")


@settings(relaxed, max_examples=250)
@given(sequences())
def test_no_sequence_of_events_breaks_the_machine(sequence):
    check_sequence(*sequence)


# -------------------------------------------------------------------------------------------------- faults in a world

speeds = st.builds(
    Speed,
    step_seconds=st.sampled_from([0.1, 0.2, 0.5]),
    jitter=st.sampled_from([1.0, 2.0]),
    up_seconds=st.sampled_from([0.005, 0.1, 0.6]),
    down_seconds=st.sampled_from([0.005, 0.1, 0.6]),
    link_jitter=st.sampled_from([1.0, 3.0]),
)
KINDS = [
    "cut", "silent cut", "crash", "die", "stop", "hang", "leave", "join", "take leave", "kill", "kill late",
]  # fmt: skip
faults = st.lists(
    st.tuples(
        st.floats(0, 50),
        st.sampled_from(KINDS),
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
    members = world.rounds.members.values()
    left = world.rounds.started and members and all(member.left for member in members)
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
