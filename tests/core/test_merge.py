import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_diloco.core.fragments import FragmentLayout
from hf_diloco.core.merge import (
    MergeAccumulator,
    pseudogradient,
    radial_directional_average,
    token_weight,
    weighted_average,
)

pytestmark = pytest.mark.fast

SEEDS = st.integers(0, 2**32 - 1)
WEIGHTS = st.lists(st.floats(1e-3, 1e12), min_size=1, max_size=6)


def updates(seed, num_updates, shape=(5, 7)):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) * 10.0 ** (index % 3) for index in range(num_updates)]


def reference_rda(tensors, weights):
    """The equation, in fp64, two passes."""
    wide = [tensor.double() for tensor in tensors]
    norm = sum(w * t.norm() for w, t in zip(weights, wide, strict=True)) / sum(weights)
    direction = sum(w * t / t.norm() for w, t in zip(weights, wide, strict=True) if t.norm() > 0) / sum(weights)
    return norm * direction / direction.norm()


def assert_near(got, expected, tolerance=2e-6):
    assert got.shape == expected.shape
    assert (got.double() - expected.double()).norm() <= tolerance * expected.double().norm()


@settings(deadline=None)
@given(SEEDS, WEIGHTS)
def test_both_averages_follow_their_equations(seed, weights):
    tensors = updates(seed, len(weights))
    assert_near(radial_directional_average(tensors, weights), reference_rda(tensors, weights))
    plain = sum(w * t.double() for w, t in zip(weights, tensors, strict=True)) / sum(weights)
    scale = max(t.norm() for t in tensors)
    assert (weighted_average(tensors, weights) - plain).norm() <= 2e-6 * scale


def test_orthogonal_updates_keep_their_norm():
    tensors = [3 * row for row in torch.eye(4)]
    merged = radial_directional_average(tensors, [1.0] * 4)
    assert torch.allclose(merged, torch.full((4,), 1.5))  # norm 3; the plain average has 1.5
    assert weighted_average(tensors, [1.0] * 4).norm() == pytest.approx(1.5)


@settings(deadline=None)
@given(SEEDS, WEIGHTS)
def test_equal_updates_merge_to_themselves(seed, weights):
    (update,) = updates(seed, 1)
    assert torch.equal(weighted_average([update] * len(weights), weights), update)
    assert_near(radial_directional_average([update] * len(weights), weights), update, 1e-6)


@settings(deadline=None)
@given(SEEDS, st.floats(1e-3, 1e12))
def test_one_update_merges_to_itself_bit_for_bit(seed, weight):
    (update,) = updates(seed, 1)
    assert torch.equal(weighted_average([update], [weight]), update)
    assert torch.equal(radial_directional_average([update], [weight]), update)


@settings(deadline=None)
@given(SEEDS, WEIGHTS, st.floats(1e-6, 1e6))
def test_only_the_ratio_of_weights_matters(seed, weights, factor):
    tensors = updates(seed, len(weights))
    scaled = [weight * factor for weight in weights]
    assert_near(radial_directional_average(tensors, scaled), radial_directional_average(tensors, weights))


@pytest.mark.parametrize("factor", [1e-42, 1e-30, 1e30, 1e36])
def test_tiny_and_huge_updates(factor):
    tensors = [tensor * factor for tensor in updates(0, 3)]
    assert_near(
        radial_directional_average(tensors, [1.0, 2.0, 3.0]),
        reference_rda(tensors, [1.0, 2.0, 3.0]),
        1e-3 if factor < 1e-37 else 2e-6,
    )


def test_the_norm_of_a_large_tensor_is_exact():
    # In fp32, adding the squares of 1e-4 to that of 1 one by one would lose them all.
    update = torch.full((3_000_000,), 1e-4)
    update[0] = 1.0
    merged = radial_directional_average([update, torch.zeros_like(update)], [1.0, 1.0])
    assert merged[0] == pytest.approx(0.5, rel=1e-6)
    merged = radial_directional_average([update, -0.5 * update, update], [1.0, 1.0, 1.0])
    assert merged.double().norm() == pytest.approx(update.double().norm().item() * 2.5 / 3, rel=1e-6)


def test_directions_that_cancel_leave_the_plain_average():
    (update,) = updates(0, 1, (1000,))
    merged = radial_directional_average([update, -3 * update], [1.0, 1.0])
    assert_near(merged, -update, 1e-6)
    merged = radial_directional_average([update, update, -2 * update, -3 * update], [0.1, 0.2, 0.2, 0.1])
    assert_near(merged, -update * 2 / 3, 1e-5)


def test_an_update_without_norm_has_no_direction_but_weight():
    (update,) = updates(0, 1)
    assert_near(radial_directional_average([torch.zeros(5, 7), update], [3.0, 1.0]), update / 4)
    assert torch.equal(radial_directional_average([torch.zeros(3), torch.zeros(3)], [1.0, 2.0]), torch.zeros(3))


def test_weight_zero_has_no_effect():
    tensors = updates(0, 3)
    expected = radial_directional_average(tensors[1:], [1.0, 2.0])
    assert torch.equal(radial_directional_average(tensors, [0.0, 1.0, 2.0]), expected)


def test_dtypes_and_scalars():
    assert weighted_average([torch.tensor(1.0, dtype=torch.bfloat16)], [2.0]).dtype == torch.float32
    wide = radial_directional_average([torch.tensor([3.0, 4.0], dtype=torch.float64)] * 2, [1.0, 1.0])
    assert wide.dtype == torch.float64
    assert radial_directional_average([torch.tensor(2.0), torch.tensor(4.0)], [1.0, 1.0]) == pytest.approx(3.0)


def test_inputs_are_not_changed():
    tensors = updates(0, 3)
    before = [tensor.clone() for tensor in tensors]
    radial_directional_average(tensors, [1.0, 2.0, 3.0])[0] = 7.0
    weighted_average(tensors[:1], [1.0])[0] = 7.0
    assert all(torch.equal(now, then) for now, then in zip(tensors, before, strict=True))


@pytest.mark.parametrize("average", [weighted_average, radial_directional_average])
@pytest.mark.parametrize(
    ("tensors", "weights", "message"),
    [
        ([torch.ones(2)], [1.0, 2.0], "1 tensors, but 2 weights"),
        ([], [], "nothing to merge: the weights sum to zero"),
        ([torch.ones(2)] * 2, [0.0, 0.0], "nothing to merge: the weights sum to zero"),
        ([torch.ones(2)] * 2, [2.0, -1.0], "a weight must be finite and not negative, got -1.0"),
        ([torch.ones(2)], [math.nan], "a weight must be finite and not negative, got nan"),
        ([torch.ones(2), torch.ones(2, 1)], [1.0, 1.0], r"shape \(2,\) and \(2, 1\) cannot be merged"),
        ([torch.tensor([1.0, math.nan])], [1.0], "NaN or infinity"),
        ([torch.tensor([1.0, -math.inf])], [1.0], "NaN or infinity"),
    ],
)
def test_wrong_arguments(average, tensors, weights, message):
    with pytest.raises(ValueError, match=message):
        average(tensors, weights)


def test_pseudogradient():
    assert torch.equal(pseudogradient(torch.tensor([3.0, 1.0]), torch.tensor([1.0, 2.0])), torch.tensor([2.0, -1.0]))
    low = pseudogradient(torch.tensor(1.0 + 2**-20), torch.tensor(1.0, dtype=torch.bfloat16))
    assert low == 2**-20  # taken in fp32
    with pytest.raises(ValueError, match=r"global value of shape \(2,\), local value of shape \(1,\)"):
        pseudogradient(torch.ones(2), torch.ones(1))


def test_token_weight():
    assert token_weight(100, 4) == 2500.0
    assert token_weight(0, 4) == 0.0
    assert token_weight(7, 0) == 0.0
    assert token_weight(10**12, 24) == pytest.approx(1e24 / 24)
    with pytest.raises(ValueError, match="must not be negative, got tokens=-1, steps=2"):
        token_weight(-1, 2)


# ------------------------------------------------------------------------------------------------ MergeAccumulator


LAYOUT = FragmentLayout.build({"a": (6, 5), "b": (), "embed": (9, 4)}, 1, averaged=["embed"])
(FRAGMENT,) = LAYOUT.fragments


def merged(flat_updates, weights, merge="rda", fragment=FRAGMENT):
    accumulator = MergeAccumulator(fragment, merge)
    for update, weight in zip(flat_updates, weights, strict=True):
        accumulator.add(update, weight)
    return accumulator.result()


@settings(deadline=None)
@given(SEEDS, WEIGHTS)
def test_the_accumulator_equals_the_functions_slice_by_slice(seed, weights):
    flat = updates(seed, len(weights), (FRAGMENT.num_parameters,))
    got, plain = merged(flat, weights), merged(flat, weights, "average")
    for piece in FRAGMENT.slices:
        where = slice(piece.offset, piece.offset + piece.num_parameters)
        parts = [update[where] for update in flat]
        average = weighted_average if piece.name == "embed" else radial_directional_average
        assert torch.equal(got[where], average(parts, weights))
        assert torch.equal(plain[where], weighted_average(parts, weights))


@settings(deadline=None)
@given(SEEDS, WEIGHTS, st.randoms(use_true_random=False))
def test_the_order_of_arrival_changes_rounding_only(seed, weights, rng):
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(FRAGMENT.num_parameters, generator=generator)
    flat = [common + torch.randn(common.shape, generator=generator) for _ in weights]
    order = list(range(len(weights)))
    rng.shuffle(order)
    assert_near(
        merged([flat[index] for index in order], [weights[index] for index in order]), merged(flat, weights), 1e-5
    )


def test_fragments_larger_than_a_slab():
    (fragment,) = FragmentLayout.build({"a": (300_001,), "b": (7,)}, 1).fragments
    flat = updates(0, 3, (300_008,))
    assert_near(
        merged(flat, [1.0, 2.0, 3.0], fragment=fragment)[:300_001],
        reference_rda([u[:300_001] for u in flat], [1.0, 2.0, 3.0]),
    )


def test_the_accumulator_counts_and_goes_on_after_a_result():
    flat = updates(0, 2, (FRAGMENT.num_parameters,))
    accumulator = MergeAccumulator(FRAGMENT, "rda")
    accumulator.add(flat[0], 2.0)
    accumulator.add(flat[1], 0.0)
    first = accumulator.result()
    assert torch.equal(first, flat[0])
    assert (accumulator.num_updates, accumulator.total_weight) == (1, 2.0)
    first.zero_()
    accumulator.add(flat[1], 3.0)
    assert (accumulator.num_updates, accumulator.total_weight) == (2, 5.0)
    assert torch.equal(accumulator.result(), merged(flat, [2.0, 3.0]))


def test_updates_are_neither_kept_nor_changed():
    update = updates(0, 1, (FRAGMENT.num_parameters,))[0]
    before = update.clone()
    accumulator = MergeAccumulator(FRAGMENT, "rda")
    accumulator.add(update, 1.0)
    assert torch.equal(update, before)
    update.zero_()
    assert torch.equal(accumulator.result(), before)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["a", "embed"])
def test_a_refused_update_leaves_no_trace(name, bad):
    good, poisoned = updates(0, 2, (FRAGMENT.num_parameters,))
    poisoned[next(piece.offset for piece in FRAGMENT.slices if piece.name == name)] = bad
    accumulator = MergeAccumulator(FRAGMENT, "rda")
    accumulator.add(good, 1.0)
    with pytest.raises(ValueError, match=f"update of fragment 0 has NaN or infinity in '{name}'"):
        accumulator.add(poisoned, 1.0)
    assert torch.equal(accumulator.result(), good)
    assert accumulator.num_updates == 1


def test_wrong_use_of_the_accumulator():
    with pytest.raises(ValueError, match="merge must be 'rda' or 'average', got 'median'"):
        MergeAccumulator(FRAGMENT, "median")
    accumulator = MergeAccumulator(FRAGMENT, "rda")
    with pytest.raises(ValueError, match=r"must be 67 values of torch.float32, got shape \(3,\) of torch.float32"):
        accumulator.add(torch.ones(3), 1.0)
    with pytest.raises(ValueError, match=r"got shape \(67,\) of torch.bfloat16"):
        accumulator.add(torch.ones(67, dtype=torch.bfloat16), 1.0)
    with pytest.raises(ValueError, match="a weight must be finite and not negative, got -2"):
        accumulator.add(torch.ones(67), -2.0)
    accumulator.add(torch.ones(67), 0.0)
    with pytest.raises(ValueError, match="nothing to merge: the weights sum to zero"):
        accumulator.result()
