"""The books balance for what really happened, and for nothing else."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from hf_diloco.chaos.accounting import Books, keep_books, read_witness

pytestmark = pytest.mark.fast

Lines = list[dict[str, Any]]


def step(tokens: int, incarnation: str = "a") -> dict[str, Any]:
    return {"kind": "step", "time": 0.0, "incarnation": incarnation, "tokens": tokens}


def applied(
    index: int, version: int, merged: str | None = None, overwritten: int = 0, incarnation: str = "a"
) -> dict[str, Any]:
    return {
        "kind": "applied", "time": 0.0, "incarnation": incarnation, "fragment_index": index, "version": [1, version],
        "merged": merged, "overwritten_steps": overwritten,
    }  # fmt: skip


def round_(index: int, version: int, *participants: tuple[int, str, int, int]) -> dict[str, Any]:
    shown = [
        {"learner_id": who, "update_id": name, "steps": steps, "tokens": tokens}
        for who, name, steps, tokens in participants
    ]
    return {"kind": "round", "seconds": 0.0, "fragment_index": index, "version": [1, version], "participants": shown}


def run() -> tuple[Lines, dict[int, Lines]]:
    """Learner 0 lives (a), learner 1 is killed (b) and comes back (c); two fragments."""
    tape = [
        {"kind": "layout", "seconds": 0.0, "num_fragments": 2},
        round_(0, 1, (0, "a/1.1", 2, 20), (1, "b/1.1", 1, 5)),
        round_(1, 2, (0, "a/1.2", 2, 20)),
        round_(0, 3, (0, "a/1.3", 1, 12), (1, "b/1.3", 2, 10)),  # b died before it knew
        round_(1, 4, (0, "a/1.4", 1, 12), (1, "c/1.4", 1, 7)),
        round_(0, 5, (1, "c/1.5", 1, 7)),
    ]
    alive: Lines = [applied(0, 0), applied(1, 0), step(10), step(10)]
    alive += [applied(0, 1, "a/1.1"), applied(1, 2, "a/1.2"), step(12), applied(0, 3, "a/1.3"), applied(1, 4, "a/1.4")]
    alive += [{"kind": "finished", "time": 0.0, "incarnation": "a", "holds_global": True}]
    killed: Lines = [step(5, "b"), applied(0, 1, "b/1.1", incarnation="b"), step(5, "b"), step(5, "b"), step(5, "b")]
    killed += [step(7, "c"), applied(1, 4, "c/1.4", incarnation="c"), applied(0, 5, "c/1.5", incarnation="c")]
    killed += [{"kind": "finished", "time": 0.0, "incarnation": "c", "holds_global": True}]
    return tape, {0: alive, 1: killed}


def books(change: Callable[[Lines, dict[int, Lines]], object] = lambda tape, witnesses: None) -> Books:
    tape, witnesses = copy.deepcopy(run())
    change(tape, witnesses)
    return keep_books(tape, witnesses)


def test_every_token_has_its_place():
    found = books()
    assert found.errors == []
    accounts = {account.incarnation: account for account in found.accounts}
    assert (accounts["a"].trained, accounts["a"].merged, accounts["a"].unmerged) == (32, 32.0, 0.0)
    # b: 15 of 20 tokens of fragment 0 were merged, none of fragment 1
    assert (accounts["b"].trained, accounts["b"].merged, accounts["b"].unmerged) == (20, 7.5, 12.5)
    assert (found.trained, found.merged, found.lost, found.held) == (59, 46.5, 12.5, 0.0)


def restart(tape: Lines, *, reporters: tuple[int, ...]) -> None:
    """After the round of fragment 0, version 3, the syncer dies; the next one goes on from what was before that."""
    tape[4:4] = [
        {"kind": "start", "seconds": 0.0, "incarnation": 2, "time": 0.0},
        *({"kind": "join", "seconds": 0.0, "learner_id": who, "incarnation": "x"} for who in reporters),
        {"kind": "recovered", "seconds": 0.0, "fragments": [{"adopted": [1, 1]}, {"adopted": [1, 2]}]},
    ]


def test_a_merge_that_went_with_the_syncer_is_void():
    def lose(tape: Lines, witnesses: dict[int, Lines]) -> None:
        restart(tape, reporters=(1,))

    found = books(lose)
    assert found.errors == []
    accounts = {account.incarnation: account for account in found.accounts}
    assert (accounts["a"].merged, accounts["a"].voided) == (26.0, 6.0)  # it was away, and held what was lost
    assert (accounts["b"].merged, accounts["b"].unmerged) == (2.5, 17.5)  # it had not been told

    (error,) = books(lambda tape, witnesses: restart(tape, reporters=(0, 1))).errors
    assert "it had applied the merge of a/1.3 and said so, yet that is void" in error


def test_what_was_overwritten_is_no_gap():
    def overwrite(tape: Lines, witnesses: dict[int, Lines]) -> None:
        tape[3]["participants"].pop(0)
        witnesses[0][7] = applied(0, 3, None, overwritten=1)

    found = books(overwrite)
    assert found.errors == []
    assert found.overwritten == 6.0


def change_tokens(tape: Lines, _: object) -> None:
    tape[3]["participants"][0]["tokens"] += 1


def merge_again(tape: Lines, _: object) -> None:
    tape.append({**tape[2], "version": [1, 9]})


def skip_a_step(tape: Lines, _: object) -> None:
    tape[1]["participants"][0].update(steps=1, tokens=10)


def forget_a_merge(tape: Lines, _: object) -> None:
    del tape[1]["participants"][0]


def invent_steps(tape: Lines, _: object) -> None:
    tape[5]["participants"][0]["steps"] = 9


def go_back(tape: Lines, _: object) -> None:
    tape[5]["version"] = [1, 3]


def go_back_at_a_learner(_: object, witnesses: dict[int, Lines]) -> None:
    witnesses[0][7]["version"] = [1, 0]


def invent_a_process(tape: Lines, _: object) -> None:
    tape[5]["participants"][0]["update_id"] = "x/1.5"


def merge_behind_its_back(tape: Lines, witnesses: dict[int, Lines]) -> None:
    witnesses[0] = [line for line in witnesses[0] if line.get("merged") not in ("a/1.1", "a/1.3")]


@pytest.mark.parametrize(
    ("tamper", "error"),
    [
        (change_tokens, r"a/1.3 has 13 tokens for steps 3 to 3, in which 12 were trained"),
        (merge_again, r"update a/1.2 of fragment 1 was merged 2 times"),
        (skip_a_step, r"a/1.3 has 12 tokens for steps 2 to 2, in which 10 were trained"),
        (forget_a_merge, r"it took a/1.1 for merged, the tape does not"),
        (invent_steps, r"c/1.5 reaches to step 9 of 1"),
        (go_back, r"fragment 0 went from version \[1, 3\] to \[1, 3\] on the tape"),
        (go_back_at_a_learner, r"fragment 0 went from version \[1, 1\] to \[1, 0\] at learner 0"),
        (invent_a_process, r"updates of x were merged, a process that no witness knows"),
        (merge_behind_its_back, r"fragment 0: 2 updates were merged that it never knew of: a/1.1, a/1.3"),
    ],
)
def test_a_tampered_tape_is_found_out(tamper: Callable[[Any, Any], None], error: str):
    import re

    found = books(tamper)
    assert any(re.search(error, text) for text in found.errors), found.errors


def test_a_witness_that_was_killed_in_mid_line(tmp_path):
    path = tmp_path / "witness.jsonl"
    assert read_witness(path) == []
    path.write_text('{"kind": "start"}\n{"kind": "st')
    assert read_witness(path) == [{"kind": "start"}]
