"""Pre-train a causal language model with Trainer: alone, or as one learner of a Decoupled DiLoCo run.

By itself this is a plain script; started by hf-diloco, the same script is a learner. Two lines make the difference:
``shard_dataset`` and ``DiLoCoCallback``.

    python examples/pretrain_clm.py --output_dir out
    hf-diloco launch --num-learners 2 examples/pretrain_clm.py --output_dir out

By default it trains a Llama of 0.9 M parameters on the sources of Python's standard library, byte by byte.
"""

from __future__ import annotations

import hashlib
import math
import sys
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path

import torch
from datasets import Dataset, DatasetDict, load_dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

from hf_diloco import DiLoCoCallback, shard_dataset

END_OF_TEXT = "<|endoftext|>"


@dataclass
class ScriptArguments:
    """What to train, and on what."""

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "A model to go on with. Default: a tiny one."}
    )
    tokenizer_name: str | None = field(default=None, metadata={"help": "Default: the model's, or one token a byte."})
    train_file: str | None = field(default=None, metadata={"help": "A text file. Default: Python's own sources."})
    dataset_name: str | None = field(default=None, metadata={"help": "A dataset of the Hub with a column `text`."})
    dataset_config_name: str | None = field(default=None, metadata={"help": "Which of its configurations."})
    block_size: int = field(default=128, metadata={"help": "Tokens of an example."})
    max_text_mb: float = field(default=3.0, metadata={"help": "How many MB of Python's sources to use."})
    eval_share: float = field(default=0.05, metadata={"help": "Share of the texts that is held out."})
    max_eval_blocks: int = field(default=256, metadata={"help": "How many held-out examples are evaluated."})


@dataclass
class Arguments(TrainingArguments):
    """Trainer's arguments, with defaults for two CPU cores: about a minute."""

    output_dir: str = field(default="pretrain-clm", metadata={"help": "Where models and checkpoints go."})
    max_steps: int = field(default=300, metadata={"help": "Optimizer steps."})
    per_device_train_batch_size: int = field(default=4, metadata={"help": "Examples of a step."})
    per_device_eval_batch_size: int = field(default=16, metadata={"help": "Examples of an evaluation batch."})
    learning_rate: float = field(default=1e-3, metadata={"help": "Peak learning rate of AdamW."})
    lr_scheduler_type: str = field(default="cosine", metadata={"help": "How it changes."})
    warmup_steps: float = field(default=20, metadata={"help": "Steps until the peak."})
    logging_steps: float = field(default=20, metadata={"help": "Steps between two lines of the log."})
    save_strategy: str = field(default="no", metadata={"help": "When to write checkpoints."})
    report_to: str = field(default="none", metadata={"help": "Trackers."})

    def __post_init__(self) -> None:
        self.use_cpu = self.use_cpu or not torch.accelerator.is_available()
        super().__post_init__()


def python_sources(max_bytes: int) -> list[str]:
    """The standard library's files by name, as many as fit; their order is mixed, or it would be all of asyncio."""
    texts, size = [], 0
    paths = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"), key=lambda path: _hash(path.name))
    for path in paths:
        if "site-packages" in path.parts or "test" in path.parts:
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        if size + len(text) > max_bytes:
            break
        texts.append(text)
        size += len(text)
    return texts


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def load_texts(script: ScriptArguments) -> DatasetDict:
    """The texts to train on and those held out, chosen by a hash of the text: the same at every learner."""
    if script.dataset_name:
        texts = load_dataset(script.dataset_name, script.dataset_config_name, split="train").select_columns("text")
    elif script.train_file:
        texts = load_dataset("text", data_files=script.train_file, sample_by="paragraph", split="train")
    else:
        texts = Dataset.from_dict({"text": python_sources(int(script.max_text_mb * 1e6))})
    held_out = [_hash(text) / 2**64 < script.eval_share for text in texts["text"]]
    if not any(held_out):
        held_out[-1] = True
    return DatasetDict(
        train=texts.select([i for i, out in enumerate(held_out) if not out]),
        eval=texts.select([i for i, out in enumerate(held_out) if out]),
    )


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each of the 256 bytes, and an end of text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT)


def pack(texts: DatasetDict, tokenizer: PreTrainedTokenizerBase, block_size: int) -> DatasetDict:
    """All tokens in a row, cut into blocks; an end of text between two texts."""

    def tokenize_and_cut(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        rows = tokenizer(batch["text"], add_special_tokens=False, return_attention_mask=False, verbose=False)
        tokens = [token for row in rows["input_ids"] for token in (*row, tokenizer.eos_token_id)]
        whole = range(0, len(tokens) - block_size + 1, block_size)
        blocks = [tokens[first : first + block_size] for first in whole]
        return {"input_ids": blocks, "labels": blocks}

    return texts.map(tokenize_and_cut, batched=True, batch_size=100, remove_columns=["text"], desc="Packing")


def make_model(script: ScriptArguments, tokenizer: PreTrainedTokenizerBase) -> LlamaForCausalLM:
    """The model to start from. The first learner of a run supplies its values to all others."""
    if script.model_name_or_path:
        # bf16 checkpoints come as bf16 weights otherwise, which lose most small updates
        return AutoModelForCausalLM.from_pretrained(script.model_name_or_path, dtype=torch.float32)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=max(script.block_size, 128),
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def main() -> None:
    script, args = HfArgumentParser((ScriptArguments, Arguments)).parse_args_into_dataclasses()
    set_seed(args.seed)
    name = script.tokenizer_name or script.model_name_or_path
    tokenizer = AutoTokenizer.from_pretrained(name) if name else byte_tokenizer()
    blocks = pack(load_texts(script), tokenizer, script.block_size)
    trainer = Trainer(
        model=make_model(script, tokenizer),
        args=args,
        train_dataset=shard_dataset(blocks["train"]),
        eval_dataset=blocks["eval"].select(range(min(script.max_eval_blocks, len(blocks["eval"])))),
        processing_class=tokenizer,
        data_collator=default_data_collator,
        callbacks=[DiLoCoCallback()],
    )
    result = trainer.train()
    trainer.save_metrics("train", result.metrics)
    metrics = trainer.evaluate()  # of the global model, if there was a run
    metrics["perplexity"] = math.exp(min(metrics["eval_loss"], 50))
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)
    trainer.save_model()


if __name__ == "__main__":
    sys.exit(main())
