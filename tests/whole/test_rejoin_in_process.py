"""Optimizer state of learners that begin in mid-run: whole runs in this process, with links that fail on demand."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process_world import World, make_model
from torch import nn

from hf_diloco import DiLoCoPlugin
from hf_diloco.core import messages as ms
from hf_diloco.learner import donation, optimizer_state
from hf_diloco.learner.learner import Learner
from hf_diloco.learner.optimizer_state import OptimizerState, piece_digest
from hf_diloco.learner.parameters import ModelParameters
from hf_diloco.links.in_process import InProcessHub

pytestmark = pytest.mark.fast

SECONDS = 60.0
MakeOptimizer = Callable[..., torch.optim.Optimizer]


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01)


class Relay(InProcessHub):
    """Remembers the pieces of optimizer state that the syncer passes on; ``on_piece`` may do harm before it does."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.pieces: list[ms.StatePiece] = []
        self.on_piece: Callable[[int, torch.Tensor], torch.Tensor] = lambda number, payload: payload

    def send(self, learner_ids: list[int], message: ms.Message, payload: torch.Tensor | None = None) -> None:
        if isinstance(message, ms.StatePiece):
            assert payload is not None
            self.pieces.append(message)
            payload = self.on_piece(len(self.pieces), payload)
        super().send(learner_ids, message, payload)


class Trainee:
    """A learner in a thread of its own that trains until it is told to leave or to die."""

    def __init__(
        self,
        world: RejoinWorld,
        learner_id: int,
        make: MakeOptimizer = adamw,
        state: Any = None,
        *,
        may_train: bool = True,
    ) -> None:
        self.learner_id = learner_id
        self.model = make_model()
        self.optimizer = make(self.model.parameters())
        if state is not None:
            self.optimizer.load_state_dict(state)
        parameters = ModelParameters(self.model)
        self.learner = Learner(
            parameters,
            DiLoCoPlugin(syncer="in-process:1", learner_id=learner_id),
            total_steps=100_000,
            optimizer=self.optimizer,
            link=world.hub.connect(learner_id, incarnation=str(id(self))),
        )
        self.state = OptimizerState(parameters.trainable, self.optimizer)
        self.start_digests: list[str] = []  # of the state that it begins with
        self.start_state: Any = None
        self.gives: list[int] = []  # the step boundaries at which it copied a piece
        self.joined, self.may_train = threading.Event(), threading.Event()
        if may_train:
            self.may_train.set()
        self._order: str | None = None
        self.thread = world.start(self._run)

    def _run(self) -> None:
        exchange = self.learner._exchange
        give = exchange.give
        exchange.give = lambda *arguments: (self.gives.append(self.learner._accounts.steps), give(*arguments))[1]  # type: ignore[method-assign]
        try:
            self.learner.join()
            self.start_digests = [piece_digest(self.state.read(piece).result()) for piece in self.state.plan().pieces]
            self.joined.set()
            generator = torch.Generator().manual_seed(self.learner_id)
            while self._order is None:
                assert self.may_train.wait(SECONDS)
                inputs = torch.randn(8, 4, generator=generator)
                nn.functional.mse_loss(self.model(inputs), inputs[:, :2] * 2).backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                threading.Event().wait(0.002)
                if not self.learner.step(tokens=8):
                    break
            if self._order == "leave":
                self.learner.leave("the test is over")
        finally:
            self.learner.close()

    def end(self, order: str) -> None:
        """``leave`` or ``die``; returns when it has."""
        self._order = order
        self.may_train.set()
        self.thread.join(SECONDS)
        assert not self.thread.is_alive()


class RejoinWorld(World):
    """A run that is under way: ``learners`` have been merged."""

    hub: Relay

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch, num_learners: int) -> None:
        monkeypatch.setattr("in_process_world.InProcessHub", Relay)
        super().__init__(path, expected_learners=num_learners, num_fragments=3, sync_every=3)
        self.learners = {learner_id: Trainee(self, learner_id) for learner_id in range(num_learners)}
        self.wait_until(lambda: self.merged() >= set(self.learners), "merges of all")

    def merged(self, since: int = 0) -> set[int]:
        return {part["learner_id"] for line in self.tape("round")[since:] for part in line["participants"]}

    def wait_until(self, condition: Callable[[], Any], what: str) -> None:
        deadline = time.monotonic() + SECONDS
        while not condition():
            assert not self.failures, self.failures
            assert time.monotonic() < deadline, f"waited in vain for {what}"
            threading.Event().wait(0.01)

    def add(self, learner_id: int, *arguments: Any, **options: Any) -> Trainee:
        self.learners[learner_id] = Trainee(self, learner_id, *arguments, **options)
        return self.learners[learner_id]

    def taken(self, learner_id: int) -> dict[str, Any]:
        """What the tape says of the state that this learner began with."""
        self.wait_until(
            lambda: any(line["learner_id"] == learner_id for line in self.tape("state")), f"learner {learner_id}"
        )
        return [line for line in self.tape("state") if line["learner_id"] == learner_id][-1]

    def end(self) -> None:
        for trainee in self.learners.values():
            trainee.end("leave")
        self.syncer.stop()
        self.join()


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], RejoinWorld]]:
    monkeypatch.setattr(optimizer_state, "STATE_PIECE_BYTES", 64)
    worlds: list[RejoinWorld] = []

    def make(num_learners: int) -> RejoinWorld:
        worlds.append(RejoinWorld(tmp_path, monkeypatch, num_learners))
        return worlds[-1]

    yield make
    for world in worlds:
        world.end()


def test_a_learner_that_comes_back_takes_over_the_state_of_its_peer(
    start: Any, caplog: pytest.LogCaptureFixture
) -> None:
    world = start(2)
    assert not world.tape("state"), "at the start of the run there is nothing to take over"
    world.learners[1].end("die")
    donor = world.learners[0]
    with caplog.at_level("INFO", "hf_diloco"):
        newcomer = world.add(1)
        line = world.taken(1)
        world.wait_until(newcomer.joined.is_set, "the newcomer")
    num_rounds = len(world.tape("round"))
    assert (line["source"], line["donor_ids"], line["reason"]) == ("peer", [0], "")
    assert line["num_pieces"] == len(world.hub.pieces) == len(newcomer.start_digests) > 5
    assert newcomer.start_digests == [piece.digest for piece in world.hub.pieces]
    assert line["size_bytes"] == newcomer.state.plan().size_bytes
    assert len(donor.gives) == len(set(donor.gives)) == line["num_pieces"], "one piece a step boundary"
    steps = {float(state["step"]) for state in newcomer.optimizer.state.values()}
    assert min(steps) > 1
    assert "[learner 1] state of the inner optimizer: that of learner 0: " in caplog.text
    world.wait_until(lambda: 1 in world.merged(since=num_rounds), "a merge of the newcomer")


def test_own_state_is_kept(start: Any) -> None:
    world = start(2)
    world.learners[1].end("die")
    saved = world.learners[1].optimizer.state_dict()
    digests = [piece_digest(content) for content in contents(world.learners[1])]
    assert digests
    newcomer = world.add(1, state=saved)
    line = world.taken(1)
    world.wait_until(newcomer.joined.is_set, "the newcomer")
    assert (line["source"], line["donor_ids"]) == ("own", [])
    assert newcomer.start_digests == digests
    assert not world.hub.pieces


def contents(trainee: Trainee) -> list[torch.Tensor]:
    return [trainee.state.read(piece).result() for piece in trainee.state.plan().pieces]


def test_when_the_donor_dies_another_one_goes_on(start: Any) -> None:
    world = start(3)
    world.learners[2].end("die")

    def harm(number: int, payload: torch.Tensor) -> torch.Tensor:
        if number == 3:
            world.hub.cut(world.hub.pieces[0].donor_id)
        return payload

    world.hub.on_piece = harm
    newcomer = world.add(2)
    line = world.taken(2)
    first, second = line["donor_ids"]
    assert line["source"] == "peer"
    assert {first, second} == {0, 1}
    by_donor = {who: [piece.piece_index for piece in world.hub.pieces if piece.donor_id == who] for who in (0, 1)}
    assert by_donor[first] == [0, 1, 2]
    assert by_donor[second] == list(range(by_donor[second][0], line["num_pieces"]))
    assert by_donor[second][0] in (2, 3), "only what was missing (the third may have been lost, or not)"
    world.wait_until(newcomer.joined.is_set, "the newcomer")
    assert newcomer.start_digests == [piece.digest for piece in {p.piece_index: p for p in world.hub.pieces}.values()]
    world.hub.heal(first)


def test_the_recipients_link_is_lost_in_between(start: Any) -> None:
    world = start(2)
    world.learners[1].end("die")

    def harm(number: int, payload: torch.Tensor) -> torch.Tensor:
        if number == 3:
            world.hub.drop(1, "dropped by the test")
        return payload

    world.hub.on_piece = harm
    world.add(1)
    line = world.taken(1)
    assert line["source"] == "peer"
    indices = [piece.piece_index for piece in world.hub.pieces]
    assert indices[:3] == [0, 1, 2]
    assert indices[3:] == list(range(2, line["num_pieces"])), "the third was lost, and only that"


def test_a_piece_with_the_wrong_digest_is_asked_for_again(start: Any) -> None:
    world = start(2)
    world.learners[1].end("die")

    def harm(number: int, payload: torch.Tensor) -> torch.Tensor:
        return payload ^ 1 if number in (2, 3) else payload

    world.hub.on_piece = harm
    newcomer = world.add(1)
    line = world.taken(1)
    assert line["source"] == "peer"
    assert [piece.piece_index for piece in world.hub.pieces][:5] == [0, 1, 1, 1, 2]
    world.wait_until(newcomer.joined.is_set, "the newcomer")
    assert newcomer.start_digests == [piece.digest for piece in {p.piece_index: p for p in world.hub.pieces}.values()]


def test_a_donor_whose_pieces_are_bad_again_and_again_is_replaced(start: Any) -> None:
    world = start(3)
    world.learners[2].end("die")

    def harm(number: int, payload: torch.Tensor) -> torch.Tensor:
        return payload ^ 1 if world.hub.pieces[-1].donor_id == world.hub.pieces[0].donor_id else payload

    world.hub.on_piece = harm
    world.add(2)
    line = world.taken(2)
    assert line["source"] == "peer"
    assert line["donor_ids"] == [1 - world.hub.pieces[0].donor_id]


@pytest.mark.parametrize(
    "make",
    [
        lambda params: torch.optim.AdamW(params, lr=0.01, amsgrad=True),
        lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
    ],
)
def test_an_optimizer_of_another_kind_is_warmed_up(
    start: Any, make: MakeOptimizer, caplog: pytest.LogCaptureFixture
) -> None:
    world = start(2)
    world.learners[1].end("die")
    with caplog.at_level("INFO", "hf_diloco"):
        newcomer = world.add(1, make)
        line = world.taken(1)
        world.wait_until(newcomer.joined.is_set, "the newcomer")
    assert line["source"] == "warm-up"
    assert "could not give it" in line["reason"]
    assert newcomer.start_digests == []
    assert not world.hub.pieces
    assert "its learning rate is warmed up over 20 steps" in caplog.text
    assert "another kind" in caplog.text


def test_a_newcomer_that_was_not_merged_is_no_donor(start: Any) -> None:
    world = start(1)
    newcomer = Trainee(world, 1, may_train=False)
    world.learners[1] = newcomer
    assert world.taken(1)["source"] == "peer"
    world.learners[0].end("leave")
    world.add(2)
    line = world.taken(2)
    assert (line["source"], line["donor_ids"]) == ("warm-up", [])
    assert line["reason"] == "no healthy peer has any"
    newcomer.may_train.set()  # and once it has been merged, it is one
    world.wait_until(lambda: 1 in world.merged(), "a merge of the newcomer")
    world.add(3)
    assert world.taken(3)["source"] == "peer"


def test_it_is_not_waited_for_too_long(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A donor whose training stands still reaches no step boundary."""
    monkeypatch.setattr(donation, "LIMIT_SECONDS", 1.0)
    world = start(2)
    world.learners[1].end("die")
    world.learners[0].may_train.clear()
    newcomer = world.add(1)
    line = world.taken(1)
    assert line["source"] == "warm-up"
    assert "did not come within 1 s" in line["reason"]
    world.wait_until(newcomer.joined.is_set, "the newcomer")
    assert newcomer.start_digests == []


def test_a_run_that_ends_is_not_held_up(start: Any) -> None:
    world = start(2)
    world.learners[1].end("die")
    world.learners[0].may_train.clear()
    world.add(1)
    world.wait_until(lambda: len(world.tape("join")) == 3, "the newcomer")
    world.learners[0].end("leave")
    assert world.taken(1)["source"] == "warm-up"


def test_a_link_that_stays_down_is_not_waited_for(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(donation, "_DOWN_SECONDS", 0.2)
    world = start(2)
    world.learners[1].end("die")
    world.learners[0].may_train.clear()
    newcomer = world.add(1)
    world.wait_until(lambda: world.learners[0].learner._donor.has_work, "the newcomer to ask its peer")
    world.hub.cut(1)
    world.wait_until(newcomer.joined.is_set, "the newcomer to train without the syncer")
    assert newcomer.start_digests == []
    world.hub.heal(1)


def test_a_donor_that_says_nothing_is_replaced(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(donation, "_PATIENCE_SECONDS", 0.3)
    world = start(3)
    world.learners[2].end("die")

    def harm(number: int, payload: torch.Tensor) -> torch.Tensor:
        if number == 3:
            world.learners[world.hub.pieces[0].donor_id].may_train.clear()
        return payload

    world.hub.on_piece = harm
    world.add(2)
    line = world.taken(2)
    assert line["source"] == "peer"
    assert set(line["donor_ids"]) == {0, 1}


def test_what_would_surely_take_too_long_is_given_up_early(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_state, "STATE_PIECE_BYTES", 8)
    monkeypatch.setattr(donation, "_JUDGE_SECONDS", 0.1)
    monkeypatch.setattr(donation, "LIMIT_SECONDS", 5.0)
    world = start(2)
    world.learners[1].end("die")

    def harm(number: int, payload: torch.Tensor) -> torch.Tensor:
        threading.Event().wait(0.25)  # a slow link: 60 pieces would take 15 s
        return payload

    world.hub.on_piece = harm
    world.add(1)
    line = world.taken(1)
    assert line["source"] == "warm-up"
    assert line["reason"].startswith("at this rate it would take ")
    assert line["waited_seconds"] < 5
