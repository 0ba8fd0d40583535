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
