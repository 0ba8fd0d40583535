"""Two hundred runs of the real syncer and real learners, each with faults of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from random_runs import random_run

pytestmark = pytest.mark.long


@pytest.mark.parametrize("seed", range(200))
def test_all_is_accounted_for_whatever_the_links_do(tmp_path: Path, seed: int) -> None:
    random_run(tmp_path, seed)
