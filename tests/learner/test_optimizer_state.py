"""Optimizer state in pieces: what one optimizer gives, another of its kind can go on from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Adafactor

from hf_diloco.errors import MessageError, UnsupportedError
from hf_diloco.learner import optimizer_state
from hf_diloco.learner.optimizer_state import OptimizerState, piece_digest
from hf_diloco.learner.parameters import ModelParameters
from hf_diloco.learner.warm_up import MOST_STEPS, warm_up, warm_up_steps

pytestmark = pytest.mark.fast

KINDS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "adamw foreach": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True, weight_decay=0.1),
    "adamw amsgrad": lambda params: torch.optim.AdamW(params, lr=0.01, amsgrad=True),
    "adam, lr a tensor": lambda params: torch.optim.Adam(params, lr=torch.tensor(0.01), weight_decay=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9, nesterov=True),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01, centered=True, momentum=0.9),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.01),
    "nadam": lambda params: torch.optim.NAdam(params, lr=0.01),
    "radam": lambda params: torch.optim.RAdam(params, lr=0.01),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.01),
    "rprop": lambda params: torch.optim.Rprop(params, lr=0.01),
}


class Trained:
    """A small model and its optimizer; ``step`` trains it on data that depend on the number of the step alone."""

    def __init__(self, make: Callable[..., torch.optim.Optimizer], *, width: int = 6, model: Any = None) -> None:
        torch.manual_seed(0)
        self.model = model or nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 2))
        self.optimizer = make(self.model.parameters())
        self.state = OptimizerState(ModelParameters(self.model).trainable, self.optimizer)

    def step(self, number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        inputs = torch.randn(8, 4, generator=generator)
        self.model(inputs).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def values(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self.model.parameters()]

    def content(self) -> list[torch.Tensor]:
        return [self.state.read(piece).result() for piece in self.state.plan().pieces]


def hand_over(donor: OptimizerState, recipient: OptimizerState) -> None:
    plan = donor.plan()
    recipient.fill()
    mine = recipient.plan(plan.without)
    assert mine == plan
    for piece in plan.pieces:
        recipient.write(piece, donor.read(piece).result())
    recipient.clear(plan.without)


@pytest.fixture(params=sorted(KINDS))
def make(request: pytest.FixtureRequest) -> Callable[..., torch.optim.Optimizer]:
    return KINDS[request.param]


def test_another_optimizer_goes_on_as_the_first_would(
    make: Callable[..., torch.optim.Optimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizer_state, "STATE_PIECE_BYTES", 40)
    first, second = Trained(make), Trained(make)
    for number in range(7):
        first.step(number)
    second.model.load_state_dict(first.model.state_dict())
    before = second.values()
    hand_over(first.state, second.state)
    assert all(torch.equal(*pair) for pair in zip(before, second.values(), strict=True)), "filling changed the model"
    assert all(parameter.grad is None for parameter in second.model.parameters())
    assert [piece_digest(piece) for piece in first.content()] == [piece_digest(piece) for piece in second.content()]
    assert max(piece.numel() for piece in first.content()) <= 40 < sum(piece.numel() for piece in first.content())
    for number in range(7, 10):
        first.step(number)
        second.step(number)
    assert all(torch.equal(*pair) for pair in zip(first.values(), second.values(), strict=True))


def test_what_was_filled_and_forgotten_is_as_new(make: Callable[..., torch.optim.Optimizer]) -> None:
    first, second = Trained(make), Trained(make)
    second.state.fill()
    assert not second.state.is_empty
    second.state.clear()
    assert second.state.is_empty
    for number in range(3):
        first.step(number)
        second.step(number)
    assert all(torch.equal(*pair) for pair in zip(first.values(), second.values(), strict=True))


def test_the_learning_rate_is_what_it_was(make: Callable[..., torch.optim.Optimizer]) -> None:
    trained = Trained(make)
    rate = trained.optimizer.param_groups[0]["lr"]
    trained.state.fill()
    assert trained.optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == pytest.approx(0.01)


def test_an_optimizer_without_state_stays_empty() -> None:
    trained = Trained(lambda params: torch.optim.SGD(params, lr=0.1))
    trained.state.fill()
    assert trained.state.is_empty
    assert trained.state.plan().pieces == ()


def test_parameters_that_have_never_had_a_gradient_stay_without_state() -> None:
    def make(params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=0.01)

    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(4, 2), nn.Linear(3, 3)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.used(inputs)

    first, second = Trained(make, model=Unused()), Trained(make, model=Unused())
    first.step(0)
    assert first.state.plan().without == ("unused.bias", "unused.weight")
    hand_over(first.state, second.state)
    assert second.state.plan() == first.state.plan()
    assert second.model.unused.weight not in second.optimizer.state
    with pytest.raises(UnsupportedError, match="no parameter 'other'"):
        second.state.plan(["other"])


@pytest.mark.parametrize(
    "other",
    [
        Trained(KINDS["adamw amsgrad"]),
        Trained(KINDS["momentum"]),
        Trained(KINDS["adam, lr a tensor"]),
        Trained(KINDS["adamw fused"], width=7),
        Trained(KINDS["adamw fused"], model=nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Tanh(), nn.Linear(6, 2))),
        Trained(KINDS["adamw fused"], model=nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()),
    ],
    ids=["amsgrad", "momentum", "adam", "shape", "names", "dtype"],
)
def test_the_fingerprint_tells_what_does_not_fit(other: Trained) -> None:
    trained = Trained(KINDS["adamw fused"])
    trained.state.fill()
    other.state.fill()
    assert trained.state.plan().fingerprint != other.state.plan().fingerprint
    foreach = Trained(KINDS["adamw foreach"])
    foreach.state.fill()
    assert trained.state.plan() == foreach.state.plan(), "how it is computed does not matter"


@pytest.mark.parametrize("change", [lambda data: data[:-4], lambda data: torch.cat([data, data[:4]])])
def test_a_piece_of_the_wrong_size_is_refused(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    trained = Trained(KINDS["adamw fused"])
    trained.step(0)
    (piece,) = trained.state.plan().pieces
    with pytest.raises(MessageError, match=f"bytes, not {trained.state.plan().size_bytes}"):
        trained.state.write(piece, change(trained.content()[0]))


def test_a_piece_that_is_not_finite_is_refused_and_nothing_is_written() -> None:
    trained = Trained(KINDS["adamw fused"])
    trained.step(0)
    (piece,) = trained.state.plan().pieces
    bad = trained.content()[0].clone().view(torch.float32).neg()
    bad[-1] = float("nan")
    before = trained.content()[0].clone()
    with pytest.raises(MessageError, match="NaN or infinite"):
        trained.state.write(piece, bad.view(torch.uint8))
    assert torch.equal(trained.content()[0], before)


def test_tensors_in_another_memory_order() -> None:
    def make(params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=0.01, foreach=False, fused=False)

    def model(memory_format: torch.memory_format) -> Trained:
        torch.manual_seed(0)
        return Trained(make, model=nn.Conv2d(3, 5, 3).to(memory_format=memory_format))

    first, second = model(torch.contiguous_format), model(torch.channels_last)
    first.model(torch.randn(1, 3, 4, 4)).square().sum().backward()
    first.optimizer.step()
    hand_over(first.state, second.state)
    moments = second.optimizer.state[second.model.weight]["exp_avg"]
    assert not moments.is_contiguous()
    assert torch.equal(moments, first.optimizer.state[first.model.weight]["exp_avg"])
    assert torch.equal(second.content()[0], first.content()[0])


def test_a_snapshot_does_not_change_with_the_state() -> None:
    trained = Trained(KINDS["adamw fused"])
    trained.step(0)
    snapshot = trained.state.read(trained.state.plan().pieces[0])
    before = snapshot.result().clone()
    trained.step(1)
    assert torch.equal(snapshot.result(), before)
    assert not torch.equal(trained.content()[0], before)


def test_optimizers_that_are_not_served() -> None:
    class Own(torch.optim.SGD):
        pass

    model = nn.Linear(2, 2)
    trainable = ModelParameters(model).trainable
    with pytest.raises(UnsupportedError, match=r"Own is not an optimizer of torch\.optim"):
        OptimizerState(trainable, Own(model.parameters(), lr=0.1))
    with pytest.raises(UnsupportedError, match="not the model's trainable ones"):
        OptimizerState(trainable, torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1))
    lbfgs = OptimizerState(trainable, torch.optim.LBFGS(model.parameters()))
    with pytest.raises(UnsupportedError, match=r"LBFGS makes no step with zero gradients"):
        lbfgs.fill()
    assert model.weight.grad is None
    assert optimizer_state.optimizer_state(trainable, Own(model.parameters(), lr=0.1))[0] is None


def test_whether_an_optimizer_has_learned_something(make: Callable[..., torch.optim.Optimizer]) -> None:
    trained = Trained(make)
    assert not optimizer_state.has_learned(trained.optimizer), "Adagrad begins with sums of zero"
    trained.step(0)
    assert optimizer_state.has_learned(trained.optimizer)


def test_an_optimizer_that_is_not_of_torch_has_learned_something_too() -> None:
    model = nn.Linear(4, 2)
    optimizer = Adafactor(model.parameters(), lr=0.01, relative_step=False, scale_parameter=False)
    assert not optimizer_state.has_learned(optimizer)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert optimizer_state.has_learned(optimizer)
    assert not optimizer_state.has_learned(None)


def test_a_warm_up_rises_to_the_rate_of_the_schedule() -> None:
    trained = Trained(lambda params: torch.optim.Adam(params, lr=1.0, betas=(0.5, 0.75)))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(trained.optimizer, 0.5)  # each rate is made from the last one
    seen: list[float] = []
    assert warm_up(trained.optimizer) == 4
    trained.optimizer.register_step_pre_hook(lambda optimizer, *_: seen.append(optimizer.param_groups[0]["lr"]))
    trained.optimizer.register_step_post_hook(lambda *_: None)  # others may come after that of the warm-up
    for number in range(6):
        trained.step(number)
        assert trained.optimizer.param_groups[0]["lr"] == 0.5**number
        scheduler.step()
    assert seen == [0.25, 0.5 * 0.5, 0.25 * 0.75, 0.125, 0.0625, 0.03125]


def test_a_second_warm_up_replaces_the_first() -> None:
    trained = Trained(lambda params: torch.optim.Adam(params, lr=1.0, betas=(0.5, 0.75)))
    seen: list[float] = []
    for num_steps in (1, 0, 6):
        warm_up(trained.optimizer)
        for number in range(num_steps):
            with trained.optimizer.register_step_pre_hook(
                lambda optimizer, *_: seen.append(optimizer.param_groups[0]["lr"])
            ):
                trained.step(number)
            assert trained.optimizer.param_groups[0]["lr"] == 1.0
    assert seen == [0.25, 0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


@pytest.mark.parametrize(("beta2", "steps"), [(0.9, 10), (0.95, 20), (0.999, MOST_STEPS), (1.0, MOST_STEPS), (0.0, 1)])
def test_a_warm_up_is_as_long_as_the_second_moments_need(beta2: float, steps: int) -> None:
    parameter = nn.Parameter(torch.zeros(1))
    if beta2 < 1:
        assert warm_up_steps(torch.optim.AdamW([parameter], betas=(0.9, beta2))) == steps
    assert warm_up_steps(torch.optim.RMSprop([parameter])) == MOST_STEPS
