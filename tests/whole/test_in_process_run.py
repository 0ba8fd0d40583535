"""Whole runs inside this process."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process_world import SECONDS, World, leave_at, make_model, parameters, train
from torch import nn

from hf_diloco.core.codec import encode
from hf_diloco.core.data_digest import NUM_HASHES
from hf_diloco.core.fragments import FragmentLayout
from hf_diloco.errors import ConfigError, DiLoCoWarning, LearnerRefusedError
from hf_diloco.learner import joining
from hf_diloco.learner.exchange import Exchange
from hf_diloco.links.in_process import InProcessHub
from hf_diloco.syncer.saved_run import latest_run

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("on_arrival", ["carry", "overwrite"])
@pytest.mark.parametrize("wire_format", ["fp32", "bf16", "int8", "int4"])
def test_a_run_ends_with_the_same_values_everywhere(tmp_path: Path, wire_format: str, on_arrival: str) -> None:
    # 4 H is more than the steps of the run: nothing is given up, however late a thread is on a busy machine.
    world = World(
        tmp_path, expected_learners=2, num_fragments=3, sync_every=16, wire_format=wire_format, on_arrival=on_arrival
    )
    for learner_id in (0, 1):
        world.start(train, world, learner_id)
    world.join()
    assert torch.equal(parameters(world.models[0]), parameters(world.models[1]))
    values, constants, _ = world.syncer.model()
    assert all(torch.equal(values[name], value) for name, value in world.models[0].named_parameters())
    assert torch.equal(constants["scale"], torch.zeros(1))
    rounds = world.tape("round")
    assert {who["learner_id"] for line in rounds for who in line["participants"]} == {0, 1}
    shapes = {name: value.shape for name, value in values.items()}
    num_bytes = [  # of one payload
        encode(torch.zeros(fragment.num_parameters), wire_format).numel()
        for fragment in FragmentLayout.build(shapes, 3).fragments
    ]
    for line in rounds:
        assert line["bytes_published"] == num_bytes[line["fragment_index"]]
        assert line["bytes_received"] == len(line["participants"]) * num_bytes[line["fragment_index"]]
    if on_arrival == "carry":
        for row in world.accounts().values():
            assert row["tokens_merged"] == row["tokens_trained"], row


@pytest.mark.parametrize("seed", range(4))
def test_links_that_fail_again_and_again_leave_no_token_unaccounted(tmp_path: Path, seed: int) -> None:
    """Messages overtake each other; both links go down and come back in mid-run, with whatever is under way."""
    world = World(tmp_path, seed=seed, expected_learners=2, num_fragments=3, sync_every=3)

    def flap(learner_id: int) -> Callable[[], None]:
        def fault() -> None:
            world.hub.cut(learner_id)
            world.hub.heal(learner_id)

        return fault

    for learner_id in (0, 1):
        faults = {step: flap((learner_id + step) % 2) for step in range(5 + seed, 60, 7)}
        world.start(train, world, learner_id, at=faults)
    world.join()
    assert torch.equal(parameters(world.models[0]), parameters(world.models[1]))
    for row in world.accounts().values():  # carried for longer than 4 H, progress is given up, and counted
        assert row["tokens_merged"] + row["tokens_overwritten"] == pytest.approx(row["tokens_trained"], abs=1), row
    merged: dict[tuple[int, int], list[str]] = {}
    for line in world.tape("round"):
        for participant in line["participants"]:
            merged.setdefault((line["fragment_index"], participant["learner_id"]), []).append(participant["update_id"])
    assert all(len(ids) == len(set(ids)) for ids in merged.values()), "an update was merged twice"


def test_a_link_that_is_down_for_long_keeps_the_progress(tmp_path: Path) -> None:
    world = World(tmp_path, expected_learners=2, num_fragments=3, sync_every=12)
    faults = {10: lambda: world.hub.cut(1), 17: lambda: world.hub.heal(1)}
    world.start(train, world, 0)
    world.start(train, world, 1, at=faults)
    world.join()
    row = world.accounts()[1]
    assert row["tokens_merged"] == row["tokens_trained"] > 0
    assert row["tokens_overwritten"] == 0


@pytest.mark.parametrize("seed", range(3))
def test_progress_is_given_up_only_if_none_of_it_is_under_way(tmp_path: Path, seed: int) -> None:
    """No grace, fragments due at every other step: many answers come late, so much is carried for too long."""
    world = World(
        tmp_path, seed=seed, expected_learners=2, num_fragments=2, sync_every=2, max_grace_seconds=0, overlap_steps=1
    )
    world.start(train, world, 0, steps=300, pace_seconds=0.0)
    world.start(train, world, 1, steps=300, pace_seconds=0.002)
    world.join()
    for row in world.accounts().values():
        assert row["tokens_merged"] + row["tokens_overwritten"] == pytest.approx(row["tokens_trained"], abs=1), row
    steps = [participant["steps"] for line in world.tape("round") for participant in line["participants"]]
    assert min(steps) > 0


def test_one_learner_alone_is_plain_training(tmp_path: Path) -> None:
    world = World(tmp_path, num_fragments=3, sync_every=6, outer_lr=1.0, outer_momentum=0.0, wire_format="fp32")
    world.start(train, world, 0)
    world.join()
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(0)
    for _ in range(60):
        inputs = torch.randn(8, 4, generator=generator)
        nn.functional.mse_loss(model(inputs), inputs[:, :2] * 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    moved = (parameters(model) - parameters(make_model())).norm()
    assert (parameters(world.models[0]) - parameters(model)).norm() <= 1e-5 * moved


@pytest.mark.parametrize(("factor", "says"), [(float("nan"), "NaN"), (1e6, "times the usual")])
def test_a_learner_whose_updates_are_refused_starts_over(tmp_path: Path, factor: float, says: str) -> None:
    """Its model breaks in mid-run: what the others have is never touched by it, and it is merged again later."""
    world = World(tmp_path, expected_learners=2, min_quorum=2, num_fragments=2, sync_every=4)  # rounds wait for both

    def poison() -> None:
        with torch.no_grad():
            for parameter in world.models[1].parameters():
                parameter.mul_(factor)

    world.start(train, world, 0, steps=150)
    world.start(train, world, 1, steps=150, at={60: poison})
    world.join()
    refusals = world.tape("refusal")
    assert all(says in line["reason"] and line["learner_id"] == 1 for line in refusals)
    assert [line["start_over"] for line in refusals].count(True) >= 1
    row = world.accounts()[1]
    assert row["updates_refused"] == len(refusals) >= 3
    assert row["updates_late"] == 0
    assert row["tokens_overwritten"] > 0
    last_refusal = refusals[-1]["seconds"]
    later = [line for line in world.tape("round") if line["seconds"] > last_refusal]
    assert any(who["learner_id"] == 1 for line in later for who in line["participants"]), "it was never merged again"
    assert bool(torch.isfinite(parameters(world.models[0])).all())
    assert float(parameters(world.models[0]).norm()) < 100
    assert torch.equal(parameters(world.models[0]), parameters(world.models[1]))


@pytest.mark.parametrize("wire_format", ["bf16", "int8"])
def test_a_first_update_near_the_end_of_fp32_is_refused(tmp_path: Path, wire_format: str) -> None:
    world = World(tmp_path, expected_learners=2, num_fragments=2, sync_every=4, wire_format=wire_format)

    def spoil() -> None:
        with torch.no_grad():
            for parameter in world.models[1].parameters() if not world.tape("refusal") else ():
                parameter.fill_(3e38)

    world.start(train, world, 0)
    world.start(train, world, 1, at=dict.fromkeys(range(1, 60), spoil))
    world.join()
    assert "norm of inf" in world.tape("refusal")[0]["reason"]
    assert float(parameters(world.models[0]).norm()) < 100
    assert torch.equal(parameters(world.models[0]), parameters(world.models[1]))


@pytest.mark.parametrize("num_others", [0, 1])
def test_a_learner_that_takes_leave_has_all_it_did_merged(tmp_path: Path, num_others: int) -> None:
    world = World(tmp_path, expected_learners=1 + num_others, num_fragments=3, sync_every=60)
    for learner_id in range(1, 1 + num_others):
        world.start(train, world, learner_id, steps=10_000, at={100: lambda: world.syncer.stop()}, ends=False)
    world.start(leave_at, world, 0, 20, drain_seconds=SECONDS)
    world.join()
    row = world.accounts()[0]
    assert row["tokens_merged"] == row["tokens_trained"] == 160
    assert [line["for_good"] for line in world.tape("leave") if line["learner_id"] == 0] == [True]


def test_a_learner_that_takes_leave_says_all_it_has_trained(tmp_path: Path) -> None:
    world = World(tmp_path, num_fragments=2, sync_every=60)
    world.start(leave_at, world, 0, 7, drain_seconds=0.0)
    world.join()
    assert world.accounts()[0]["tokens_trained"] == 56


def test_a_learner_leaves_in_time_when_the_syncer_is_away(tmp_path: Path) -> None:
    world = World(tmp_path, num_fragments=2, sync_every=60)
    learner = world.learner(0, steps=10_000)
    learner.join()
    learner.step(tokens=1)
    world.hub.cut(0)
    before = time.monotonic()
    learner.leave("enough", drain_seconds=0.5)
    assert time.monotonic() - before < 10
    world.syncer.stop()
    world.join()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model": lambda: make_model(width=9)}, r"'0\.bias' has shape \(8,\) in the run and \(9,\)"),
        ({"model": lambda: make_model(frozen=1.0)}, "frozen parameters or persistent buffers differ"),
        ({"steps": 99}, r"wants to train 99 steps, the run has 60.*max_steps=60"),
    ],
)
def test_a_learner_that_does_not_fit_is_refused(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    world = World(tmp_path, expected_learners=1, num_fragments=2, sync_every=4)
    entered, done = threading.Event(), threading.Event()

    def first() -> None:
        train(world, 0, at={5: lambda: (entered.set(), done.wait(SECONDS))})  # type: ignore[dict-item,func-returns-value]

    world.start(first)
    assert entered.wait(SECONDS)
    options = {**change, "model": change["model"]()} if "model" in change else change
    with pytest.raises(LearnerRefusedError, match=says):
        world.learner(1, **options).join()
    done.set()
    world.join()
    assert [line["learner_id"] for line in world.tape("refusal")] == [1]


def test_steps_that_follow_from_epochs_are_no_demand(tmp_path: Path) -> None:
    """Shards are not all of one size, so the same number of epochs is not the same number of steps."""
    world = World(tmp_path, expected_learners=2, num_fragments=2, sync_every=4)
    world.start(train, world, 0, steps=60, steps_from_epochs=True)
    world.start(train, world, 1, steps=59, steps_from_epochs=True)
    world.join()
    assert world.syncer.status()["total_steps"] in (59, 60)
    assert torch.equal(parameters(world.models[0]), parameters(world.models[1]))


@pytest.mark.parametrize("num_fragments", [24, 1000])
def test_more_fragments_than_the_model_allows(tmp_path: Path, num_fragments: int) -> None:
    world = World(tmp_path, num_fragments=num_fragments)  # 24: the default, but given
    said = f"num_fragments={num_fragments}, but this model .* 4 pieces at most.*--num-fragments 4 or less"
    with pytest.raises(LearnerRefusedError, match=said):
        world.learner(0, model=nn.Sequential(nn.Linear(4, 2))).join()
    world.syncer_thread.join(SECONDS)
    with pytest.raises(ConfigError, match=said):  # whose mistake it is
        raise world.failures.pop()
    world.join()


def test_the_default_number_of_fragments_is_lowered(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.start(train, world, 0, model=nn.Sequential(nn.Linear(4, 2)))
    world.join()
    assert world.syncer.status()["num_fragments"] == 4  # two rows of the weight, two values of the bias


def test_nobody_says_how_long_the_run_is(tmp_path: Path) -> None:
    world = World(tmp_path)
    with pytest.raises(LearnerRefusedError, match="--total-steps"):
        world.learner(0, steps=None).join()
    world.syncer.stop()
    world.join()


def test_two_learners_that_read_the_same_data_are_warned(tmp_path: Path) -> None:
    world = World(tmp_path, expected_learners=2, num_fragments=2, sync_every=4)
    caught: dict[int, list[str]] = {0: [], 1: []}
    lock = threading.Lock()
    gate = threading.Barrier(2)

    def run(learner_id: int) -> None:
        learner = world.learner(learner_id)
        learner.join()
        gate.wait(SECONDS)
        going = True
        while going:
            threading.Event().wait(0.003)
            going = learner.step(tokens=1, data_digest=tuple(range(NUM_HASHES)))
            with lock:
                caught[learner_id] += learner._exchange.notices
                learner._exchange.notices.clear()
        learner.finish()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DiLoCoWarning)
        for learner_id in (0, 1):
            world.start(run, learner_id)
        world.join()
    (line,) = world.tape("warning")
    assert line["learner_ids"] in ([0, 1], [1, 0])
    assert "shard_dataset" in line["text"]


def test_stop_writes_the_model_of_that_moment(tmp_path: Path) -> None:
    world = World(tmp_path, num_fragments=2, sync_every=4)
    reached = threading.Event()

    def interrupted() -> None:
        learner = world.learner(0, steps=10_000)
        learner.join()
        for _ in range(30):
            learner.step(tokens=1)
        reached.set()
        world.syncer.stop()
        learner.close()

    world.start(interrupted)
    world.join()
    assert reached.is_set()
    assert world.syncer.has_model
    assert latest_run(world.directory).facts.outer_step >= 1  # not the one that was written at the beginning


def test_what_a_learner_waits_for(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(joining, "_SAY_EVERY_SECONDS", 0.0)
    link = InProcessHub().connect(3)
    exchange = Exchange(3, "a", link, hello=lambda: pytest.fail("no link"), make_layout=lambda _: pytest.fail("no run"))
    patience = joining.Patience(3, exchange, "host:1", 60.0)
    said = []
    for change in ({}, {"linked": True, "ever_linked": True}, {"linked": False}):
        for name, value in change.items():
            setattr(exchange, name, value)
        patience.check()
        said.append(caplog.messages[-1])
    assert "no syncer yet at host:1: " in said[0]
    assert "linked, waiting for the syncer's answer at host:1" in said[1]
    assert "the link is down, looking for the syncer at host:1: " in said[2]


def test_who_joins_when_the_run_is_at_its_end_does_not_go_beyond(tmp_path: Path) -> None:
    world = World(tmp_path, num_fragments=3, total_steps=4)
    learner = world.learner(0, steps=4)
    assert learner.join()
    learner.global_step = 4
    assert not learner.step(1)
    assert learner.global_step == 4
    learner.finish()
    world.join()
