"""What the tests of the command line share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from launches import Launch


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launch]]:
    """Starts launches, and kills all that is left of them."""
    started: list[Launch] = []

    def start(*words: object, **settings: Any) -> Launch:
        started.append(Launch(tmp_path, *words, **settings))
        return started[-1]

    yield start
    for run in started:
        for process in run.all_processes():
            process.kill()
        run.process.wait()
