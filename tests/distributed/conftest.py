from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import Run


@pytest.fixture
def start_run(tmp_path: Path) -> Iterator[Any]:
    """Starts syncers (with the given settings), and ends all that is left of them and their learners."""
    runs: list[Run] = []

    def start(name: str = "main", **settings: Any) -> Run:
        runs.append(Run(tmp_path / name, **settings))
        return runs[-1]

    yield start
    for run in runs:
        run.end()
