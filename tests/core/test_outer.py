import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_diloco.core.merge import pseudogradient, radial_directional_average
from hf_diloco.core.outer import OuterOptimizer

pytestmark = pytest.mark.fast


def tensors(seed):
    generator = torch.Generator().manual_seed(seed)
    return {"a": torch.randn(3, 4, generator=generator), "b": torch.randn((), generator=generator)}


def hand_written_step(values, momentum_buffers, gradients, lr, momentum, nesterov):
    for name, gradient in gradients.items():
        buffer = momentum * momentum_buffers.get(name, torch.zeros_like(gradient)) + gradient
        momentum_buffers[name] = buffer
        values[name] = values[name] - lr * (gradient + momentum * buffer if nesterov else buffer)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**31), st.floats(0.01, 2), st.floats(0, 0.99), st.booleans())
def test_equals_sgd_by_hand(seed, lr, momentum, nesterov):
    values = tensors(seed)
    expected, buffers = {name: value.clone() for name, value in values.items()}, {}
    outer = OuterOptimizer(values, lr, momentum, nesterov)
    for step in range(4):
        gradients = tensors(seed + step + 1)
        outer.step(gradients)
        hand_written_step(expected, buffers, gradients, lr, momentum, nesterov)
    for name in values:
        assert torch.allclose(values[name], expected[name], rtol=1e-5, atol=1e-5)


def test_nesterov_is_the_default():
    values = {"a": torch.tensor([1.0])}
    OuterOptimizer(values, lr=0.5, momentum=0.5).step({"a": torch.tensor([1.0])})
    assert values["a"].item() == 1.0 - 0.5 * 1.5


def test_lr_1_without_momentum_makes_the_global_value_the_local_one():
    anchor = {"a": torch.tensor([1.0, 2.0, -4.0])}
    local = torch.tensor([1.25, 1.0, -3.0])
    merged = radial_directional_average([pseudogradient(anchor["a"], local)], [123.0])
    OuterOptimizer(anchor, lr=1.0, momentum=0.0).step({"a": merged})
    assert torch.equal(anchor["a"], local)


def test_values_are_updated_in_place_and_inputs_kept():
    values, gradients = tensors(0), tensors(1)
    addresses, before = [v.data_ptr() for v in values.values()], {k: g.clone() for k, g in gradients.items()}
    outer = OuterOptimizer(values, 0.7, 0.7)
    outer.step(gradients)
    outer.step(gradients)
    assert [v.data_ptr() for v in values.values()] == addresses
    assert all(torch.equal(gradients[name], before[name]) for name in before)
    assert all(value.grad is None for value in values.values())
    assert not torch.equal(values["a"], tensors(0)["a"])


@pytest.mark.parametrize("momentum", [0.0, 0.7])
@pytest.mark.parametrize("steps_before", [0, 1, 3])
def test_a_restored_optimizer_goes_on_bit_for_bit(momentum, steps_before):
    values = tensors(0)
    outer = OuterOptimizer(values, 0.7, momentum)
    for step in range(steps_before):
        outer.step(tensors(step))
    copies = {name: value.clone() for name, value in values.items()}
    restored = OuterOptimizer(copies, 0.7, momentum)
    restored.load_state_dict(outer.state_dict())
    assert set(restored.state_dict()) == ({"a", "b"} if momentum and steps_before else set())
    for step in range(2):
        outer.step(tensors(10 + step))
        restored.step(tensors(10 + step))
        assert all(torch.equal(values[name], copies[name]) for name in values)


def test_an_empty_state_forgets_the_momentum():
    values = {"a": torch.zeros(1)}
    outer = OuterOptimizer(values, 1.0, 0.5)
    outer.step({"a": torch.ones(1)})
    outer.load_state_dict({})
    assert outer.state_dict() == {}
    values["a"].zero_()
    outer.step({"a": torch.ones(1)})
    assert values["a"].item() == -1.5


def test_a_loaded_state_is_a_copy():
    outer = OuterOptimizer({"a": torch.zeros(1)}, 1.0, 0.5)
    state = {"a": torch.ones(1)}
    outer.load_state_dict(state)
    outer.step({"a": torch.ones(1)})
    assert state["a"].item() == 1.0


@pytest.mark.parametrize(
    ("gradients", "message"),
    [
        ({"a": torch.ones(2)}, "no pseudogradient for 'b'"),
        ({"a": torch.ones(2), "b": torch.ones(()), "c": torch.ones(1)}, "unknown pseudogradient 'c'"),
        (
            {"a": torch.ones(3), "b": torch.ones(())},
            r"pseudogradient of 'a' must be \(2,\) of torch.float32, got \(3,\)",
        ),
        (
            {"a": torch.ones(2), "b": torch.ones((), dtype=torch.float64)},
            r"of 'b' must be .* got \(\) of torch.float64",
        ),
    ],
)
def test_wrong_pseudogradients_move_nothing(gradients, message):
    values = {"a": torch.zeros(2), "b": torch.zeros(())}
    with pytest.raises(ValueError, match=message):
        OuterOptimizer(values, 0.7, 0.7).step(gradients)
    assert all(torch.equal(value, torch.zeros_like(value)) for value in values.values())


def test_wrong_state_and_values():
    with pytest.raises(ValueError, match="no momentum for 'a'"):
        OuterOptimizer({"a": torch.zeros(2), "b": torch.zeros(2)}, 0.7, 0.7).load_state_dict({"b": torch.zeros(2)})
    with pytest.raises(ValueError, match=r"the global value of 'a' must be torch.float32, got torch.bfloat16"):
        OuterOptimizer({"a": torch.zeros(2, dtype=torch.bfloat16)}, 0.7, 0.7)
    with pytest.raises(ValueError, match="Invalid learning rate: -1"):
        OuterOptimizer({"a": torch.zeros(2)}, -1.0, 0.7)
