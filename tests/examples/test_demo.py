"""The demo, as `make demo` runs it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from hf_diloco.core.codec import digest
from hf_diloco.core.fragments import FragmentLayout
from hf_diloco.learner.parameters import ModelParameters
from hf_diloco.syncer.tape import read_tape

pytestmark = [pytest.mark.examples, pytest.mark.long, pytest.mark.alone]

ROOT = Path(__file__).parents[2]
PROMISED_SECONDS = 300  # on 2 cores
CHECKS = (
    "hf-diloco launch ended with exit code 0",
    "mean participants",
    "learner 0: tokens merged / trained",
    "learner 1: tokens merged / trained",
    "learner 0: training loss",
    "learner 1: training loss",
    "eval loss of the global model",
    "holds the syncer's values exactly",
)


@pytest.mark.timeout(1300)
def test_the_whole_demo(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_DILOCO_")}
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "demo.py")],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    seconds = time.monotonic() - started
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    checks = [line for line in done.stdout.splitlines() if line.startswith(("  ok ", "  FAILED"))]
    assert len(checks) == len(CHECKS), checks
    for check, what in zip(checks, CHECKS, strict=True):
        assert check.startswith("  ok ") and what in check, check  # noqa: PT018
    [run_dir] = [path for path in (tmp_path / "runs").iterdir() if not path.name.endswith("-alone")]
    assert str(tmp_path) not in done.stdout.partition("== What came of it ==")[2], "paths are relative where shorter"
    holds_the_newest_values_of_the_tape(run_dir)
    assert seconds < PROMISED_SECONDS, f"the demo took {seconds:.0f} s"


def holds_the_newest_values_of_the_tape(run_dir: Path) -> None:
    """What from_pretrained loads has, fragment by fragment, the digest that the tape has of its last merge."""
    parameters = ModelParameters(AutoModelForCausalLM.from_pretrained(run_dir / "model"))
    tape = read_tape(run_dir / "tape.jsonl")
    [described] = [line for line in tape if line["kind"] == "layout"]
    newest = {line["fragment_index"]: line["digest"] for line in tape if line["kind"] == "round"}
    layout = FragmentLayout.build(parameters.shapes, described["num_fragments"], parameters.averaged)
    assert layout.fingerprint == described["fingerprint"]
    loaded = {index: digest(parameters.read(fragment).result()) for index, fragment in enumerate(layout.fragments)}
    assert loaded == newest
