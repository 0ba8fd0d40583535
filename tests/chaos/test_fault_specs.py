"""Faults by name, and storms of them: the same for the same seed, every kind as often as any other."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from hf_diloco.chaos.faults import ALL, STORM, Fault, Victim, choose, storm
from hf_diloco.errors import ConfigError

pytestmark = pytest.mark.fast


def long_storm(seed: int = 1) -> list[Fault]:
    return storm(seed, seconds=100_000, every_seconds=20, num_learners=3)


def test_a_seed_is_a_storm():
    assert long_storm() == long_storm()
    assert long_storm() != long_storm(2)


def test_every_kind_is_as_often_as_any_other_and_no_learner_is_spared():
    faults = long_storm()
    counts = Counter((fault.kind, fault.victim.part) for fault in faults)
    assert set(counts) == set(STORM)
    assert max(counts.values()) - min(counts.values()) <= 1
    learners = Counter(fault.victim.learner_id for fault in faults if fault.victim.learner_id is not None)
    assert set(learners) == {0, 1, 2}
    assert min(learners.values()) > 0.8 * max(learners.values())


def test_arrivals_are_poisson():
    times = [fault.at_seconds for fault in long_storm()]
    pauses = [later - earlier for earlier, later in itertools.pairwise(times)]
    mean = sum(pauses) / len(pauses)
    assert mean == pytest.approx(20, rel=0.1)
    assert sum(pause > mean for pause in pauses) / len(pauses) == pytest.approx(0.368, abs=0.05)  # 1/e
    assert times[0] >= 10


def test_stops_and_cuts_last_10_to_30_seconds():
    lasting = [fault.seconds for fault in long_storm() if fault.kind in ("stop", "cut", "one_way", "slow")]
    assert 10 <= min(lasting) < 12
    assert 28 < max(lasting) <= 30
    assert all(fault.seconds == 0 for fault in long_storm() if fault.kind in ("kill", "reset", "drop"))


def test_kinds_are_chosen_by_name():
    assert choose([]) == STORM
    assert choose(["kill:gateway", "cut"]) == (("kill", "gateway"), ("cut", "learner"))
    assert set(choose(["kill"])) == {pair for pair in STORM if pair[0] == "kill"}
    assert choose(["kill:rank"]) == (("kill", "rank"),)
    with pytest.raises(ConfigError, match=r"no fault 'flood'; there are kill:learner, .*clock_jump:syncer"):
        choose(["flood"])
    with pytest.raises(ConfigError, match="no fault 'cut:syncer'"):
        choose(["cut:syncer"])


def test_what_cannot_be_done_is_no_fault():
    with pytest.raises(ConfigError, match="no fault cut:syncer"):
        Fault(kind="cut", victim=Victim(part="syncer"), at_seconds=1)
    assert len(set(ALL)) == len(ALL)


def test_a_fault_comes_at_a_time_or_at_a_step():
    victim = Victim(part="rank", learner_id=1, rank=2)
    assert str(Fault(kind="kill", victim=victim, at_seconds=5)) == "kill:rank 1.2"
    by_time, by_step = (Fault(kind="kill", victim=victim, **when) for when in ({"at_seconds": 5}, {"at_step": 10}))
    assert [by_time.is_due(seconds, 99) for seconds in (4.9, 5.0)] == [False, True]
    assert [by_step.is_due(99.0, step) for step in (9, 10)] == [False, True]
