"""Properties that every sequence of events must keep in the recovery after a syncer's death."""

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from test_rounds_properties import relaxed

from hf_diloco.core import events as ev
from hf_diloco.core.messages import Version
from hf_diloco.core.recovery import REPORT_SECONDS, Recovery

pytestmark = pytest.mark.fast

NUM_FRAGMENTS, NUM_LEARNERS = 2, 3


class Onlooker:
    """Feeds one recovery and works out by itself when it must end, and with what."""

    def __init__(self, held: list[Version], known: set[int], vouched: list[set[Version]], ended: bool) -> None:
        self.recovery = Recovery(held, known, vouched, ended=ended)
        self.now, self.known, self.missing, self.vouched, self.run_ended = 0.0, set(known), set(known), vouched, ended
        self.reports: dict[int, tuple[Version, ...]] = {}
        self.asked: dict[int, tuple[int, Version]] = {}
        self.refused: set[tuple[int, int]] = set()
        self.said: dict[int, list[ev.Event]] = {}
        self.first_at: float | None = None
        self.over = False

    def handle(self, event: ev.Event) -> None:
        held = list(self.recovery.held)
        actions = self.recovery.handle(event, self.now)
        assert isinstance(actions[-1], ev.WaitUntil)
        if self.over:
            assert actions == [ev.WaitUntil(time=None)]
            assert held == self.recovery.held
            return
        self._observe(event)
        assert all(new >= old for new, old in zip(self.recovery.held, held, strict=True))
        for action in actions[:-1]:
            self._take_action(action)
        reported = not self.missing or (self.first_at is not None and self.now >= self.first_at + REPORT_SECONDS)
        assert self.over == (reported and not self.asked)
        if self.over:
            self._check_end()
        wake_at = actions[-1].time
        assert wake_at is None or wake_at > self.now
        assert wake_at is not None or self.over or self.first_at is None or reported

    def _observe(self, event: ev.Event) -> None:
        if self.first_at is None and (self.run_ended or isinstance(event, ev.Joined)):
            self.first_at = self.now
        match event:
            case ev.Joined():
                self.missing.discard(event.learner_id)
                self.reports[event.learner_id] = event.held if len(event.held) == NUM_FRAGMENTS else ()
                self.said[event.learner_id] = [event]
            case ev.Left():
                self.known -= {event.learner_id} if event.for_good else set()
                self.missing = (self.missing | {event.learner_id}) & self.known
                self.reports.pop(event.learner_id, None)
                self.said.pop(event.learner_id, None)
            case ev.Reported() | ev.Leaving() if event.learner_id in self.said:
                self.said[event.learner_id].append(event)
            case ev.HandedBack() if event.fragment_index < NUM_FRAGMENTS:
                assert event.refused or self.recovery.held[event.fragment_index] >= event.version
                if self.asked.get(event.fragment_index) == (event.learner_id, event.version):
                    del self.asked[event.fragment_index]
                    self.refused |= {(event.learner_id, event.fragment_index)} if event.refused else set()
        if isinstance(event, ev.Joined | ev.Left):
            self.asked = {index: ask for index, ask in self.asked.items() if ask[0] != event.learner_id}

    def _take_action(self, action: ev.Action) -> None:
        if isinstance(action, ev.EndRecovery):
            self.over = True
            return
        assert isinstance(action, ev.RequestHandBack)
        who, index, version = action.learner_id, action.fragment_index, action.version
        assert self.reports[who][index] == version > self.recovery.held[index]
        assert version in self.vouched[index]
        assert (who, index) not in self.refused
        assert index not in self.asked or self.asked[index][1] < version
        self.asked[index] = who, version

    def _check_end(self) -> None:
        """Whatever somebody who is here holds, and could prove, is in what the run goes on from."""
        for who, report in self.reports.items():
            for index, version in enumerate(report):
                good = version in self.vouched[index] and (who, index) not in self.refused
                assert not good or version <= self.recovery.held[index]
        told = self.recovery.said()
        assert {event.learner_id for event in told[: len(self.said)]} == self.said.keys()
        for who, said in self.said.items():
            assert [event for event in told if event.learner_id == who] == said


versions = st.builds(Version, st.integers(1, 2), st.integers(0, 3))
onlookers = st.builds(
    Onlooker,
    held=st.lists(st.just(Version(1, 0)) | versions, min_size=NUM_FRAGMENTS, max_size=NUM_FRAGMENTS),
    known=st.sets(st.integers(0, NUM_LEARNERS - 1)),
    vouched=st.lists(st.sets(versions), min_size=NUM_FRAGMENTS, max_size=NUM_FRAGMENTS),
    ended=st.booleans(),
)
whos = st.integers(0, NUM_LEARNERS)
inputs = st.lists(
    st.one_of(
        st.builds(
            ev.Joined, learner_id=whos, incarnation=st.just("a"), global_step=st.just(1),
            held=st.lists(versions, min_size=NUM_FRAGMENTS, max_size=NUM_FRAGMENTS).map(tuple) | st.just(()),
        ),
        st.builds(ev.Left, learner_id=whos, for_good=st.booleans()),
        st.builds(ev.Leaving, learner_id=whos),
        st.builds(
            ev.Reported, learner_id=whos, global_step=st.just(1), steps=st.just(1), step_seconds=st.just(1.0),
            finished=st.booleans(),
        ),
        st.builds(
            ev.HandedBack, learner_id=whos, fragment_index=st.integers(0, NUM_FRAGMENTS), version=versions,
            refused=st.booleans(),
        ),
        st.tuples(st.integers(0, 5), st.booleans()),  # what is asked for comes, or is refused
        st.sampled_from([0.1, 1.0, 4.9]),  # time passes
    ),
    max_size=25,
)  # fmt: skip


def check_recovery(onlooker: Onlooker, inputs: list) -> None:
    onlooker.handle(ev.Tick())
    for each in inputs:
        if isinstance(each, float):
            onlooker.now += each
            onlooker.handle(ev.Tick())
        elif not isinstance(each, tuple):
            onlooker.handle(each)
        elif onlooker.asked:
            index = sorted(onlooker.asked)[each[0] % len(onlooker.asked)]
            who, version = onlooker.asked[index]
            onlooker.handle(ev.HandedBack(learner_id=who, fragment_index=index, version=version, refused=each[1]))
    event(f"over: {onlooker.over}")


@settings(relaxed, max_examples=200)
@given(onlookers, inputs)
def test_no_sequence_of_events_breaks_the_recovery(onlooker, inputs):
    check_recovery(onlooker, inputs)
