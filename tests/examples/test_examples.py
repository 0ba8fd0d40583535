"""Every example runs as its users run it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.examples

ROOT = Path(__file__).parents[2]


def run(script: str, *words: str, seconds: float, codes: tuple[int, ...] = (0,)) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_DILOCO_")}
    command = [sys.executable, str(ROOT / "examples" / script), *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds)
    assert done.returncode in codes, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_in_process() -> None:
    output = run("in_process.py", seconds=120)
    before = float(re.search(r"before: ([\d.]+)", output)[1])
    after = [float(found) for found in re.findall(r"seen by learner \d: ([\d.]+)", output)]
    assert len(after) == 3
    assert len(set(after)) == 1, "the learners do not hold the same model"
    assert after[0] < before / 5
    assert output.count("100.0% of its samples merged") == 3
