"""examples/train_accelerate.py: as a plain script, and as two learners of a run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hf_diloco.syncer.tape import read_tape

pytestmark = pytest.mark.examples

SCRIPT = Path(__file__).parents[2] / "examples" / "train_accelerate.py"
SHORT = ("--max_text_mb", "0.2", "--warmup_steps", "2", "--logging_steps", "5", "--max_eval_blocks", "32")


def run(tmp_path, *command, seconds):
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HF_DILOCO_")}
    environment = {**clean, "OMP_NUM_THREADS": "1", "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    return done.stdout


def test_alone(tmp_path):
    command = (sys.executable, "-W", "error::UserWarning", str(SCRIPT), "--output_dir", "out", *SHORT)
    printed = run(tmp_path, *command, "--max_steps", "20", "--gradient_accumulation_steps", "2", seconds=200)
    assert printed.count("'learning_rate'") == 4
    results = json.loads((tmp_path / "out" / "all_results.json").read_text())
    assert results.keys() == {"eval_loss", "perplexity"}
    assert results["eval_loss"] < 4.8  # 5.5 before
    assert (tmp_path / "out" / "model.safetensors").is_file()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_two_learners(tmp_path):
    command = (sys.executable, "-m", "hf_diloco.cli.main", "launch", "--num-learners", "2", "--run-dir", "run")
    settings = ("--num-fragments", "6", "--sync-every", "6")
    printed = run(
        tmp_path, *command, *settings, str(SCRIPT), "--output_dir", "out", *SHORT, "--max_steps", "60", seconds=580
    )
    assert "outer step 60 of 60" in printed
    model = load_file(tmp_path / "run" / "model" / "model.safetensors")
    for learner_id in (0, 1):
        out = tmp_path / "out" / f"learner-{learner_id}"
        ours = load_file(out / "model.safetensors")
        assert all(torch.equal(value, model[name]) for name, value in ours.items()), learner_id
        results = json.loads((out / "all_results.json").read_text())
        assert results["diloco/goodput"] == pytest.approx(1.0, abs=1e-3)
        assert results["diloco/bytes_sent"] > 0
    assert (tmp_path / "run" / "model" / "tokenizer.json").is_file()
    rounds = [line for line in read_tape(tmp_path / "run" / "tape.jsonl") if line["kind"] == "round"]
    assert any(len(line["participants"]) == 2 for line in rounds)
