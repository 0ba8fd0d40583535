"""examples/sft_lora.py as it would be started, with two learners."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import peft
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

pytestmark = [
    pytest.mark.examples,
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # PEFT's
]

SCRIPT = Path(__file__).parents[2] / "examples" / "sft_lora.py"


def save_base(path: Path) -> None:
    words = {"<pad>": 0, "</s>": 1, "<unk>": 2, **{f"w{index}": index for index in range(3, 32)}}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")
    tokenizer.save_pretrained(path)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        pad_token_id=0, bos_token_id=1, eos_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(path)


def test_two_learners_train_an_adapter(tmp_path, monkeypatch):
    save_base(tmp_path / "base")
    (tmp_path / "data").mkdir()
    rows = [{"text": " ".join(f"w{3 + (start + step) % 29}" for step in range(12))} for start in range(32)]
    (tmp_path / "data" / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    command = [
        sys.executable, "-m", "hf_diloco.cli.main", "launch", "--num-learners", "2", "--run-dir", "run", str(SCRIPT),
        "--model_name_or_path", "base", "--dataset_name", "data", "--use_peft", "--lora_r", "2", "--output_dir", "out",
        "--max_steps", "20", "--per_device_train_batch_size", "2", "--use_cpu", "true", "--report_to", "none",
        "--save_strategy", "no", "--learning_rate", "1e-2", "--bf16", "false", "--gradient_checkpointing", "false",
    ]  # fmt: skip
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HF_DILOCO_")}
    environment = {**clean, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    with (tmp_path / "output.txt").open("wb") as output:
        code = subprocess.run(
            command, cwd=tmp_path, env=environment, stdout=output, stderr=subprocess.STDOUT, timeout=280
        ).returncode
    logs = "\n".join(path.read_text(errors="replace")[-3000:] for path in (tmp_path / "run" / "logs").iterdir())
    assert code == 0, (tmp_path / "output.txt").read_text(errors="replace")[-3000:] + logs
    monkeypatch.chdir(tmp_path)  # the adapter names its base model as the script did
    model = peft.AutoPeftModelForCausalLM.from_pretrained("run/model")
    trained = [tensor for name, tensor in model.named_parameters() if "lora_B" in name]
    assert trained
    assert any(bool(tensor.any()) for tensor in trained), "lora_B starts at zero"
    assert not list((tmp_path / "out").glob("learner-*/model.safetensors")), "learners save adapters, too"
    assert len(list((tmp_path / "out").glob("learner-*/adapter_model.safetensors"))) == 2
