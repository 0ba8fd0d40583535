import pytest
import torch

from hf_diloco.core.codec import encode
from hf_diloco.core.fragments import FragmentLayout
from hf_diloco.core.messages import RoundId, Update, Version
from hf_diloco.syncer.inspection import Inspector

pytestmark = pytest.mark.fast


def inspect(inspector, *, scale=1.0, steps=1, fragment_index=0, size=8, payload=True):
    update = Update(
        round=RoundId(1, 1), fragment_index=fragment_index, update_id="a/1.1", steps=steps, tokens=steps,
        anchor=Version(1, 0), wire_format="fp32", held_seconds=0.0,
    )  # fmt: skip
    shipped, reason = inspector.inspect(update, encode(torch.full((size,), scale), "fp32") if payload else None)
    assert (shipped is None) == (reason is not None)
    return reason


@pytest.fixture
def inspector():
    return Inspector(FragmentLayout.build({"a": (8,), "b": (8,)}, 2))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"fragment_index": 2}, "no fragment 2"),
        ({"fragment_index": -1}, "no fragment -1"),
        ({"payload": False}, "no payload"),
        ({"size": 9}, "36"),
        ({"scale": float("inf")}, "infinite"),
        ({"scale": float("nan")}, "NaN"),
        ({"scale": 3e38}, "norm of inf"),
        ({"scale": 1e18}, "norm of 2.83e+18"),
    ],
)
def test_what_is_malformed_is_refused(inspector, change, says):
    assert inspect(inspector) is None
    assert says in inspect(inspector, **change)


def test_an_absurd_norm_is_refused_once_the_usual_one_is_known(inspector):
    assert inspect(inspector, scale=1e9, fragment_index=1) is None  # nothing is known of this fragment
    for _ in range(8):
        assert inspect(inspector) is None
    assert "times the usual" in inspect(inspector, scale=101.0)
    assert inspect(inspector, scale=99.0) is None
    assert inspect(inspector, scale=99.0, steps=10) is None  # ten steps go further than one
    assert inspect(inspector, scale=500.0, steps=10) is None
    assert inspect(inspector, scale=1e9, fragment_index=1) is None


def test_the_bound_follows_a_run_that_changes(inspector):
    """A learning rate that rises from nothing, linearly or by a fifth each time, is no broken learner."""
    for number in range(300):
        assert inspect(inspector, scale=1e-6 * (2 * number + 1)) is None
        assert inspect(inspector, scale=1e-30 * 1.2**number, fragment_index=1) is None
    for _ in range(7):
        assert inspect(inspector, scale=1e6) is not None
    assert inspect(inspector, scale=6e-4) is None  # somebody's updates are as ever: the others stay refused
    refused = [inspect(inspector, scale=1e6) is not None for _ in range(9)]
    assert refused == [True] * 8 + [False]  # nobody's are: this is what updates are like now


def test_bounds_outlive_the_inspector(inspector):
    for number in range(40):
        assert inspect(inspector, scale=number + 1.0) is None
    heir = Inspector(FragmentLayout.build({"a": (8,), "b": (8,)}, 2))
    heir.restore(inspector.norms[:1], [[], [1.0] * 8])
    assert heir.norms == [inspector.norms[0], [1.0] * 8]
    assert len(heir.norms[0]) == 32
    assert "times the usual" in inspect(heir, scale=1e6)
    assert "times the usual" in inspect(heir, scale=1e6, fragment_index=1)
