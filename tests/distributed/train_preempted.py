"""A user's script for the tests of preemption: evaluates, loads with workers, and goes on after training."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from train_tiny import dataset, model
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_diloco import DiLoCoCallback


class Slow(TrainerCallback):
    """Slow steps, a slow evaluation, and a word in the log when things begin and end."""

    def __init__(self, step_seconds: float, eval_seconds: float) -> None:
        self._step_seconds, self._eval_seconds = step_seconds, eval_seconds

    def on_step_begin(self, *args, **kwargs) -> None:
        time.sleep(self._step_seconds)

    def on_step_end(self, args, state, control, **kwargs) -> None:
        if state.global_step == 1:
            print("first step", flush=True)

    def on_prediction_step(self, *args, **kwargs) -> None:
        print("evaluating", flush=True)
        time.sleep(self._eval_seconds)

    def on_train_end(self, *args, **kwargs) -> None:
        print("on_train_end of a later callback", flush=True)


class SlowData(torch.utils.data.Dataset):
    """The training waits for its data all the time."""

    def __init__(self, seconds: float) -> None:
        self._rows, self._seconds = dataset(0), seconds

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        time.sleep(self._seconds)
        return self._rows[index]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--max_steps", type=int, default=100_000)
    parser.add_argument("--step_seconds", type=float, default=0.05)
    parser.add_argument("--num_workers", type=int, default=0)
    parser.add_argument("--row_seconds", type=float, default=0.0)
    parser.add_argument("--eval_every", type=int, default=0)
    parser.add_argument("--eval_seconds", type=float, default=0.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    arguments = TrainingArguments(
        output_dir=str(options.output_dir), max_steps=options.max_steps, per_device_train_batch_size=4, use_cpu=True,
        report_to="none", save_strategy="no", disable_tqdm=True, dataloader_num_workers=options.num_workers,
        eval_strategy="steps" if options.eval_every else "no", eval_steps=options.eval_every or None,
        per_device_eval_batch_size=4, seed=1,
    )  # fmt: skip
    trainer = Trainer(
        model=model(0, 16),
        args=arguments,
        train_dataset=SlowData(options.row_seconds),
        eval_dataset=dataset(1),
        callbacks=[DiLoCoCallback(), Slow(options.step_seconds, options.eval_seconds)],
    )
    trainer.train()
    print("the script goes on after training", flush=True)


if __name__ == "__main__":
    main()
