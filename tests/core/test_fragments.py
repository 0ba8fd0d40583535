import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_diloco.core.fragments import FragmentLayout, first_difference, most_fragments
from hf_diloco.errors import ConfigError, NoTrainableParametersError

pytestmark = pytest.mark.fast

SHAPE = st.lists(st.integers(0, 12), max_size=3).map(tuple)
SHAPES = st.dictionaries(st.text("abc.", min_size=1, max_size=4), SHAPE, max_size=12).filter(most_fragments)


def llama(vocab, width, hidden, num_layers, kv_width):
    shapes = {"embed": (vocab, width), "lm_head": (vocab, width), "norm": (width,)}
    for layer in range(num_layers):
        for name, shape in {
            "q": (width, width), "k": (kv_width, width), "v": (kv_width, width), "o": (width, width),
            "gate": (hidden, width), "up": (hidden, width), "down": (width, hidden), "n1": (width,), "n2": (width,),
        }.items():  # fmt: skip
            shapes[f"layers.{layer}.{name}"] = shape
    return shapes


def gpt2():
    shapes = {"wte": (50257, 768), "wpe": (1024, 768), "ln_f.weight": (768,), "ln_f.bias": (768,)}
    for layer in range(12):
        for name, rows, columns in (("attn", 768, 2304), ("proj", 768, 768), ("fc", 768, 3072), ("out", 3072, 768)):
            shapes |= {f"h.{layer}.{name}.weight": (rows, columns), f"h.{layer}.{name}.bias": (columns,)}
        shapes |= {f"h.{layer}.ln_{which}": (768,) for which in "abcd"}
    return shapes


def mixtral():
    shapes = {"embed": (32000, 4096), "lm_head": (32000, 4096)}
    for layer in range(32):
        for name, shape in {
            "q": (4096, 4096), "k": (1024, 4096), "v": (1024, 4096), "o": (4096, 4096), "router": (8, 4096),
            "experts.gate_up": (8, 28672, 4096), "experts.down": (8, 4096, 14336), "norm": (4096,),
        }.items():  # fmt: skip
            shapes[f"layers.{layer}.{name}"] = shape
    return shapes


MODELS = {
    "tiny llama": llama(256, 64, 176, 4, 32),
    "llama with a large vocabulary": llama(151936, 64, 128, 2, 32),
    "llama 8b": llama(128256, 4096, 14336, 32, 1024),
    "gpt2": gpt2(),
    "mixtral": mixtral(),
    "one embedding": {"embed": (150_000, 8)},
    "one matrix more than fragments": {f"m{index}": (100, 96) for index in range(25)},
}


def largest_over_mean(layout):
    return max(f.num_parameters for f in layout.fragments) * layout.num_fragments / layout.num_parameters


@pytest.mark.parametrize("num_fragments", [1, 4, 8, 24])
@pytest.mark.parametrize("model", MODELS)
def test_real_models_are_balanced(model, num_fragments):
    layout = FragmentLayout.build(MODELS[model], num_fragments)
    assert largest_over_mean(layout) <= 1.1
    assert layout.num_parameters == sum(math.prod(shape) for shape in MODELS[model].values())


def test_tensors_that_fit_stay_whole():
    shapes = MODELS["gpt2"]
    layout = FragmentLayout.build(shapes, 4)
    mean = layout.num_parameters / 4
    cut = {piece.name for f in layout.fragments for piece in f.slices if piece.shape != shapes[piece.name]}
    assert shapes["wte"][0] * 768 > mean
    assert cut == {"wte"}


def test_a_tensor_larger_than_the_mean_is_cut_into_slices_of_the_mean():
    layout = FragmentLayout.build({"embed": (150_000, 8)}, 24)
    assert [[(s.first_row, s.last_row) for s in f.slices] for f in layout.fragments] == [
        [(index * 6250, (index + 1) * 6250)] for index in range(24)
    ]


def test_a_tensor_only_just_larger_than_the_mean_is_cut_too():
    layout = FragmentLayout.build({"a": (105,), "b": (95,)}, 2)
    assert [fragment.num_parameters for fragment in layout.fragments] == [100, 100]


def test_rows_that_come_back_to_their_fragment_are_one_slice():
    shapes = {"a": (1, 96), "b": (1, 96), "c": (1, 95), "d": (1, 63), "m": (5, 10)}  # mean 100
    last = FragmentLayout.build(shapes, 4).fragments[3]  # 63, then three rows of m to fill it up, then one for balance
    assert [(piece.name, piece.first_row, piece.last_row) for piece in last.slices] == [("d", 0, 1), ("m", 0, 4)]


def test_tensors_with_long_rows_come_first_where_the_balance_needs_it():
    # By size, the tensor of short rows is placed whole, and the third of the long ones no longer fits.
    layout = FragmentLayout.build({"fine": (2000,), "a": (1, 900), "b": (1, 900), "c": (1, 900)}, 2)
    assert largest_over_mean(layout) == 1.0


@settings(deadline=None)
@given(SHAPES, st.data())
def test_every_value_is_in_exactly_one_place(shapes, data):
    num_fragments = data.draw(st.integers(1, most_fragments(shapes)))
    averaged = data.draw(st.sets(st.sampled_from(sorted(shapes))))
    layout = FragmentLayout.build(shapes, num_fragments, averaged)
    rows = {name: [] for name in shapes}
    for index, fragment in enumerate(layout.fragments):
        assert fragment.index == index
        assert fragment.slices
        assert fragment.names == tuple(dict.fromkeys(piece.name for piece in fragment.slices))
        offset = 0
        for piece in fragment.slices:
            shape = shapes[piece.name]
            assert piece.offset == offset
            assert piece.shape == ((piece.last_row - piece.first_row, *shape[1:]) if shape else ())
            assert piece.num_parameters == math.prod(piece.shape) > 0
            assert piece.averaged == (piece.name in averaged)
            offset += piece.num_parameters
            rows[piece.name] += range(piece.first_row, piece.last_row)
        assert fragment.num_parameters == offset
        for before, after in itertools.pairwise(fragment.slices):
            assert before.name < after.name or (before.name == after.name and before.last_row < after.first_row)
    assert layout.num_fragments == len(layout.fragments) == num_fragments
    for name, shape in shapes.items():
        expected = range(shape[0] if shape else 1) if math.prod(shape) else []
        assert sorted(rows[name]) == list(expected)


@settings(deadline=None)
@given(
    st.dictionaries(st.text("abc", min_size=1, max_size=3), st.tuples(st.integers(1, 400), st.integers(1, 9))),
    st.data(),
)
def test_balanced_whenever_rows_are_short(shapes, data):
    total, row = sum(map(math.prod, shapes.values())), max((columns for _, columns in shapes.values()), default=1)
    if total < 10 * row:
        return
    layout = FragmentLayout.build(shapes, data.draw(st.integers(1, total // (10 * row))))
    assert largest_over_mean(layout) <= 1.1


@settings(deadline=None)
@given(SHAPES, st.randoms(use_true_random=False), st.data())
def test_the_order_of_the_tensors_does_not_matter(shapes, rng, data):
    num_fragments = data.draw(st.integers(1, most_fragments(shapes)))
    shuffled = list(shapes.items())
    rng.shuffle(shuffled)
    ours, theirs = FragmentLayout.build(shapes, num_fragments), FragmentLayout.build(dict(shuffled), num_fragments)
    assert ours == theirs
    assert list(ours.shapes) == list(theirs.shapes)
    assert ours.fingerprint == theirs.fingerprint


def test_lists_are_shapes_too():
    assert FragmentLayout.build({"a": [4, 3]}, 2) == FragmentLayout.build({"a": (4, 3)}, 2)


def test_the_fingerprint_sees_every_difference():
    base = {"a": (4, 3), "b": (12,)}
    layouts = [
        FragmentLayout.build(base, 2),
        FragmentLayout.build(base, 3),
        FragmentLayout.build(base, 2, averaged=["a"]),
        FragmentLayout.build(base, 2, averaged=["b"]),
        FragmentLayout.build({"a": (3, 4), "b": (12,)}, 2),
        FragmentLayout.build({"a": (4, 3), "c": (12,)}, 2),
        FragmentLayout.build(base | {"empty": (0,)}, 2),
    ]
    assert len({layout.fingerprint for layout in layouts}) == len(layouts)
    # It is compared between machines and between runs: a new value makes old runs unreadable.
    assert layouts[0].fingerprint == "948946370578f338b898f62cf73ddf9b"


@settings(deadline=None, max_examples=30)
@given(SHAPES)
def test_most_fragments_is_the_limit(shapes):
    most = most_fragments(shapes)
    assert all(len(fragment.slices) == 1 for fragment in FragmentLayout.build(shapes, most).fragments)
    with pytest.raises(
        ConfigError, match=f"num_fragments={most + 1}, but .* into {most} pieces .* set num_fragments to {most}"
    ):
        FragmentLayout.build(shapes, most + 1)


@pytest.mark.parametrize(
    ("shapes", "num_fragments", "averaged", "message"),
    [
        ({"a": (3,)}, 0, (), "num_fragments must be at least 1, got 0"),
        ({"a": (3,)}, 1, ["b"], "averaged names 'b', which is none of the 1 trainable tensors"),
        ({"a": (-3,)}, 1, (), r"tensor 'a' has shape \(-3,\); sizes must not be negative"),
    ],
)
def test_wrong_arguments(shapes, num_fragments, averaged, message):
    with pytest.raises(ConfigError, match=message):
        FragmentLayout.build(shapes, num_fragments, averaged)


@pytest.mark.parametrize("shapes", [{}, {"a": (0, 5)}])
def test_nothing_to_train(shapes):
    assert most_fragments(shapes) == 0
    with pytest.raises(NoTrainableParametersError, match="no parameter with requires_grad=True"):
        FragmentLayout.build(shapes, 24)


@pytest.mark.parametrize(
    ("theirs", "their_averaged", "sentence"),
    [
        ({"a": (2, 3), "b": (4,)}, ["a"], None),
        ({"b": [4], "a": [2, 3]}, ["a"], None),
        ({"b": (4,)}, [], "the run trains 'a' of shape (2, 3), the learner does not"),
        ({"a": (2, 3), "b": (4,), "aa": (7,)}, ["a"], "the learner trains 'aa' of shape (7,), the run does not"),
        ({"a": (2, 3), "b": (5,)}, ["a"], "'b' has shape (4,) in the run and (5,) at the learner"),
        ({"a": (2, 3), "b": (4,)}, [], "'a' is merged by plain average in the run and by RDA at the learner"),
        ({"a": (2, 3), "b": (4,)}, ["a", "b"], "'b' is merged by RDA in the run and by plain average at the learner"),
        ({"a": (3, 2), "b": (5,)}, ["a"], "'a' has shape (2, 3) in the run and (3, 2) at the learner"),
    ],
)
def test_first_difference(theirs, their_averaged, sentence):
    assert first_difference({"b": (4,), "a": (2, 3)}, theirs, ["a"], their_averaged) == sentence


@settings(deadline=None)
@given(SHAPES, SHAPES, st.data())
def test_no_difference_if_and_only_if_the_layouts_are_equal(ours, theirs, data):
    our_averaged = data.draw(st.sets(st.sampled_from(sorted(ours))))
    their_averaged = data.draw(st.sets(st.sampled_from(sorted(theirs))))
    equal = ours == theirs and our_averaged == their_averaged
    assert (first_difference(ours, theirs, our_averaged, their_averaged) is None) == equal
    assert first_difference(ours, dict(ours), our_averaged, our_averaged) is None


def test_large_layouts_are_built_quickly():
    shapes = {f"{random.Random(index).random()}": (index % 97 + 1, 64) for index in range(3000)}
    assert largest_over_mean(FragmentLayout.build(shapes, 200)) <= 1.1
