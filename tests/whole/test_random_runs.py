"""A handful of random runs; two hundred are in test_many_random_runs.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from random_runs import random_run

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("seed", range(1000, 1006))
def test_all_is_accounted_for_whatever_the_links_do(tmp_path: Path, seed: int) -> None:
    random_run(tmp_path, seed)
