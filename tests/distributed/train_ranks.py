"""A Trainer script for learners of one or several processes; each rank writes down what it sees at each step."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import DistributedType
from peft import LoraConfig, get_peft_model
from torch.distributed.tensor import DTensor
from train_tiny import Pace, Reads, dataset, model, stream
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_diloco import DiLoCoCallback, last_checkpoint
from hf_diloco.core.codec import digest

KINDS = ["plain", "compile", "ddp", "lora", "fsdp2", "zero1", "zero2", "zero3"]  # "lora": of two processes


def network_of(kind: str, hidden_size: int) -> torch.nn.Module:
    """What a learner of this kind begins with."""
    network = model(0, hidden_size)
    if kind != "lora":
        return network
    return get_peft_model(network, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"]))


class Diary(TrainerCallback):
    """A line for each step, after what was applied in it."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w")

    def on_train_begin(self, *args, model=None, **kwargs) -> None:
        self._write(model, step=0, begins=True)

    def on_step_end(self, args, state, control, model=None, lr_scheduler=None, **kwargs) -> None:
        self._write(model, step=state.global_step, rate=lr_scheduler.get_last_lr()[0])

    def _write(self, model, **facts) -> None:
        facts["digest"] = digest(torch.cat([value.flatten() for value in values(model).values()]))
        print(json.dumps(facts), file=self._file, flush=True)


class Moments(TrainerCallback):
    """What this rank's part of the inner optimizer holds before the first step, and in each checkpoint."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w")

    def on_train_begin(self, args, state, control, optimizer=None, **kwargs) -> None:
        self._write(optimizer, step=state.global_step, begins=True)

    def on_save(self, args, state, control, optimizer=None, **kwargs) -> None:
        self._write(optimizer, step=state.global_step, begins=False)

    def _write(self, optimizer, **facts) -> None:
        entries = optimizer.optimizer.state.values()
        moments = [entry[key] for entry in entries for key in ("exp_avg", "exp_avg_sq")]
        parts = [value.to_local() if isinstance(value, DTensor) else value for value in moments]
        facts["digest"] = digest(torch.cat([part.flatten() for part in parts])) if parts else None
        print(json.dumps(facts), file=self._file, flush=True)


def values(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """All parameters in full (collective, if they are sharded)."""
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        from deepspeed.runtime.zero import GatheredParameters

        with GatheredParameters(list(model.parameters())):
            return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    named = ((name.replace("_checkpoint_wrapped_module.", ""), value) for name, value in model.named_parameters())
    found = {name: parameter.detach() for name, parameter in named}
    return {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in found.items()}


def use_deepspeed(stage: int) -> dict[str, object]:
    """Have accelerate take DeepSpeed to a CPU; returns DeepSpeed's configuration."""
    os.environ |= {"ACCELERATE_USE_DEEPSPEED": "true", "DS_ACCELERATOR": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 100,
            "stage3_gather_16bit_weights_on_model_save": True,  # without it Trainer's save_model() writes shards
        },
    }


def show_processes(state: PartialState) -> None:
    """Tell accelerate how many processes there are, which with DeepSpeed it does not see on CPUs."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    state._shared_state.update(num_processes=world_size, process_index=rank, local_process_index=rank)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", choices=KINDS, default="plain")
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--result", required=True)
    parser.add_argument("--max_steps", type=int, default=200)
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--step_seconds", type=float, default=0.0)
    parser.add_argument("--data_seed", type=int, default=0)
    parser.add_argument("--stream", type=Path, default=None, help="folder of a streaming data set; default: bytes")
    parser.add_argument("--dispatch_batches", type=int, default=1, help="whether rank 0 reads the stream for all")
    parser.add_argument("--map_style", type=int, default=0, help="whether that data set is a table, not a stream")
    parser.add_argument("--order_seed", type=int, default=1)
    parser.add_argument("--hidden_size", type=int, default=16)
    parser.add_argument("--save_steps", type=int, default=0, help="0: no checkpoints")
    parser.add_argument("--resume", type=int, default=0, help="whether from its own newest checkpoint, if it has one")
    options = parser.parse_args()
    rank = int(os.environ.get("RANK", "0"))
    logging.basicConfig(level=logging.INFO, format=f"rank {rank} pid {os.getpid()} %(message)s")
    torch.set_num_threads(1)
    sharding: dict[str, object] = {"use_cpu": True}
    if options.kind == "fsdp2":
        sharding |= {"fsdp": True, "fsdp_config": {"version": 2, "activation_checkpointing": True}}
    elif options.kind == "compile":
        sharding |= {"torch_compile": True}
    elif options.kind.startswith("zero"):
        zero = use_deepspeed(int(options.kind[-1]))
        sharding = {"deepspeed": {**zero, "gradient_clipping": "auto"}}
    arguments = TrainingArguments(
        output_dir=str(options.output_dir), max_steps=options.max_steps, learning_rate=1e-3,
        per_device_train_batch_size=options.batch_size, lr_scheduler_type="cosine", report_to="none",
        logging_steps=10, save_strategy="steps" if options.save_steps else "no",
        save_steps=options.save_steps or 500, disable_tqdm=True, data_seed=options.order_seed, seed=1, **sharding,
        accelerator_config={"dispatch_batches": bool(options.dispatch_batches) if options.stream else None},
    )  # fmt: skip
    if options.kind == "fsdp2":  # accelerate leaves FSDP out on a CPU, without a word
        arguments.distributed_state._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    elif options.kind.startswith("zero"):
        show_processes(arguments.distributed_state)
    network = network_of(options.kind, options.hidden_size)
    diary = Diary(Path(f"{options.result}.rank-{rank}.jsonl"))
    shards = stream(options.stream, map_style=bool(options.map_style)) if options.stream else None
    trainer = Trainer(
        model=network,
        args=arguments,
        train_dataset=shards if shards is not None else dataset(options.data_seed),
        callbacks=[Pace(options.step_seconds, -1, 0.0), DiLoCoCallback(), diary],
    )
    if options.stream:
        trainer.add_callback(Reads(Path(f"{options.result}.rank-{rank}.reads")))
    if options.kind.startswith(("fsdp2", "zero")):
        trainer.add_callback(Moments(Path(f"{options.result}.rank-{rank}.moments")))
    try:
        trainer.train(resume_from_checkpoint=last_checkpoint(trainer.args.output_dir) if options.resume else None)
    except SystemExit as told_to_stop:
        print(f"rank {rank} exits", flush=True)
        if options.kind == "fsdp2":
            end_of_ranks(int(told_to_stop.code or 0))
        raise
    trainer.save_model(f"{options.result}-saved")
    held = values(trainer.model)
    if rank == 0:
        torch.save(held, f"{options.result}.pt")
    print(f"rank {rank} has trained", flush=True)
    if dist.is_initialized():
        end_of_ranks()


def end_of_ranks(code: int = 0) -> None:
    """End at once, all together: a process of FSDP2 and gloo may abort at its regular end."""
    dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
