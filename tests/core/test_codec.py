import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_diloco.core.codec import WIRE_FORMATS, decode, digest, encode, encoded_size
from hf_diloco.errors import ConfigError, MessageError

pytestmark = pytest.mark.fast

FP32_MAX = torch.finfo(torch.float32).max
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
ANY_FINITE = st.one_of(FLOATS, st.sampled_from([0.0, -0.0, FP32_MAX, -FP32_MAX, 1e-45, -1e-40, 2.0**-126, 3.39e38]))
VALUES = st.lists(ANY_FINITE, max_size=300)
INT4_LEVELS = torch.tensor([0.0] + [sign * 2.0**e for e in range(-6, 1) for sign in (1, -1)], dtype=torch.float64)


def roundtrip(values, wire_format):
    return decode(encode(values, wire_format), wire_format, values.shape)


def normal(num_values, seed=0, scale=1.0):
    return torch.randn(num_values, generator=torch.Generator().manual_seed(seed)) * scale


def largest_of_block(values):
    """The largest magnitude of each value's block of 128, fp64."""
    padded = torch.nn.functional.pad(values.abs().double(), (0, -len(values) % 128)).view(-1, 128)
    return padded.amax(dim=1, keepdim=True).expand(-1, 128).reshape(-1)[: len(values)]


def largest_error(values, wire_format):
    """What rounding may change each value by; 2^-126 for what fp32 or bf16 denormals cannot hold."""
    if wire_format == "fp32":
        return torch.zeros(len(values), dtype=torch.float64)
    if wire_format == "bf16":
        return values.abs().double() * 2**-8 + 2.0**-134
    largest = largest_of_block(values)
    if wire_format == "int8":  # half a step; the step itself is rounded to 8 bits
        return largest / 254 * (1 + 2**-7) + 2.0**-126
    scale = largest * (1 + 2**-8)  # int4: half way to the next level, which is at most a third of the value away
    return torch.maximum(values.abs().double() / 3 * (1 + 2**-7), scale * 2**-7) + largest * 2**-8 + 2.0**-126


@pytest.mark.parametrize("wire_format", WIRE_FORMATS)
@settings(deadline=None)
@given(values=VALUES)
def test_any_finite_value_is_decoded_finite_and_near(wire_format, values):
    tensor = torch.tensor(values, dtype=torch.float32)
    got = roundtrip(tensor, wire_format)
    assert got.dtype == torch.float32
    assert got.isfinite().all()
    assert ((got.double() - tensor.double()).abs() <= largest_error(tensor, wire_format)).all()


@pytest.mark.parametrize("wire_format", WIRE_FORMATS)
@pytest.mark.parametrize(
    "shape", [(), (0,), (3, 0, 2), (1,), (127,), (128,), (129,), (4, 5, 6), (131072 + 1,), (300, 1000)]
)
def test_shapes_and_sizes(wire_format, shape):
    tensor = normal(math.prod(shape)).reshape(shape)
    data = encode(tensor, wire_format)
    assert data.dtype == torch.uint8
    assert data.shape == (encoded_size(tensor.numel(), wire_format),)
    got = decode(data, wire_format, shape)
    assert got.shape == shape
    assert (got - tensor).norm() <= {"fp32": 0, "bf16": 0.004, "int8": 0.02, "int4": 0.35}[wire_format] * tensor.norm()


@pytest.mark.parametrize(("wire_format", "bits"), [("fp32", 32), ("bf16", 16), ("int8", 8.125), ("int4", 4.125)])
def test_bits_a_value(wire_format, bits):
    assert encoded_size(128_000, wire_format) * 8 == 128_000 * bits
    assert encoded_size(0, wire_format) == 0


def test_fp32_is_exact_and_bf16_rounds_to_nearest_even():
    tensor = normal(1000)
    assert torch.equal(roundtrip(tensor, "fp32"), tensor)
    assert torch.equal(roundtrip(tensor, "bf16"), tensor.bfloat16().float())
    assert roundtrip(torch.tensor([1 + 2**-8, 1 + 3 * 2**-8]), "bf16").tolist() == [1.0, 1 + 2**-6]


def test_int8_values_are_multiples_of_the_step():
    tensor = torch.arange(-127, 128, dtype=torch.float32)[:128] * 0.25
    assert torch.equal(roundtrip(tensor, "int8"), tensor)


def test_int4_levels_are_exact():
    levels = INT4_LEVELS.float() * 0.375
    assert torch.equal(roundtrip(levels, "int4"), levels)


@settings(deadline=None)
@given(st.lists(st.floats(-1, 1, width=32), max_size=127))
def test_int4_takes_the_nearest_level(values):
    tensor = torch.tensor([1.0, *values])  # the scale is 1
    distances = (tensor.double()[:, None] - INT4_LEVELS).abs()
    error = (roundtrip(tensor, "int4").double() - tensor.double()).abs()
    assert torch.equal(error, distances.amin(dim=1))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (2.0**-7, 2.0**-6), (math.nextafter(2.0**-7, 0) - 1e-9, 0.0), (1.49 * 2**-6, 2.0**-6), (1.51 * 2**-6, 2.0**-5),
        (0.74, 0.5), (0.76, 1.0), (0.0, 0.0),
    ],
)  # fmt: skip
def test_int4_borders_between_levels(value, expected):
    assert roundtrip(torch.tensor([1.0, value, -value]), "int4").tolist() == [1.0, expected, -expected]


@pytest.mark.parametrize("wire_format", WIRE_FORMATS)
def test_zeros_are_zero_bytes(wire_format):
    assert not encode(torch.zeros(300), wire_format).any()


def test_the_largest_values_stay_finite():
    for value in (FP32_MAX, -FP32_MAX):
        for wire_format, tolerance in (("fp32", 0), ("bf16", 2**-8), ("int8", 1e-4), ("int4", 2**-8)):
            assert roundtrip(torch.tensor([value]), wire_format).item() == pytest.approx(value, rel=tolerance)


@pytest.mark.parametrize("wire_format", ["int8", "int4"])
def test_blocks_do_not_disturb_each_other(wire_format):
    small, large = normal(128, 1, 1e-12), normal(128, 2, 1e12)
    got = roundtrip(torch.cat([small, large]), wire_format)
    assert torch.equal(got, torch.cat([roundtrip(small, wire_format), roundtrip(large, wire_format)]))


@pytest.mark.parametrize("wire_format", WIRE_FORMATS)
@pytest.mark.parametrize("num_values", [1000, 131072 * 2 + 5])
def test_encoding_again_changes_nothing(wire_format, num_values):
    once = roundtrip(normal(num_values), wire_format)
    assert torch.equal(roundtrip(once, wire_format), once)


@pytest.mark.parametrize("wire_format", WIRE_FORMATS)
def test_what_rounding_loses_comes_with_the_next_publication(wire_format):
    value, published = normal(1000, 0), torch.zeros(1000)
    for _ in range(25):
        published += roundtrip(value - published, wire_format)
    assert (value - published).abs().max() <= 1e-6


@pytest.mark.parametrize("wire_format", WIRE_FORMATS)
def test_the_published_value_follows_a_moving_one(wire_format):
    value, published = torch.zeros(1000), torch.zeros(1000)
    for step in range(100):
        value += normal(1000, step, 0.01)
        difference = value - published
        allowed = largest_error(difference, wire_format) + 1e-7 * value.abs().amax().item()
        published += roundtrip(difference, wire_format)
        assert ((value - published).abs().double() <= allowed).all()
    assert (value - published).abs().max() < 0.05  # one rounding, not a sum of a hundred
    assert value.norm() > 2


@pytest.mark.parametrize("wire_format", WIRE_FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_input_is_neither_changed_nor_shared(wire_format, dtype):
    tensor = normal(1000).to(dtype)
    before = tensor.clone()
    data = encode(tensor, wire_format)
    assert torch.equal(tensor, before)
    got = decode(data, wire_format, (1000,))
    kept = data.clone()
    tensor.zero_()
    assert torch.equal(data, kept)
    got.zero_()
    assert torch.equal(data, kept)


@pytest.mark.parametrize("wire_format", WIRE_FORMATS)
def test_memory_layout_and_autograd_do_not_matter(wire_format):
    tensor = normal(600).reshape(20, 30)
    expected = encode(tensor.t().contiguous(), wire_format)
    assert torch.equal(encode(tensor.t(), wire_format), expected)
    assert torch.equal(encode(tensor.t().requires_grad_(), wire_format), expected)
    misaligned = torch.cat([torch.zeros(1, dtype=torch.uint8), expected])[1:]
    strided = torch.stack([expected, expected], dim=1)[:, 0]
    for data in (misaligned, strided):
        assert torch.equal(decode(data, wire_format, (30, 20)), decode(expected, wire_format, (30, 20)))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", [0, 200, 131072 + 3])
def test_nan_and_infinity_are_never_made_finite(bad, where):
    tensor = normal(131072 + 10)
    tensor[where] = bad
    for wire_format in ("fp32", "bf16"):
        assert torch.equal(roundtrip(tensor, wire_format)[where], tensor[where]) or math.isnan(bad)
        assert not roundtrip(tensor, wire_format)[where].isfinite()
    for wire_format in ("int8", "int4"):
        with pytest.raises(ValueError, match="int8 and int4 cannot carry NaN or infinity"):
            encode(tensor, wire_format)


def test_infinity_beside_a_value_beyond_bf16():
    got = roundtrip(torch.tensor([math.inf, FP32_MAX, -FP32_MAX, -math.inf, 1.0]), "bf16")
    largest = torch.finfo(torch.bfloat16).max
    assert got.tolist() == [math.inf, largest, -largest, -math.inf, 1.0]


@pytest.mark.parametrize("wire_format", WIRE_FORMATS)
@pytest.mark.parametrize("change", [-1, 1])
def test_a_wrong_length_is_refused(wire_format, change):
    size = encoded_size(300, wire_format)
    with pytest.raises(
        MessageError, match=rf"300 values in {wire_format} are {size} bytes, got shape \({size + change},\)"
    ):
        decode(torch.zeros(size + change, dtype=torch.uint8), wire_format, (3, 100))


def test_wrong_data_and_formats_are_refused():
    with pytest.raises(MessageError, match=r"1 values in fp32 are 4 bytes, got shape \(4,\) of torch.float32"):
        decode(torch.zeros(4), "fp32", (1,))
    with pytest.raises(MessageError, match=r"got shape \(2, 2\) of torch.uint8"):
        decode(torch.zeros(2, 2, dtype=torch.uint8), "fp32", (1,))
    with pytest.raises(MessageError, match="unknown wire format 'int2'; known are fp32, bf16, int8, int4"):
        decode(torch.zeros(4, dtype=torch.uint8), "int2", (1,))
    for call in (lambda: encode(torch.zeros(1), "int2"), lambda: encoded_size(1, "int2")):
        with pytest.raises(ConfigError, match="wire_format must be one of fp32, bf16, int8, int4, got 'int2'"):
            call()


@pytest.mark.parametrize("wire_format", ["int8", "int4"])
@pytest.mark.parametrize("scale", [math.nan, math.inf, -1.0])
def test_a_scale_that_no_encoder_makes_is_refused(wire_format, scale):
    data = encode(torch.ones(128), wire_format)
    data[:2] = torch.tensor([scale], dtype=torch.bfloat16).view(torch.uint8)
    with pytest.raises(MessageError, match="a block's scale is negative, NaN, or above"):
        decode(data, wire_format, (128,))


def test_the_bytes_are_pinned():
    # Syncer and learner may run different releases: these bytes must not change without a new format name.
    tensor = torch.tensor([1.0, -0.5, 0.3, 0.0, -1.0, 0.01])
    assert encode(tensor, "bf16").tolist() == [128, 63, 0, 191, 154, 62, 0, 0, 128, 191, 36, 60]
    assert encode(tensor, "int8")[:8].tolist() == [1, 60, 127, 192, 38, 0, 129, 1]
    assert encode(tensor, "int4")[:5].tolist() == [128, 63, 231, 5, 31]


def test_digest():
    tensor = normal(131072 + 100).reshape(-1, 4)
    assert digest(torch.tensor([1.0, -2.5])) == "fe16fa96f701640b146712a54fe4b6f2"
    assert digest(tensor) == digest(tensor.clone().reshape(-1))
    assert digest(tensor.t()) == digest(tensor.t().contiguous()) != digest(tensor)
    changed = tensor.clone()
    changed[-1, -1] = torch.nextafter(changed[-1, -1], torch.tensor(9.0))
    assert digest(changed) != digest(tensor)
    assert digest(tensor.bfloat16()) == digest(tensor.bfloat16().float())
    assert digest(torch.zeros(0)) == digest(torch.zeros(0, 3))
