"""A user's Trainer script, as small as it gets: a tiny Llama on bytes of Python sources. Run by the tests."""

from __future__ import annotations

import argparse
import json
import logging
import sysconfig
import time
from pathlib import Path

import datasets
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from hf_diloco import DiLoCoCallback, DiLoCoPlugin, last_checkpoint, shard_dataset
from hf_diloco.core.codec import digest
from hf_diloco.learner.optimizer_state import OptimizerState, piece_digest
from hf_diloco.learner.parameters import ModelParameters


class Pace(TrainerCallback):
    """No inner step takes less than this: several learners on two cores then do not fight for them."""

    def __init__(self, seconds: float, hang_at_step: int, hang_seconds: float) -> None:
        self._seconds = seconds
        self._hang_at_step, self._hang_seconds = hang_at_step, hang_seconds
        self._until = 0.0

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        if state.global_step == self._hang_at_step:
            time.sleep(self._hang_seconds)
        time.sleep(max(self._until - time.monotonic(), 0.0))
        self._until = time.monotonic() + self._seconds


class Beginning(TrainerCallback):
    """Writes down what the inner optimizer holds before the first step."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_train_begin(self, args, state, control, model=None, optimizer=None, **kwargs) -> None:
        content = OptimizerState(ModelParameters(model).trainable, optimizer.optimizer)
        digests = [piece_digest(content.read(piece).result()) for piece in content.plan().pieces]
        steps = sorted({float(entry["step"]) for entry in optimizer.state_dict()["state"].values()})
        self._path.write_text(json.dumps({"pieces": digests, "steps": steps, "trainer_step": state.global_step}))


class Reads(TrainerCallback):
    """Writes down shard and row of each step's examples: what the test has put into their first two tokens."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_train_begin(self, args, state, control, model=None, **kwargs) -> None:
        model.register_forward_pre_hook(self._see, with_kwargs=True)

    def _see(self, module, args, kwargs) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(kwargs["input_ids"][:, :2].tolist()) + "\n")


def stream(folder: Path, *, map_style: bool = False) -> datasets.Dataset | datasets.IterableDataset:
    """A file for each shard, written by the test; as a table, if it is to be map-style."""
    files = sorted(map(str, folder.glob("*.jsonl")))
    whole = datasets.load_dataset(
        "json", data_files=files, split="train", streaming=not map_style, cache_dir=str(folder)
    )
    return shard_dataset(whole, num_shards=len(files))


def dataset(seed: int) -> list[dict[str, list[int]]]:
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    data = b"".join(path.read_bytes() for path in paths[:40])
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, len(data) - 33, (2000,), generator=generator).tolist()
    return [{"input_ids": list(data[start : start + 32]), "labels": list(data[start : start + 32])} for start in starts]


def model(seed: int, hidden_size: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=256, hidden_size=hidden_size, intermediate_size=2 * hidden_size, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--max_steps", type=int, default=200)
    parser.add_argument("--step_seconds", type=float, default=0.0)
    parser.add_argument("--data_seed", type=int, default=0)
    parser.add_argument("--stream", type=Path, default=None, help="folder of a streaming data set; default: bytes")
    parser.add_argument("--map_style", type=int, default=0, help="whether that data set is a table, not a stream")
    parser.add_argument("--num_workers", type=int, default=0, help="of the DataLoader; they live on between passes")
    parser.add_argument("--order_seed", type=int, default=1)
    parser.add_argument("--model_seed", type=int, default=0)
    parser.add_argument("--hidden_size", type=int, default=16)
    parser.add_argument("--hang_at_step", type=int, default=-1)
    parser.add_argument("--hang_seconds", type=float, default=0.0)
    parser.add_argument("--resume_from", default=None)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--save_steps", type=int, default=0, help="0: no checkpoints")
    options = parser.parse_args()
    log = logging.FileHandler(options.result.with_suffix(".debug"))
    for name in ("rank", "accounts"):  # what was applied, at which step, and of which version it was
        logging.getLogger(f"hf_diloco.learner.{name}").addHandler(log)
        logging.getLogger(f"hf_diloco.learner.{name}").setLevel(logging.DEBUG)
    logging.basicConfig(level=logging.INFO)
    logging.getLogger("hf_diloco.learner.exchange").setLevel(logging.DEBUG)
    torch.set_num_threads(1)
    arguments = TrainingArguments(
        output_dir=str(options.output_dir), max_steps=options.max_steps, per_device_train_batch_size=4,
        learning_rate=options.learning_rate, lr_scheduler_type="cosine", use_cpu=True, report_to="none",
        logging_steps=10, save_strategy="steps" if options.save_steps else "no",
        save_steps=options.save_steps or 500, disable_tqdm=True, data_seed=options.order_seed, seed=1,
        dataloader_num_workers=options.num_workers, dataloader_persistent_workers=options.num_workers > 0,
    )  # fmt: skip
    network = model(options.model_seed, options.hidden_size)
    start = {name: parameter.detach().clone() for name, parameter in network.named_parameters()}
    shards = stream(options.stream, map_style=bool(options.map_style)) if options.stream else None
    trainer = Trainer(
        model=network,
        args=arguments,
        train_dataset=shards if shards is not None else dataset(options.data_seed),
        callbacks=[
            Pace(options.step_seconds, options.hang_at_step, options.hang_seconds),
            DiLoCoCallback(DiLoCoPlugin()),
            Beginning(options.result.with_suffix(".begin.json")),
            *([Reads(options.result.with_suffix(".reads"))] if options.stream else []),
        ],
    )
    own = last_checkpoint(trainer.args.output_dir) if options.save_steps else None
    trainer.train(resume_from_checkpoint=options.resume_from or own)
    values = {name: parameter.detach() for name, parameter in network.named_parameters()}
    torch.save(values, options.result.with_suffix(".pt"))
    torch.save(start, options.result.with_suffix(".start.pt"))
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    result = {"digests": {name: digest(value) for name, value in values.items()}, "losses": losses}
    options.result.write_text(json.dumps(result))  # last: who sees it may read the others


if __name__ == "__main__":
    main()
