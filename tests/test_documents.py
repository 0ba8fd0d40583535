"""What the documents say of the code."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from hf_diloco import DiLoCoPlugin

pytestmark = pytest.mark.fast

DOCS = Path(__file__).parent.parent / "docs"


def test_every_setting_of_a_learner_is_documented():
    operations = (DOCS / "operations.md").read_text()
    names = [f"HF_DILOCO_{field.name.upper()}" for field in dataclasses.fields(DiLoCoPlugin)]
    assert not [name for name in names if name not in operations]


@pytest.mark.parametrize("name", ["README.md", "docs/accelerate.md"])
def test_a_loop_as_documented_says_how_long_the_run_is(name):
    """It is started by ``hf-diloco launch`` without further options."""
    lines = (DOCS.parent / name).read_text().splitlines()
    loops = [line for line in lines if line.startswith("+with DiLoCo(")]
    assert loops
    assert all("total_steps=" in line for line in loops)
