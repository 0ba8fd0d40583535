"""The training script of a storm without one: a small Llama on bytes of Python's sources, at a fixed pace.

Every inner step takes at least ``--step_seconds``, so that a learner that is dead leaves nothing to the others: what
they train in a storm is not what its share of the processor buys them.
"""

from __future__ import annotations

import argparse
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from hf_diloco.integrations.transformers import DiLoCoCallback
from hf_diloco.learner.data import shard_dataset

_TOKENS = 64  # of an example
_BATCH = 4
_HELD_OUT_EXAMPLES = 512


class Pace(TrainerCallback):
    """No inner step takes less than this."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._until = seconds, 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Wait for the beat."""
        time.sleep(max(self._until - time.monotonic(), 0.0))
        self._until = time.monotonic() + self._seconds


def examples() -> list[dict[str, list[int]]]:
    """Pieces of the sources, in an order that is the same everywhere."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    data = b"".join(path.read_bytes() for path in paths)[: 4 << 20]
    pieces = [list(data[start : start + _TOKENS]) for start in range(0, len(data) - _TOKENS, _TOKENS)]
    order = torch.randperm(len(pieces), generator=torch.Generator().manual_seed(0)).tolist()
    return [{"input_ids": pieces[index], "labels": pieces[index]} for index in order]


def model(seed: int) -> LlamaForCausalLM:
    """A Llama of 0.2 million parameters."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=192, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=_TOKENS, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def main() -> None:
    """Train, then evaluate the global model."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--max_steps", type=int, required=True)
    parser.add_argument("--step_seconds", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    data = examples()
    arguments = TrainingArguments(
        output_dir=options.output_dir, max_steps=options.max_steps, per_device_train_batch_size=_BATCH,
        per_device_eval_batch_size=32, learning_rate=1e-3, lr_scheduler_type="constant", use_cpu=True,
        report_to="none", logging_steps=20, save_strategy="no", disable_tqdm=True, seed=options.seed,
    )  # fmt: skip
    trainer = Trainer(
        model=model(options.seed),
        args=arguments,
        train_dataset=shard_dataset(data[_HELD_OUT_EXAMPLES:]),
        eval_dataset=data[:_HELD_OUT_EXAMPLES],
        callbacks=[Pace(options.step_seconds), DiLoCoCallback()],
    )
    trainer.train()
    trainer.evaluate()


if __name__ == "__main__":
    main()
