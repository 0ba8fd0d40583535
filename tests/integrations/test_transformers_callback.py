"""DiLoCoCallback in a real Trainer, with a learner that follows a script."""

import contextlib
import gc
import json
import logging
import weakref

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from trainers import NUM_SAMPLES, Recorder, make_model, make_trainer, plugin
from transformers import (
    EarlyStoppingCallback,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from hf_diloco.config import DiLoCoPlugin
from hf_diloco.errors import ConfigError, DiLoCoWarning, LearnerRefusedError, UnsupportedError
from hf_diloco.integrations.transformers import DiLoCoCallback

pytestmark = pytest.mark.fast


def holds_global(model):
    return all(bool((parameter == 0.25).all()) for parameter in model.parameters())


# ------------------------------------------------------------------------------------------------------- off, and names


def test_without_a_syncer_nothing_happens_and_it_is_said_once(tmp_path, scripted, caplog):
    with caplog.at_level(logging.INFO, "hf_diloco"):
        trainer = make_trainer(tmp_path, DiLoCoCallback())
        trainer.train()
    assert [record.message for record in caplog.records if "hf-diloco is off" in record.message] == [
        "hf-diloco is off: no syncer address (HF_DILOCO_SYNCER); training goes on without it."
    ]
    assert not scripted.instances
    assert trainer.args.output_dir == str(tmp_path / "out")
    alone = make_trainer(tmp_path)
    alone.train()
    for ours, theirs in zip(trainer.model.parameters(), alone.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("is_first", [True, False])
def test_an_unusable_token_is_found_before_there_is_a_model(tmp_path, monkeypatch, is_first):
    monkeypatch.setenv("RANK", "0" if is_first else "1")
    (tmp_path / "token").write_text("secret\n")
    (tmp_path / "token").chmod(0o644)
    learner = DiLoCoPlugin(syncer="localhost:29600", learner_id=0, token_file=str(tmp_path / "token"))
    with pytest.raises(ConfigError, match="chmod 600") if is_first else contextlib.nullcontext():
        DiLoCoCallback(learner)
    DiLoCoCallback(learner, link=object)  # another link has no token


def test_each_learner_has_its_own_directory_and_run_name(tmp_path, scripted):
    trainer = make_trainer(tmp_path, DiLoCoCallback(plugin()), save_strategy="steps", save_steps=3)
    assert trainer.args.output_dir == str(tmp_path / "out" / "learner-2")
    assert trainer.args.run_name == "out-learner-2"
    trainer.train()
    trainer.save_metrics("train", {"x": 1})
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["learner-2"]
    assert (tmp_path / "out" / "learner-2" / "checkpoint-3").is_dir()
    again = Trainer(model=make_model(), args=trainer.args, callbacks=[DiLoCoCallback(plugin())])
    assert again.args.output_dir == str(tmp_path / "out" / "learner-2")
    named = make_trainer(tmp_path, DiLoCoCallback(plugin(0)), run_name="mine")
    assert named.args.run_name == "mine-learner-0"


def test_attach_puts_it_before_the_reporters(tmp_path, scripted):
    trainer = make_trainer(tmp_path)
    callback = DiLoCoCallback(plugin())
    callback.attach(trainer)
    assert trainer.callback_handler.callbacks[1] is callback
    assert trainer.args.output_dir.endswith("learner-2")
    late = make_trainer(tmp_path)
    late.add_callback(DiLoCoCallback(plugin()))
    late.train()
    assert late.args.output_dir.endswith("learner-2")


def test_learners_do_not_push(scripted, tmp_path):
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, push_to_hub=True)
    with pytest.warns(DiLoCoWarning, match="push_to_hub is off for this learner"):
        DiLoCoCallback(plugin()).on_init_end(args, None, None)
    assert not args.push_to_hub


def test_what_cannot_work_is_refused_when_the_trainer_is_made(tmp_path, monkeypatch):
    monkeypatch.setattr(TrainingArguments, "n_gpu", property(lambda self: 4, lambda self, new: None))
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    with pytest.raises(UnsupportedError, match=r"4 GPUs.*CUDA_VISIBLE_DEVICES"):
        DiLoCoCallback(plugin()).on_init_end(args, None, None)
    DiLoCoCallback().on_init_end(args, None, None)


# --------------------------------------------------------------------------------------------- what the learner is told


def test_tokens_are_those_that_trainer_counts(tmp_path, scripted):
    trainer = make_trainer(
        tmp_path, DiLoCoCallback(plugin()), gradient_accumulation_steps=2, eval_strategy="steps", eval_steps=2,
        include_num_input_tokens_seen="non_padding",
    )  # fmt: skip
    trainer.train()
    learner = scripted.instances[0]
    assert learner.total_steps == 6
    assert len(learner.tokens) == 6
    assert sum(learner.tokens) == trainer.state.num_input_tokens_seen > 0
    assert learner.losses[:2] == [None, None]
    assert learner.losses[2] == pytest.approx(trainer.state.log_history[0]["loss"])
    assert not trainer.model._forward_pre_hooks


def test_files_of_the_exported_model(tmp_path, scripted):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    trainer = make_trainer(tmp_path, DiLoCoCallback(plugin()))
    trainer.callback_handler.processing_class = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    trainer.train()
    files = scripted.instances[0].files
    assert {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"} <= files.keys()
    trainer.model.save_pretrained(tmp_path / "saved")
    assert json.loads(files["config.json"]) == json.loads((tmp_path / "saved" / "config.json").read_text())


def test_learners_read_in_different_orders_and_each_again_in_its_own(tmp_path, scripted):
    def batches(learner_id, **arguments):
        recorder = Recorder()
        make_trainer(tmp_path, DiLoCoCallback(plugin(learner_id)), recorder, **arguments).train()
        return torch.stack(recorder.batches)

    order = batches(0)
    assert torch.equal(order, batches(0))
    assert not torch.equal(order, batches(1))
    assert not torch.equal(order, batches(0, data_seed=7))
    assert torch.equal(batches(0, data_seed=7), batches(0, data_seed=7, seed=5))
    for arguments in (
        {"accelerator_config": {"use_seedable_sampler": False}},
        {"train_sampling_strategy": "group_by_length"},
    ):
        order = batches(0, **arguments)
        assert torch.equal(order, batches(0, **arguments))
        assert not torch.equal(order, batches(1, **arguments))
    assert torch.equal(
        batches(0, train_sampling_strategy="sequential"), batches(1, train_sampling_strategy="sequential")
    )


def test_who_begins_in_mid_run_reads_in_another_order_and_who_resumes_in_the_same(tmp_path, scripted):
    def batches(path, starts_at, resume=None, **arguments):
        scripted.starts_at = starts_at
        recorder = Recorder()
        trainer = make_trainer(
            tmp_path / path, DiLoCoCallback(plugin()), recorder, max_steps=50, save_strategy="steps", save_steps=4,
            save_total_limit=1, **arguments,
        )  # fmt: skip
        scripted.ends_at = starts_at + 16 if resume is None else 50
        trainer.train(resume_from_checkpoint=resume)
        return recorder.batches

    first, other, later = batches("a", 0), batches("b", 0), batches("c", 20)
    assert all(map(torch.equal, first, other))
    assert not any(map(torch.equal, first, later))
    for path, start in (("a", 0), ("c", 20)):  # 10 batches make an epoch: the checkpoint of step 16 is in the second
        whole = batches(f"{path} whole", start) + batches(f"{path} whole", 30, resume=True)
        going_on = batches(f"{path} again", start, resume=None, num_train_epochs=5)
        assert all(map(torch.equal, whole[:16], going_on))
        epoch = [row.tolist() for batch in whole[10:20] for row in batch]
        assert sorted(epoch) == sorted(row.tolist() for batch in whole[:10] for row in batch), "each example once"


# -------------------------------------------------------------------------------------------------------------- the end


def test_the_run_ends_when_the_clock_says_so(tmp_path, scripted):
    scripted.starts_at, scripted.jumps = 2, {2: 5}
    recorder = Recorder()
    trainer = make_trainer(
        tmp_path, DiLoCoCallback(plugin()), recorder, save_strategy="steps", save_steps=100, eval_strategy="steps",
        eval_steps=100,
    )  # fmt: skip
    trainer.train()
    assert trainer.state.global_step == 3  # 2 -> 3 -> 5 -> 6
    assert recorder.stops == [False, False, True]
    assert scripted.instances[0].calls == ["join", "finish", "close"]
    assert holds_global(trainer.model)
    saved = LlamaForCausalLM.from_pretrained(tmp_path / "out" / "learner-2" / "checkpoint-3")
    assert holds_global(saved)
    assert [log["step"] for log in trainer.state.log_history if "eval_loss" in log] == [3]


def test_trainers_own_last_step_ends_it_too(tmp_path, scripted):
    scripted.ends_at = 100
    trainer = make_trainer(tmp_path, DiLoCoCallback(plugin()))
    trainer.train()
    assert len(scripted.instances[0].tokens) == 6
    assert scripted.instances[0].calls == ["join", "finish", "close"]
    assert holds_global(trainer.model)


def test_epochs_end_it_too(tmp_path, scripted):
    trainer = make_trainer(tmp_path, DiLoCoCallback(plugin()), max_steps=-1, num_train_epochs=2)
    trainer.train()
    assert scripted.instances[0].total_steps == len(scripted.instances[0].tokens) == 2 * NUM_SAMPLES // 4
    assert scripted.instances[0].steps_from_epochs
    assert scripted.instances[0].calls == ["join", "finish", "close"]


def test_when_the_syncer_is_lost_the_local_model_stays(tmp_path, scripted):
    scripted.finishes = False
    trainer = make_trainer(
        tmp_path, DiLoCoCallback(plugin()), save_strategy="steps", eval_strategy="steps", eval_steps=3, save_steps=3,
        load_best_model_at_end=True,
    )  # fmt: skip
    trainer.train()
    assert scripted.instances[0].calls == ["join", "finish", "close"]
    assert not holds_global(trainer.model)


@pytest.mark.parametrize("finishes", [True, False])
def test_an_evaluation_after_training_says_of_which_model_it_is(tmp_path, scripted, finishes):
    scripted.finishes = finishes
    trainer = make_trainer(tmp_path, DiLoCoCallback(plugin()))
    assert "eval_of_global_model" not in trainer.evaluate()
    trainer.train()
    assert trainer.evaluate()["eval_of_global_model"] == finishes
    assert trainer.state.log_history[-1]["eval_of_global_model"] == finishes


def test_the_global_model_wins_over_the_best_one(tmp_path, scripted):
    trainer = make_trainer(
        tmp_path, DiLoCoCallback(plugin()), save_strategy="steps", eval_strategy="steps", eval_steps=3, save_steps=3,
        load_best_model_at_end=True,
    )  # fmt: skip
    with pytest.warns(DiLoCoWarning, match=r"load_best_model_at_end: .*global parameters"):
        trainer.train()
    assert scripted.instances[0].calls == ["join", "finish", "restore", "close"]
    assert holds_global(trainer.model)


def test_early_stopping_leaves_and_keeps_the_local_model(tmp_path, scripted, caplog):
    scripted.starts_at = 1
    trainer = make_trainer(
        tmp_path, DiLoCoCallback(plugin()), EarlyStoppingCallback(early_stopping_patience=1), max_steps=50,
        eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2, load_best_model_at_end=True,
        metric_for_best_model="loss", learning_rate=0.0,
    )  # fmt: skip
    ended_early = pytest.warns(DiLoCoWarning, match="ended early at this learner: what it had done is merged")
    with caplog.at_level(logging.INFO, "hf_diloco"), ended_early:
        trainer.train()
    steps = trainer.state.global_step
    assert steps < 50
    assert scripted.instances[0].calls == ["join", "leave: training ended early at this learner", "close"]
    assert f"[learner 2 · step {steps + 1}] leaves the run" in caplog.text
    assert not holds_global(trainer.model)


def test_a_second_train_closes_the_first_link(tmp_path, scripted):
    links = iter(["first", "second"])
    trainer = make_trainer(tmp_path, DiLoCoCallback(plugin(), link=lambda: next(links)))
    trainer.train()
    trainer.train()
    assert [learner.link for learner in scripted.instances] == ["first", "second"]
    assert [learner.calls for learner in scripted.instances] == [["join", "finish", "close"]] * 2


def test_an_out_of_memory_retry_joins_again(tmp_path, scripted):
    class OutOfMemory(TrainerCallback):
        raised = False

        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2 and not self.raised:
                OutOfMemory.raised = True
                raise RuntimeError("CUDA out of memory.")

    trainer = make_trainer(tmp_path, DiLoCoCallback(plugin()), OutOfMemory(), auto_find_batch_size=True)
    trainer.train()
    first, second = scripted.instances
    assert first.calls == ["join", "close"]
    assert second.calls == ["join", "finish", "close"]
    assert len(trainer.model._forward_pre_hooks) == 0


def test_after_an_exception_the_link_ends_with_the_callback(tmp_path, scripted):
    class Broken(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2:
                raise ValueError("broken")

    callback = DiLoCoCallback(plugin())
    trainer = make_trainer(tmp_path, callback, Broken())
    with pytest.raises(ValueError, match="broken"):
        trainer.train()
    assert scripted.instances[0].calls == ["join"]
    gone = weakref.ref(callback)
    del callback, trainer
    gc.collect()
    assert gone() is None
    assert scripted.instances[0].calls == ["join", "close"]


def test_when_joining_fails_the_link_is_closed(tmp_path, scripted):
    scripted.join_error = LearnerRefusedError("no")
    trainer = make_trainer(tmp_path, DiLoCoCallback(plugin()))
    with pytest.raises(LearnerRefusedError):
        trainer.train()
    assert scripted.instances[0].calls == ["join", "close"]


def test_a_step_without_an_update_does_not_count(tmp_path, scripted):
    class Skipped(TrainerCallback):
        def on_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
            optimizer._is_overflow = state.global_step == 1  # what step_was_skipped shows (fp16 overflow)

    trainer = make_trainer(tmp_path, DiLoCoCallback(plugin()), Skipped(), include_num_input_tokens_seen="non_padding")
    with pytest.warns(DiLoCoWarning, match="ended by itself at step 5 of 6"):
        trainer.train()
    assert len(scripted.instances[0].tokens) == 5
    assert sum(scripted.instances[0].tokens) < trainer.state.num_input_tokens_seen
    assert scripted.instances[0].calls == ["join", "finish", "close"]
