"""The numbers of a storm, on tapes short enough to work them out by hand."""

from __future__ import annotations

import math

import pytest

from hf_diloco.chaos import measure

pytestmark = pytest.mark.fast


def merge(at, incarnation="a", tokens=24):
    participant = {"learner_id": 0, "update_id": f"{incarnation}/1.1", "steps": 1, "tokens": tokens}
    return {"kind": "round", "at": at, "fragment_index": 0, "participants": [participant]}


def test_intervals():
    assert measure.union([(5, 7), (1, 3), (2, 4), (6, 6.5), (9, 9)]) == [(1, 4), (5, 7)]
    assert measure.intersection([(1, 4), (5, 7)], [(3, 6)]) == [(3, 4), (5, 6)]
    assert measure.overlap([(1, 4), (2, 5), (8, math.inf)], (3, 10)) == 4


def test_tape_times_of_a_syncer_that_was_started_again():
    tape = [
        {"kind": "start", "seconds": 1.0, "time": 1001.0}, {"kind": "round", "seconds": 3.0},
        {"kind": "start", "seconds": 0.5, "time": 1020.5}, {"kind": "round", "seconds": 2.0},
    ]  # fmt: skip
    lines = measure.with_times(tape, wall_minus_monotonic=900.0)
    assert [line["at"] for line in lines] == [101.0, 103.0, 120.5, 122.0]
    assert "at" not in tape[0]


def test_gaps_leave_out_what_is_excused():
    tape = [merge(at) for at in (1.0, 2.0, 12.0, 13.0)]
    assert measure.gaps(tape, (0.0, 15.0)) == [1.0, 1.0, 10.0, 1.0, 2.0]
    assert measure.gaps(tape, (0.0, 15.0), [(3.0, 11.0)]) == [1.0, 1.0, 2.0, 1.0, 2.0]
    assert measure.gaps(tape, (1.5, 12.5)) == [0.5, 10.0, 0.5]


def test_merged_tokens_are_a_mean_over_the_fragments():
    tape = [{"kind": "layout", "num_fragments": 4}, merge(1.0), merge(2.0, tokens=8), merge(9.0)]
    assert measure.merged_tokens(tape, (0.0, 5.0)) == 8.0


def test_first_merges_after():
    assert measure.first_merges_after([merge(1.0), merge(5.0)], [0.5, 2.0, 6.0]) == [0.5, 3.0, None]


def test_quantiles():
    values = [float(number) for number in range(1, 101)]
    assert measure.summary(values) == {"count": 100, "median": 50.0, "p99": 99.0, "max": 100.0}
    assert measure.summary([]) == {"count": 0, "median": None, "p99": None, "max": None}


def test_the_way_back_of_a_killed_learner():
    tape = [
        merge(9.0, "old"),
        {"kind": "leave", "at": 10.2, "learner_id": 1, "for_good": False},
        {"kind": "join", "at": 15.0, "learner_id": 1, "incarnation": "new"},
        merge(16.0, "other"),
        merge(19.0, "new"),
    ]
    witness = [
        {"kind": "step", "time": 9.5, "incarnation": "old"},
        {"kind": "joining", "time": 13.0, "incarnation": "new"},
        {"kind": "joined", "time": 16.0, "incarnation": "new"},
        {"kind": "step", "time": 18.0, "incarnation": "new"},
    ]
    (back, gone) = measure.rejoins(tape, 1, witness, [10.0, 30.0])
    assert back == measure.Rejoin(1, pytest.approx(0.2), 3.0, 2.0, 1.0, 2.0, 1.0, 9.0)
    assert gone == measure.Rejoin(1, None, None, None, None, None, None, None)
    assert measure.rejoin_parts([back, gone])["total"]["max"] == 9.0


def test_a_link_that_was_gone_already_is_not_noticed_again():
    tape = [
        {"kind": "leave", "at": 1.0, "learner_id": 1, "for_good": False},
        {"kind": "join", "at": 5.0, "learner_id": 1},
        {"kind": "leave", "at": 9.0, "learner_id": 1, "for_good": True},
    ]
    found = [measure.detection(tape, who, at, 99.0) for who, at in ((1, 0.5), (1, 2.0), (1, 6.0), (2, 0.5))]
    assert found == [0.5, None, None, None]
