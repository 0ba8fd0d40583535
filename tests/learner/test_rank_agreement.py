"""How the ranks of one learner agree: real gloo groups, each rank a thread of this process."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hf_diloco.errors import DiLoCoError
from hf_diloco.learner.operations import Kind, Operation, Plan, Word
from hf_diloco.learner.ranks import OneRank, SeveralRanks

pytestmark = pytest.mark.fast

SECONDS = 30.0
SIZES = [5, 7, 300_000]


def on_all_ranks(run: Callable[[SeveralRanks], Any], num_ranks: int = 3) -> list[Any]:
    """What ``run`` returns on each rank; raises what it raised."""
    store = dist.HashStore()
    results: list[Any] = [None] * num_ranks
    failures: list[BaseException] = []

    def group(name: str, rank: int) -> Any:
        timeout = datetime.timedelta(seconds=SECONDS)
        return dist.ProcessGroupGloo(dist.PrefixStore(name, store), rank, num_ranks, timeout)

    def one(rank: int) -> None:
        try:
            ranks = SeveralRanks(group("control", rank), group("bulk", rank))
            ranks.expect(SIZES)
            results[rank] = run(ranks)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive()
    if failures:
        raise failures[0]
    return results


def boundaries(ranks: SeveralRanks, plans: Iterator[list[Operation]], count: int) -> list[list[tuple[Any, ...]]]:
    """What was executed at each of so many boundaries; rank 0 plans."""
    executed = []
    for _ in range(count):
        operations = next(plans, [])[: ranks.room] if ranks.rank == 0 else []
        agreed = ranks.agree(Plan(operations=operations))
        executed.append(
            [
                (
                    one.kind,
                    one.fragment_index,
                    one.outer_step,
                    None if one.payload is None else float(one.payload.sum()),
                )
                for one in agreed.operations
            ]
        )
        threading.Event().wait(0.002)
    return executed


def payload(index: int, value: float) -> torch.Tensor:
    return torch.full((SIZES[index],), value)


def test_all_ranks_execute_the_same_at_the_same_boundary() -> None:
    def run(ranks: SeveralRanks) -> Any:
        plans = [
            [Operation(Kind.ADD, 2, 4, payload(2, 1.0)), Operation(Kind.CUT, 2), Operation(Kind.CUT, 0)],
            [Operation(Kind.WRITE, 1, 5, payload(1, 2.0)), Operation(Kind.ADD, 0, 6, payload(0, 3.0))],
            [Operation(Kind.START_OVER, outer_step=6)],
            [Operation(Kind.CUT, 1)],
        ]
        return boundaries(ranks, iter(plans), 40)

    first, *others = on_all_ranks(run)
    assert all(other == first for other in others)
    done = [one for at in first for one in at]
    assert sorted(done) == sorted(
        [
            (Kind.ADD, 2, 4, float(SIZES[2])), (Kind.CUT, 2, 0, None), (Kind.CUT, 0, 0, None),
            (Kind.WRITE, 1, 5, 14.0), (Kind.ADD, 0, 6, 15.0), (Kind.START_OVER, 0, 6, None), (Kind.CUT, 1, 0, None),
        ]
    )  # fmt: skip
    assert first[0] == [], "a header is read at the boundary after it was sent"
    assert first[1] == [(Kind.CUT, 0, 0, None)], "it has no payload, and nothing to wait for"
    order = [one[:2] for one in done]
    assert order.index((Kind.ADD, 2)) < order.index((Kind.CUT, 2)), "operations on one fragment keep their order"
    assert order.index((Kind.START_OVER, 0)) == 5, "what concerns all fragments has nothing before it undone"
    assert order[6] == (Kind.CUT, 1)


def test_no_more_is_planned_than_fits() -> None:
    def run(ranks: SeveralRanks) -> Any:
        rooms, done = [], []
        waiting = [Operation(Kind.ADD, 0, step, payload(0, 1.0)) for step in range(1, 31)]
        while len(done) < 30:
            rooms.append(ranks.room)
            now, waiting = (waiting[: ranks.room], waiting[ranks.room :]) if ranks.rank == 0 else ([], waiting)
            done += [one.outer_step for one in ranks.agree(Plan(operations=now)).operations]
        assert min(rooms) >= 0
        return done

    assert on_all_ranks(run) == [list(range(1, 31))] * 3


def test_what_each_rank_tells_is_summed_and_what_rank_0_says_is_known() -> None:
    def run(ranks: SeveralRanks) -> Any:
        first = ranks.agree(Plan(tokens=10 + ranks.rank, interrupted=ranks.rank == 2))
        assert (first.tokens, first.interrupted, first.word) == (0, False, Word.GO_ON)
        said = {"word": Word.STOP, "save_wanted": 7, "steps": 1} if ranks.rank == 0 else {}
        second = ranks.agree(Plan(**said))
        third = ranks.agree(Plan())
        ranks.agree(Plan())
        return second.tokens, second.interrupted, second.word, third.word, third.save_wanted, third.steps, ranks.is_idle

    assert on_all_ranks(run) == [(33, True, Word.GO_ON, Word.STOP, 7, 1, True)] * 3


@pytest.mark.parametrize("content", [b"", b"something", bytes(range(256)) * 1000])
def test_content_of_rank_0_is_shared(content: bytes) -> None:
    assert on_all_ranks(lambda ranks: ranks.share(None if ranks.rank else content)) == [content] * 3
    assert OneRank().share(content) == content


def test_a_rank_that_is_gone_is_an_error_of_ours() -> None:
    def run(ranks: SeveralRanks) -> Any:
        ranks.agree(Plan())
        ranks.agree(Plan())
        if ranks.rank == 1:
            return "gone"  # its groups end with it
        with pytest.raises(DiLoCoError, match=r"gone.*rank 0 of 2.*Start this learner again"):
            boundaries(ranks, iter([]), 3)
        return "told"

    assert on_all_ranks(run, num_ranks=2) == ["told", "gone"]


def test_one_rank_agrees_at_once() -> None:
    plan = Plan(word=Word.STOP, operations=[Operation(Kind.CUT, 1)], steps=1, tokens=5)
    assert OneRank().agree(plan) is plan


@pytest.mark.parametrize("who", [set(), {0}, {2}, {0, 1, 2}])
def test_what_is_true_on_any_rank(who: set[int]) -> None:
    assert on_all_ranks(lambda ranks: ranks.any(ranks.rank in who)) == [bool(who)] * 3
    assert OneRank().any(bool(who)) == bool(who)
