"""The table of shards: one holder each, and no shard is forgotten."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hf_diloco.core.leases import ABSENT_SECONDS, Leases

pytestmark = pytest.mark.fast


class ComingAndGoing(RuleBasedStateMachine):
    """Learners join, end passes, lose their links and leave; the syncer dies. A model of what each of them reads."""

    def __init__(self):
        super().__init__()
        self.num_shards, self.now = 6, 0.0
        self.table = Leases(self.num_shards)
        self.reading = {}  # by learner that is here
        self.away_since = {}

    ids = st.integers(0, 9)

    @rule(learner_id=ids)
    @precondition(lambda self: len(self.reading) < self.num_shards)
    def join(self, learner_id):
        if learner_id in self.reading or len(self.held() | {learner_id}) > self.num_shards:
            return
        home = learner_id % self.num_shards
        is_free = not set(self.table.holders(home, self.now)) - {learner_id}
        self.away_since.pop(learner_id, None)
        self.reading[learner_id] = self.table.claim(learner_id, home, self.now)
        assert self.reading[learner_id] == home or not is_free

    @rule(data=st.data())
    @precondition(lambda self: self.reading)
    def end_a_pass(self, data):
        learner_id = data.draw(st.sampled_from(sorted(self.reading)))
        free = [shard for shard in range(self.num_shards) if not self.table.holders(shard, self.now)]
        own = self.reading[learner_id]
        self.reading[learner_id] = shard = self.table.next(learner_id, own, self.now)
        assert self.table.num_passes[shard] == min(self.table.num_passes[other] for other in [*free, own])

    @rule(data=st.data(), for_good=st.booleans())
    @precondition(lambda self: self.reading)
    def go(self, data, for_good):
        learner_id = data.draw(st.sampled_from(sorted(self.reading)))
        del self.reading[learner_id]
        if for_good:
            self.table.end(learner_id)
        else:
            self.table.away(learner_id, self.now)
            self.away_since[learner_id] = self.now

    @rule(seconds=st.floats(1, ABSENT_SECONDS))
    def wait(self, seconds):
        self.now += seconds

    @rule()
    def the_syncer_dies(self):
        """Learners that are here link again and say what they read."""
        self.table = Leases(self.num_shards, self.table.num_passes)
        self.away_since = {}
        for learner_id, shard in self.reading.items():
            assert self.table.claim(learner_id, shard, self.now) == shard

    def held(self):
        """Learners that count: here, or away for a short time."""
        return set(self.reading) | {who for who, since in self.away_since.items() if self.now - since <= ABSENT_SECONDS}

    @invariant()
    def nobody_shares(self):
        assert len(set(self.reading.values())) == len(self.reading)
        for learner_id, shard in self.reading.items():
            assert self.table.holders(shard, self.now) == [learner_id]

    def teardown(self):
        """From wherever it is, all shards are read again, and again."""
        if not self.reading:
            self.join(0)
        self.now += 2 * ABSENT_SECONDS
        before = list(self.table.num_passes)
        for _ in range(2 * sum(max(before) - count + 2 for count in before)):
            for learner_id in sorted(self.reading):
                self.end_one(learner_id)
        assert all(now >= then + 2 for now, then in zip(self.table.num_passes, before, strict=True))

    def end_one(self, learner_id):
        self.reading[learner_id] = self.table.next(learner_id, self.reading[learner_id], self.now)


ComingAndGoing.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
test_coming_and_going = ComingAndGoing.TestCase


def test_shards_without_a_learner_are_read_in_turn():
    table = Leases(6)
    reading = {learner_id: table.claim(learner_id, learner_id, 0.0) for learner_id in (0, 1)}
    seen = []
    for _ in range(9):
        for learner_id in (0, 1):
            seen.append(reading[learner_id])
            reading[learner_id] = table.next(learner_id, reading[learner_id], 0.0)
    assert seen[:6] == [0, 1, 2, 3, 4, 5]
    assert table.num_passes == [3] * 6


def test_more_learners_than_shards_share():
    table = Leases(2)
    assert [table.claim(learner_id, learner_id % 2, 0.0) for learner_id in range(4)] == [0, 1, 0, 1]
    assert table.holders(0, 0.0) == [0, 2]
    assert table.next(3, 1, 0.0) == 1


def test_a_learner_that_is_away_for_long_loses_its_shard():
    table = Leases(2)
    assert (table.claim(0, 0, 0.0), table.claim(1, 1, 0.0)) == (0, 1)
    table.away(1, 10.0)
    assert table.next(0, 0, 10.0 + ABSENT_SECONDS) == 0
    assert table.next(0, 0, 11.0 + ABSENT_SECONDS) == 1
    assert table.claim(1, 1, 500.0) == 0
