"""examples/pretrain_clm.py as a plain script: from nothing, then on from what it saved."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate.commands.config.config_args import load_config_from_file
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.examples

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(tmp_path, *arguments):
    script = [sys.executable, "-W", "error::UserWarning", str(EXAMPLES / "pretrain_clm.py")]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HF_DILOCO_")}
    environment = {**clean, "OMP_NUM_THREADS": "1", "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}
    command = [*script, "--disable_tqdm", "true", *arguments]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_it_trains_saves_and_goes_on_from_there(tmp_path):
    short = ("--max_text_mb", "0.2", "--warmup_steps", "2")
    printed = run(tmp_path, "--output_dir", "first", "--max_steps", "25", "--logging_steps", "5", *short)
    assert "perplexity" in printed
    metrics = json.loads((tmp_path / "first" / "all_results.json").read_text())
    assert metrics["eval_loss"] < 4.5  # 5.5 before
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "first")
    text = "def f(x):\n\treturn 'é' + x  # 雪\n"
    tokens = tokenizer(text)["input_ids"]
    assert len(tokens) == len(text.encode())
    assert tokenizer.decode(tokens) == text
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "first")
    assert 0.8e6 < model.num_parameters() < 1e6
    assert model.config.vocab_size == len(tokenizer) == 257
    assert model.dtype == torch.float32

    (tmp_path / "text.txt").write_text(
        "\n\n".join(f"Paragraph {i}. " + "All work and no play. " * 8 for i in range(60))
    )
    more = ("--model_name_or_path", "first", "--train_file", "text.txt", "--block_size", "64")
    run(tmp_path, "--output_dir", "second", "--max_steps", "3", *more)
    assert (tmp_path / "second" / "model.safetensors").is_file()


@pytest.mark.parametrize("name", ["single_cpu", "multi_gpu"])
def test_accelerate_reads_the_configurations(name):
    config = load_config_from_file(str(EXAMPLES / "configs" / f"{name}.yaml"))
    assert config.use_cpu == (name == "single_cpu")
    assert config.num_processes == (1 if name == "single_cpu" else 8)
