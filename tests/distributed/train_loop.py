"""A user's Accelerate loop, as small as it gets; run by the tests, in one process or several."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import (
    DeepSpeedPlugin,
    DistributedType,
    DummyOptim,
    DummyScheduler,
    FullyShardedDataParallelPlugin,
)
from torch.utils.data import DataLoader
from train_ranks import end_of_ranks, show_processes, use_deepspeed
from train_ranks import values as full_values
from train_tiny import dataset, model
from transformers import default_data_collator, get_scheduler

from hf_diloco import DiLoCo


def accelerator_of(kind: str) -> Accelerator:
    """An Accelerator for a learner of this kind, on CPUs."""
    if kind == "fsdp2":
        # accelerate leaves FSDP out on a CPU, without a word
        PartialState(cpu=True)._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
        return Accelerator(cpu=True, gradient_accumulation_steps=2, fsdp_plugin=plugin)
    if kind.startswith("zero"):
        config = {**use_deepspeed(int(kind[-1])), "gradient_accumulation_steps": 2}
        show_processes(PartialState())
        if kind == "zero3":  # optimizer and schedule from DeepSpeed's configuration, as many have them
            names = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")
            config["scheduler"] = {"type": "WarmupDecayLR", "params": dict.fromkeys(names, "auto")}
            params = {"lr": "auto", "weight_decay": "auto", "torch_adam": True}
            config["optimizer"] = {"type": "AdamW", "params": params}
        return Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config), gradient_accumulation_steps=2)
    return Accelerator(cpu=True, gradient_accumulation_steps=2)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--kind", choices=["plain", "ddp", "fsdp2", "zero2", "zero3"], default="plain")
    parser.add_argument("--data_seed", type=int, default=0)
    parser.add_argument("--max_steps", type=int, default=60)
    parser.add_argument("--step_seconds", type=float, default=0.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    accelerator = accelerator_of(options.kind)
    network = model(options.data_seed, 16)  # learners begin with different weights
    optimizer: Any = torch.optim.AdamW(network.parameters(), lr=1e-3)
    size = accelerator.num_processes
    scheduler: Any = get_scheduler("cosine", optimizer, 4 * size, options.max_steps * size)
    if options.kind == "zero3":
        optimizer = DummyOptim(network.parameters(), lr=1e-3)
        scheduler = DummyScheduler(optimizer, options.max_steps * size, 4)
    loader = DataLoader(dataset(options.data_seed), batch_size=4, collate_fn=default_data_collator)
    start = {name: parameter.detach().clone() for name, parameter in network.named_parameters()}
    prepared = accelerator.prepare(network, optimizer, loader, scheduler)
    wrapped, optimizer, loader, scheduler = prepared
    rates, num_updates, num_tokens = [], 0, 0
    checkpoint = options.result.with_suffix(".checkpoint")
    diloco = DiLoCo(
        accelerator, wrapped, optimizer, scheduler, total_steps=options.max_steps,
        save_checkpoint=lambda: accelerator.save_state(str(checkpoint)),
    )  # fmt: skip
    if checkpoint.exists():
        accelerator.load_state(str(checkpoint))
    with diloco:
        for batch in loader:
            with accelerator.accumulate(wrapped):
                accelerator.backward(wrapped(**batch).loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            num_tokens += batch["input_ids"].numel()
            goes_on = diloco.step()
            if accelerator.sync_gradients:
                num_updates += 1
                rates.append(scheduler.get_last_lr()[0])
            time.sleep(options.step_seconds)
            if not goes_on or num_updates == options.max_steps:
                break
    values = full_values(accelerator.unwrap_model(wrapped))
    state = accelerator.get_state_dict(wrapped)  # what scripts save; of some kinds rank 0 alone gets it
    result = {
        "values": values, "state": state, "start": start, "rates": rates, "updates": num_updates, "tokens": num_tokens,
    }  # fmt: skip
    torch.save(result, options.result.with_name(f"{options.result.name}.{accelerator.process_index}.pt"))
    if accelerator.num_processes > 1:
        end_of_ranks()


if __name__ == "__main__":
    main()
