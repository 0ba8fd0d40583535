"""Pre-train a causal language model in a plain Accelerate loop: alone, or as one learner of a Decoupled DiLoCo run.

The same data and models as ``pretrain_clm.py``, without Trainer. Three places make a learner of it: ``shard_dataset``,
the ``with DiLoCo(...)`` around the loop, and ``diloco.step()`` at its end.

    python examples/train_accelerate.py --output_dir out
    hf-diloco launch --num-learners 2 examples/train_accelerate.py --output_dir out
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from pretrain_clm import ScriptArguments, byte_tokenizer, load_texts, make_model, pack
from torch import nn
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, HfArgumentParser, default_data_collator, get_scheduler, set_seed

from hf_diloco import DiLoCo, DiLoCoPlugin, shard_dataset


@dataclass
class LoopArguments:
    """How to train."""

    output_dir: str = field(default="train-accelerate", metadata={"help": "Where models and checkpoints go."})
    max_steps: int = field(default=300, metadata={"help": "Optimizer steps."})
    batch_size: int = field(default=4, metadata={"help": "Examples of a micro-batch and process."})
    gradient_accumulation_steps: int = field(default=1, metadata={"help": "Micro-batches of a step."})
    learning_rate: float = field(default=1e-3, metadata={"help": "Peak learning rate of AdamW."})
    warmup_steps: int = field(default=20, metadata={"help": "Steps until the peak; then a cosine."})
    logging_steps: int = field(default=20, metadata={"help": "Steps between two lines of the log."})
    log_with: str | None = field(default=None, metadata={"help": "A tracker, as in Accelerate."})
    seed: int = field(default=42, metadata={"help": "Of the model and of the order of the data."})


@dataclass
class Progress:
    """How far this learner is in its data; saved with its checkpoints."""

    num_batches: int = 0
    num_updates: int = 0

    def state_dict(self) -> dict[str, int]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.num_batches, self.num_updates = state["num_batches"], state["num_updates"]


def batches(accelerator: Accelerator, loader: Any, first: int) -> Iterator[dict[str, torch.Tensor]]:
    """Pass after pass without end, from a batch on."""
    epoch, skip = divmod(first, len(loader))
    while True:
        part = accelerator.skip_first_batches(loader, skip) if skip else loader
        part.set_epoch(epoch)
        yield from part
        epoch, skip = epoch + 1, 0


def evaluate(accelerator: Accelerator, model: nn.Module, loader: Any) -> dict[str, float]:
    model.eval()
    with torch.no_grad():
        losses = torch.stack([model(**batch).loss for batch in loader])
    model.train()
    loss = accelerator.gather_for_metrics(losses).mean().item()
    return {"eval_loss": loss, "perplexity": math.exp(min(loss, 50))}


def main() -> None:
    script, args = HfArgumentParser((ScriptArguments, LoopArguments)).parse_args_into_dataclasses()
    plugin = DiLoCoPlugin()
    # each learner is a world of its own
    output_dir = Path(args.output_dir, f"learner-{plugin.learner_id}" if plugin.syncer else "")
    checkpoint = output_dir / "checkpoint"
    set_seed(args.seed)
    accelerator = Accelerator(
        cpu=not torch.accelerator.is_available(),
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=args.seed),
        log_with=args.log_with,
        project_dir=output_dir,
    )
    accelerator.init_trackers("train-accelerate")

    name = script.tokenizer_name or script.model_name_or_path
    tokenizer = AutoTokenizer.from_pretrained(name) if name else byte_tokenizer()
    blocks = pack(load_texts(script), tokenizer, script.block_size)
    held_out = blocks["eval"].select(range(min(script.max_eval_blocks, len(blocks["eval"]))))
    model = make_model(script, tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    # Accelerate's scheduler steps once a process
    steps = (args.warmup_steps * accelerator.num_processes, args.max_steps * accelerator.num_processes)
    scheduler = get_scheduler("cosine", optimizer, *steps)
    train_set, collate = shard_dataset(blocks["train"]), default_data_collator
    model, optimizer, scheduler, loader, eval_loader = accelerator.prepare(
        model,
        optimizer,
        scheduler,
        DataLoader(train_set, args.batch_size, shuffle=True, drop_last=True, collate_fn=collate),
        DataLoader(held_out, 16, collate_fn=collate),
    )
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    diloco = DiLoCo(
        accelerator,
        model,
        optimizer,
        scheduler,
        plugin=plugin,
        total_steps=args.max_steps,
        dataloader=loader,
        processing_class=tokenizer,
        save_checkpoint=lambda: accelerator.save_state(str(checkpoint)),
    )
    if checkpoint.is_dir():  # it was preempted
        accelerator.load_state(str(checkpoint))

    model.train()
    with diloco:
        for batch in batches(accelerator, loader, progress.num_batches):
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            progress.num_batches += 1
            progress.num_updates += accelerator.sync_gradients
            logs = accelerator.sync_gradients and progress.num_updates % args.logging_steps == 0
            goes_on = diloco.step(loss.item() if logs else None)
            if logs:
                values = {"loss": loss.item(), "learning_rate": scheduler.get_last_lr()[0], **diloco.metrics()}
                accelerator.log(values, step=progress.num_updates)
                accelerator.print({name: f"{value:.4g}" for name, value in values.items()}, flush=True)
            if not goes_on or progress.num_updates == args.max_steps:
                break

    metrics = evaluate(accelerator, model, eval_loader)  # of the global model, if there was a run
    accelerator.print(metrics)
    accelerator.end_training()
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(output_dir)
        tokenizer.save_pretrained(output_dir)
        (output_dir / "all_results.json").write_text(json.dumps({**metrics, **diloco.metrics()}, indent=2))


if __name__ == "__main__":
    sys.exit(main())
