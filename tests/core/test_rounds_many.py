"""Ten thousand random sequences of events in all: of raw events, of whole worlds with faults, of recoveries."""

import pytest
from hypothesis import given, settings
from test_recovery_properties import check_recovery, inputs, onlookers
from test_rounds_properties import check_sequence, check_world, faults, relaxed, sequences, worlds

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]


@settings(relaxed, max_examples=5000)
@given(sequences())
def test_raw_events(sequence):
    check_sequence(*sequence)


@settings(relaxed, max_examples=3000)
@given(worlds(), faults)
def test_worlds_with_faults(world, faults):
    check_world(world, faults)


@settings(relaxed, max_examples=2000)
@given(onlookers, inputs)
def test_recoveries(onlooker, inputs):
    check_recovery(onlooker, inputs)
