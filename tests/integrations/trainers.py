"""Small Trainers for the tests of the callback."""

import datasets
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from hf_diloco.config import DiLoCoPlugin
from hf_diloco.integrations.transformers import DiLoCoCallback

NUM_SAMPLES, LENGTH = 40, 8


def make_model(seed=0):
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
            max_position_embeddings=32, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        )
    )  # fmt: skip


def make_data(num_samples=NUM_SAMPLES):
    generator = torch.Generator().manual_seed(0)
    rows = []
    for _ in range(num_samples):
        size = int(torch.randint(3, LENGTH + 1, (), generator=generator))
        ids = torch.randint(3, 64, (size,), generator=generator).tolist() + [0] * (LENGTH - size)
        rows.append({"input_ids": ids, "attention_mask": [int(x > 0) for x in ids], "labels": ids})
    return datasets.Dataset.from_list(rows)


def make_trainer(tmp_path, *callbacks, model=None, **arguments):
    defaults = {
        "output_dir": str(tmp_path / "out"), "max_steps": 6, "per_device_train_batch_size": 4, "use_cpu": True,
        "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "logging_steps": 2, "learning_rate": 1e-3,
    }  # fmt: skip
    return Trainer(
        model=model or make_model(),
        args=TrainingArguments(**{**defaults, **arguments}),
        train_dataset=make_data(),
        eval_dataset=make_data(8),
        callbacks=list(callbacks),
    )


class Recorder(TrainerCallback):
    """What Trainer shows at each step, after the callbacks before it."""

    def __init__(self):
        self.rates, self.batches, self.stops = [], [], []

    def on_train_begin(self, args, state, control, model=None, lr_scheduler=None, **kwargs):
        self.first_rate = lr_scheduler.get_last_lr()[0]
        model.register_forward_pre_hook(self.see, with_kwargs=True)

    def see(self, module, args, kwargs):
        if module.training:
            self.batches.append(kwargs["input_ids"].clone())

    def on_step_end(self, args, state, control, lr_scheduler=None, **kwargs):
        self.rates.append(lr_scheduler.get_last_lr()[0])
        self.stops.append(control.should_training_stop)


def callback(trainer):
    """The DiLoCoCallback of a Trainer."""
    return next(one for one in trainer.callback_handler.callbacks if isinstance(one, DiLoCoCallback))


def plugin(learner_id=2):
    return DiLoCoPlugin(syncer="localhost:29600", learner_id=learner_id, token="secret")
