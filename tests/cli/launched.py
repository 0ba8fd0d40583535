"""The training script of test_launch.py."""

import os
import signal
import sys
import time
from pathlib import Path

if "--fail" in sys.argv:
    sys.exit("a mistake in the script")
if "--without-us" in sys.argv:
    sys.exit(0)
if "--deaf" in sys.argv:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    print("deaf", flush=True)
    while True:
        time.sleep(1)
if "--one-life" in sys.argv:
    mark = Path(f"lived-{os.environ['HF_DILOCO_LEARNER_ID']}")
    while mark.exists():  # the second life never gets so far as to train
        time.sleep(1)
    mark.touch()

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from hf_diloco import DiLoCoCallback, shard_dataset


class Pace(TrainerCallback):
    """With --slow, a step takes a while: the run is still going on when a learner has been started again.

    With --chatty, each step prints more than fits into what is left of a page on a full disk.
    """

    def on_step_begin(self, *args, **kwargs) -> None:
        print("x" * 5000 if "--chatty" in sys.argv else "", end="", flush=True)
        time.sleep(0.05 if "--slow" in sys.argv else 0)


class Normalized(LlamaForCausalLM):
    """With --batch-norm: has running statistics."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.batch_norm = torch.nn.BatchNorm1d(config.vocab_size)

    def forward(self, input_ids, attention_mask=None, labels=None, **other):
        output = super().forward(input_ids, attention_mask, labels=labels, **other)
        self.batch_norm(output.logits.flatten(0, 1))
        return output


def main() -> None:
    learner, shards = os.environ["HF_DILOCO_LEARNER_ID"], os.environ["HF_DILOCO_NUM_SHARDS"]
    arguments, world = " ".join(sys.argv[1:]), os.environ.get("WORLD_SIZE", "1")
    print(f"arguments {arguments} of learner {learner} of {shards}, world size {world}", flush=True)
    torch.manual_seed(0)
    is_other = "--other-model-at" in sys.argv and sys.argv[sys.argv.index("--other-model-at") + 1] == learner
    config = LlamaConfig(
        vocab_size=48 if is_other else 32, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    rows = torch.randint(0, 32, (256, 16)).tolist()
    data = [{"input_ids": row, "labels": row} for row in rows]
    args = TrainingArguments(
        "out", max_steps=int(sys.argv[sys.argv.index("--steps") + 1]), per_device_train_batch_size=2,
        use_cpu=True, save_strategy="no", report_to="none", disable_tqdm=True, logging_steps=50,
    )  # fmt: skip
    callbacks = [Pace(), DiLoCoCallback()]
    model = (Normalized if "--batch-norm" in sys.argv else LlamaForCausalLM)(config)
    Trainer(model, args, train_dataset=shard_dataset(data), callbacks=callbacks).train()


if __name__ == "__main__":
    main()
