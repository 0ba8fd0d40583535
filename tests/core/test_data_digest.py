"""The sketch of what learners have read: blind to order and repeats, and a fair estimate of what they share."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_diloco.core.data_digest import NUM_HASHES, SAME_DATA_OVERLAP, DataDigest, overlap

pytestmark = pytest.mark.fast


def digest(examples):
    made = DataDigest()
    made.add(examples)
    return made.hashes


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=300), st.randoms(use_true_random=False))
@settings(max_examples=50, deadline=None)
def test_order_and_repeats_do_not_matter(examples, generator):
    shuffled = examples + examples[: len(examples) // 2]
    generator.shuffle(shuffled)
    assert digest(shuffled) == digest(examples)
    assert digest(examples) == tuple(sorted(digest(examples)))
    assert len(digest(examples)) == min(NUM_HASHES, len(set(examples)))


@pytest.mark.parametrize("share", [0.0, 0.05, 0.5, 0.9])
def test_the_overlap_is_that_of_what_was_read(share):
    """Two learners that each read 3,000 examples, of which both have read a share."""
    estimates = []
    for seed in range(20):
        generator = random.Random(seed)
        numbers = [generator.randrange(2**63) for _ in range(6000)]
        common = int(3000 * share)
        estimates.append(overlap(digest(numbers[:3000]), digest(numbers[3000 - common : 6000 - common])))
    true = 3000 * share / (6000 - 3000 * share)
    assert sum(estimates) / len(estimates) == pytest.approx(true, abs=0.05)
    assert (max(estimates) == 0.0) if share == 0 else (max(estimates) > 0)


def test_the_same_data_in_another_order_is_known_when_a_part_of_it_was_read():
    examples = list(range(10_000))
    orders = [random.Random(seed).sample(examples, len(examples)) for seed in (1, 2)]
    assert overlap(*(digest(order[:500]) for order in orders)) < SAME_DATA_OVERLAP
    assert overlap(*(digest(order[:5000]) for order in orders)) > SAME_DATA_OVERLAP
    assert overlap(*(digest(order) for order in orders)) == 1.0


def test_too_few_examples_are_no_evidence():
    assert overlap(digest(range(NUM_HASHES - 1)), digest(range(NUM_HASHES - 1))) == 0.0
    assert overlap((), ()) == 0.0
