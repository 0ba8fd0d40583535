"""Fine-tune a language model with TRL's SFTTrainer and LoRA: alone, or as one learner of a Decoupled DiLoCo run.

Two places make a learner of a plain SFT script: ``shard_dataset`` and the callback. Only the adapter is synced; the
syncer writes it to ``model`` in its run directory, as PEFT writes adapters. TRL and PEFT are needed: ``pip install trl
peft``.

    python examples/sft_lora.py --model_name_or_path MODEL --dataset_name DATASET --use_peft --output_dir out
    hf-diloco launch --num-learners 2 examples/sft_lora.py --model_name_or_path MODEL --dataset_name DATASET --use_peft
"""

from __future__ import annotations

from datasets import load_dataset
from trl import ModelConfig, ScriptArguments, SFTConfig, SFTTrainer, TrlParser, get_peft_config

from hf_diloco import DiLoCoCallback, last_checkpoint, shard_dataset


def main() -> None:
    parser = TrlParser((ScriptArguments, SFTConfig, ModelConfig))
    script_args, training_args, model_args = parser.parse_args_and_config()
    dataset = load_dataset(script_args.dataset_name, name=script_args.dataset_config)
    trainer = SFTTrainer(
        model=model_args.model_name_or_path,
        args=training_args,
        train_dataset=shard_dataset(dataset[script_args.dataset_train_split]),
        peft_config=get_peft_config(model_args),
        callbacks=[DiLoCoCallback()],
    )
    trainer.train(resume_from_checkpoint=last_checkpoint(trainer.args.output_dir))
    trainer.save_model()


if __name__ == "__main__":
    main()
