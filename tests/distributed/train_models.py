"""Users' scripts for all kinds of models, each as small as it gets. Run by test_models.py."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import datasets
import peft
import torch
import torch.distributed as dist
import transformers as hf
import trl
from tokenizers import Tokenizer, models, pre_tokenizers
from train_ranks import end_of_ranks
from train_tiny import Pace

from hf_diloco import DiLoCoCallback, shard_dataset
from hf_diloco.learner.parameters import ModelParameters

BATCH_SIZE, LENGTH, NUM_TOKENS, NUM_LABELS = 2, 16, 12, 7
VOCABULARY, IMAGE_SIZE, IMAGE_TOKEN, NUM_IMAGE_TOKENS = 64, 8, 5, 4
PROMPT_LENGTH, COMPLETION_LENGTH = 4, 6
TEXT = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
VISION = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "image_size": IMAGE_SIZE, "patch_size": 4,
}  # fmt: skip


def llama(**changes: Any) -> hf.PreTrainedModel:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**{**TEXT, "tie_word_embeddings": True, **changes}))


def mixtral() -> hf.PreTrainedModel:
    return hf.MixtralForCausalLM(
        hf.MixtralConfig(**TEXT, num_key_value_heads=1, num_local_experts=3, num_experts_per_tok=2)
    )


def bert() -> hf.PreTrainedModel:
    return hf.BertForMaskedLM(hf.BertConfig(**TEXT, max_position_embeddings=32))


def t5() -> hf.PreTrainedModel:
    config = hf.T5Config(
        vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0
    )
    return hf.T5ForConditionalGeneration(config)


def vit() -> hf.PreTrainedModel:
    return hf.ViTForImageClassification(hf.ViTConfig(**VISION, num_labels=3))


def resnet() -> hf.PreTrainedModel:
    config = hf.ResNetConfig(embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], layer_type="basic", num_labels=3)
    return hf.ResNetForImageClassification(config)


def llava() -> hf.PreTrainedModel:
    config = hf.LlavaConfig(
        vision_config=hf.CLIPVisionConfig(**VISION), text_config=hf.LlamaConfig(**TEXT), image_token_index=IMAGE_TOKEN,
    )  # fmt: skip
    return hf.LlavaForConditionalGeneration(config)


def qwen_vl() -> hf.PreTrainedModel:
    """Its images are patches of 4 x 4, of which 2 x 2 make a token."""
    vision = {
        "depth": 2, "hidden_size": 16, "out_hidden_size": 16, "intermediate_size": 32, "num_heads": 2,
        "patch_size": 4, "window_size": 8, "fullatt_block_indexes": [1],
    }  # fmt: skip
    config = hf.Qwen2_5_VLConfig(
        vision_config=vision,
        text_config={
            **TEXT, "num_key_value_heads": 1, "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1]},
        },
        image_token_id=IMAGE_TOKEN, video_token_id=60, vision_start_token_id=61, vision_end_token_id=62,
    )  # fmt: skip
    return hf.Qwen2_5_VLForConditionalGeneration(config)


# What a script trains from nothing, and the public class that loads it.
WHOLE = {
    "llama": (llama, hf.AutoModelForCausalLM),
    "mixtral": (mixtral, hf.AutoModelForCausalLM),
    "bert": (bert, hf.AutoModelForMaskedLM),
    "t5": (t5, hf.AutoModelForSeq2SeqLM),
    "vit": (vit, hf.AutoModelForImageClassification),
    "resnet": (resnet, hf.AutoModelForImageClassification),
    "llava": (llava, hf.AutoModelForImageTextToText),
    "qwen-vl": (qwen_vl, hf.AutoModelForImageTextToText),
}
# Tokens of a sample, as the token weights should see them.
TOKENS = {
    "t5": NUM_TOKENS + NUM_LABELS, "vit": 1, "resnet": 1,
    "lora-sft": 11, "lora-quantised": 11, "lora-dpo": 2 * 8, "lora-grpo": PROMPT_LENGTH + COMPLETION_LENGTH,
}  # fmt: skip


def tokenizer() -> hf.PreTrainedTokenizerFast:
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3, **{f"w{index}": index for index in range(4, VOCABULARY)}}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def processor() -> hf.LlavaProcessor:
    """Tokenizer and image processor in one, as scripts for LLaVA have it."""
    size = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
    images = hf.CLIPImageProcessorPil(size=size, crop_size=size)
    return hf.LlavaProcessor(images, tokenizer(), patch_size=4, image_token=f"w{IMAGE_TOKEN}")


def save_base(path: Path) -> None:
    """The model that adapters are trained on: much larger than any of them."""
    torch.manual_seed(0)
    llama(vocab_size=4096, hidden_size=64, tie_word_embeddings=False).save_pretrained(path)
    tokenizer().save_pretrained(path)


def text_row(kind: str) -> dict[str, Any]:
    ids = torch.randint(6, VOCABULARY, (NUM_TOKENS,)).tolist()
    mask = [1] * NUM_TOKENS + [0] * (LENGTH - NUM_TOKENS)
    if kind in ("llava", "qwen-vl"):
        ids[:NUM_IMAGE_TOKENS] = [IMAGE_TOKEN] * NUM_IMAGE_TOKENS
    ids += [0] * (LENGTH - NUM_TOKENS)
    labels = (
        ids[:NUM_LABELS] + [-100] * 3 if kind == "t5" else [x if m else -100 for x, m in zip(ids, mask, strict=True)]
    )
    row = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    if kind == "llava":
        return {**row, "pixel_values": torch.randn(3, IMAGE_SIZE, IMAGE_SIZE).tolist()}
    return {**row, **patches(ids)} if kind == "qwen-vl" else row


def patches(ids: list[int]) -> dict[str, Any]:
    """An image as the processor of Qwen-VL prepares it (which as a whole needs torchvision, for videos)."""
    processor = hf.Qwen2VLImageProcessorPil(patch_size=4, size={"shortest_edge": 256, "longest_edge": 256})
    image = processor(torch.randint(256, (3, 16, 16), dtype=torch.uint8).numpy())
    types = [int(token == IMAGE_TOKEN) for token in ids]
    return {**{name: value.tolist() for name, value in image.items()}, "mm_token_type_ids": types}


def collate_patches(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """The patches of all images of a batch come as one list."""
    batch = hf.default_data_collator(rows)
    return {**batch, **{name: batch[name].flatten(0, 1) for name in ("pixel_values", "image_grid_thw")}}


def image_row() -> dict[str, Any]:
    return {"pixel_values": torch.randn(3, IMAGE_SIZE, IMAGE_SIZE).tolist(), "labels": int(torch.randint(3, ()))}


def words(count: int) -> str:
    return " ".join(f"w{index}" for index in torch.randint(4, VOCABULARY, (count,)).tolist())


def dataset(kind: str) -> datasets.Dataset:
    torch.manual_seed(0)
    makers = {
        "vit": image_row,
        "resnet": image_row,
        "lora-sft": lambda: {"text": words(10)},
        "lora-quantised": lambda: {"text": words(10)},
        "lora-grpo": lambda: {"prompt": words(PROMPT_LENGTH)},
        "lora-dpo": lambda: {"prompt": words(4), "chosen": " " + words(3), "rejected": " " + words(3)},
    }
    make = makers.get(kind, lambda: text_row(kind))
    return shard_dataset(datasets.Dataset.from_list([make() for _ in range(64)]))


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(token % 2 for token in tokens) / len(tokens) for tokens in completion_ids]


def make_trl_trainer(kind: str, base: str, arguments: dict[str, Any], **rest: Any) -> hf.Trainer:
    """A script that leaves the model to TRL."""
    arguments = {**arguments, "model_init_kwargs": {"dtype": "float32"}}
    rest = {**rest, "model": base, "peft_config": peft.LoraConfig(r=2, target_modules="all-linear")}
    if kind == "lora-dpo":
        return trl.DPOTrainer(args=trl.DPOConfig(**arguments), **rest)
    if kind == "lora-grpo":  # two updates with what was generated at once: an older model's, and there is a reference
        config = trl.GRPOConfig(
            **arguments, num_generations=2, steps_per_generation=2, beta=0.04,
            max_completion_length=COMPLETION_LENGTH, generation_kwargs={"min_new_tokens": COMPLETION_LENGTH},
        )  # fmt: skip
        return trl.GRPOTrainer(args=config, reward_funcs=reward, **rest)
    if kind == "lora-quantised":
        quantised = hf.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)
        return trl.SFTTrainer(args=trl.SFTConfig(**arguments), quantization_config=quantised, **rest)
    return trl.SFTTrainer(args=trl.SFTConfig(**arguments), **rest)


def make_trainer(kind: str, base: str, arguments: dict[str, Any]) -> hf.Trainer:
    """The whole script of a user, but for the choice of the kind."""
    callbacks = [Pace(0.05, -1, 0), DiLoCoCallback()]
    data = dataset(kind)
    if kind.startswith("lora-") and kind != "lora-head":
        return make_trl_trainer(kind, base, arguments, train_dataset=data, callbacks=callbacks)
    if kind == "lora-head":
        config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"], modules_to_save=["norm"])
        model = peft.get_peft_model(hf.AutoModelForCausalLM.from_pretrained(base), config)
    else:
        torch.manual_seed(int(os.environ["HF_DILOCO_LEARNER_ID"]))  # only one learner's initial values count
        model = WHOLE[kind][0]()
    return hf.Trainer(
        model=model, args=hf.TrainingArguments(**arguments), train_dataset=data, callbacks=callbacks,
        processing_class=processor() if kind == "llava" else tokenizer(),
        data_collator=collate_patches if kind == "qwen-vl" else hf.default_data_collator,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--kind", required=True)
    parser.add_argument("--base", default="")
    parser.add_argument("--data_seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    arguments = {
        "output_dir": options.output_dir, "max_steps": 30, "per_device_train_batch_size": BATCH_SIZE,
        "learning_rate": 1e-2, "use_cpu": True, "report_to": "none", "save_strategy": "no", "disable_tqdm": True,
        "logging_steps": 10, "dataloader_drop_last": True, "bf16": False,
    }  # fmt: skip
    trainer = make_trainer(options.kind, options.base, arguments)
    trainer.train()
    if trainer.is_world_process_zero():
        torch.save(dict(trainer.model.named_buffers()), options.result.with_suffix(".buffers.pt"))
        torch.save(dict(ModelParameters(trainer.model).trainable), options.result.with_suffix(".pt"))
        result = {"steps": trainer.state.global_step}
        options.result.write_text(json.dumps(result))  # last: who sees it may read the other
    if dist.is_initialized():
        end_of_ranks()


if __name__ == "__main__":
    main()
