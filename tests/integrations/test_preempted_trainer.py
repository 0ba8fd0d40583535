"""SIGTERM while a real Trainer trains in this process, with a learner that follows a script."""

from __future__ import annotations

import os
import signal
import threading

import pytest
from scripted import ScriptedLearner
from trainers import make_trainer, plugin
from transformers import TrainerCallback

from hf_diloco.errors import DiLoCoWarning
from hf_diloco.integrations import membership
from hf_diloco.integrations.transformers import DiLoCoCallback

pytestmark = pytest.mark.fast

LEFT = "away: told to stop (SIGTERM)"


class SendSigterm(TrainerCallback):
    """Sends it to this process at one event."""

    def __init__(self, event, step=3):
        self._step, self.ended = step, 0
        setattr(self, event, self._send)

    def _send(self, args, state, control, **kwargs):
        if state.global_step == self._step:
            self._step = -1
            os.kill(os.getpid(), signal.SIGTERM)

    def on_train_end(self, *args, **kwargs):
        self.ended += 1


@pytest.fixture
def learners(monkeypatch):
    script = type("Script", (ScriptedLearner,), {"instances": []})
    monkeypatch.setattr(membership, "Learner", script)
    return script.instances


@pytest.fixture(autouse=True)
def handled():
    """What the script that uses Trainer has done about SIGTERM: here, noted it."""
    seen = []

    def handler(number, frame):
        seen.append(number)

    before = signal.signal(signal.SIGTERM, handler)
    yield seen
    assert signal.getsignal(signal.SIGTERM) is handler, "the handler that was there is back"
    signal.signal(signal.SIGTERM, before)


def run_out(trainer):
    with pytest.raises(SystemExit) as raised:
        trainer.train()
    return raised.value.code


def checkpoints(trainer):
    return sorted(path.name for path in (trainer.args.output_dir and os.scandir(trainer.args.output_dir)))


@pytest.mark.parametrize("event", ["on_step_begin", "on_optimizer_step"])
def test_it_drains_saves_and_exits(tmp_path, learners, handled, event):
    sender = SendSigterm(event)
    trainer = make_trainer(tmp_path, sender, DiLoCoCallback(plugin()))
    assert run_out(trainer) == 0
    assert learners[0].calls == ["join", LEFT, "close"]
    assert checkpoints(trainer) == ["checkpoint-4"]
    assert handled == [signal.SIGTERM]
    assert sender.ended == 1


def test_the_checkpoint_can_be_resumed_from(tmp_path, learners):
    trainer = make_trainer(tmp_path, SendSigterm("on_step_begin"), DiLoCoCallback(plugin()))
    assert run_out(trainer) == 0
    again = make_trainer(tmp_path, DiLoCoCallback(plugin()))
    with pytest.warns(DiLoCoWarning, match="ended by itself at step 2 of 6"):  # of a run that was not there before
        again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 6
    assert len(learners[1].tokens) == 2


def test_no_time_is_lost_with_evaluations(tmp_path, learners):
    """Neither with that of the step, nor with that of an epoch that ends there, nor with the best model."""
    evaluations = []

    class Watch(TrainerCallback):
        def on_evaluate(self, args, state, control, **kwargs):
            evaluations.append(state.global_step)

    for number, strategy in enumerate(({"eval_strategy": "steps", "eval_steps": 4}, {"eval_strategy": "epoch"})):
        trainer = make_trainer(
            tmp_path / str(number), SendSigterm("on_step_begin", 9), DiLoCoCallback(plugin()), Watch(),
            max_steps=30, **strategy,
        )  # fmt: skip
        assert run_out(trainer) == 0
        assert checkpoints(trainer) == ["checkpoint-10"]
    assert evaluations == [4, 8]


@pytest.mark.parametrize("order", [0, 1])
def test_an_evaluation_is_cut_short(tmp_path, learners, order):
    predictions = []

    class Watch(TrainerCallback):
        def on_prediction_step(self, args, state, control, **kwargs):
            predictions.append(state.global_step)

    sender = SendSigterm("on_prediction_step")
    callbacks = [sender, DiLoCoCallback(plugin()), Watch()]
    trainer = make_trainer(
        tmp_path, *(callbacks if order else callbacks[::-1]), eval_strategy="steps", eval_steps=3,
        per_device_eval_batch_size=1,
    )  # fmt: skip
    assert run_out(trainer) == 0
    assert len(predictions) <= 2
    assert learners[0].calls == ["join", LEFT, "close"]
    assert checkpoints(trainer) == ["checkpoint-3"]
    assert sender.ended == 1


def test_at_the_last_step_it_does_not_wait_for_the_end_of_the_run(tmp_path, learners):
    trainer = make_trainer(tmp_path, SendSigterm("on_step_begin", 5), DiLoCoCallback(plugin()))
    assert run_out(trainer) == 0
    assert learners[0].calls == ["join", "finish", LEFT, "close"]
    assert checkpoints(trainer) == ["checkpoint-6"]


@pytest.mark.parametrize("event", ["on_log", "on_epoch_end"])
def test_after_the_end_of_the_run_the_global_model_is_saved(tmp_path, learners, event):
    trainer = make_trainer(tmp_path, SendSigterm(event, 6), DiLoCoCallback(plugin()))
    assert run_out(trainer) == 0
    assert learners[0].calls == ["join", "finish", "close"]
    assert checkpoints(trainer) == ["checkpoint-6"]


def test_at_the_start_gate_nothing_is_saved(tmp_path, learners):
    trainer = make_trainer(tmp_path, DiLoCoCallback(plugin()))

    class Early(ScriptedLearner):
        instances = learners

        def join(self, *, interrupted):
            os.kill(os.getpid(), signal.SIGTERM)
            return super().join(interrupted=interrupted)

    membership.Learner = Early
    assert run_out(trainer) == 0
    assert learners[0].calls == ["join", LEFT, "close"]
    assert checkpoints(trainer) == []


def test_with_jit_checkpoints_of_trainer(tmp_path, learners, handled):
    trainer = make_trainer(tmp_path, SendSigterm("on_step_begin"), DiLoCoCallback(plugin()), enable_jit_checkpoint=True)
    assert run_out(trainer) == 0
    assert checkpoints(trainer) == ["checkpoint-4"]


def test_a_handler_that_exits_waits_for_its_turn(tmp_path, learners):
    def handler(number, frame):
        raise SystemExit(7)

    before = signal.signal(signal.SIGTERM, handler)
    try:
        trainer = make_trainer(tmp_path, SendSigterm("on_step_begin"), DiLoCoCallback(plugin()))
        assert run_out(trainer) == 7
    finally:
        signal.signal(signal.SIGTERM, before)
    assert learners[0].calls == ["join", LEFT, "close"]
    assert checkpoints(trainer) == ["checkpoint-4"]


def test_when_training_has_failed_sigterm_does_what_it_did_before(tmp_path, learners, handled):
    class Fail(TrainerCallback):
        def on_step_begin(self, *args, **kwargs):
            raise RuntimeError("a mistake")

    trainer = make_trainer(tmp_path, Fail(), DiLoCoCallback(plugin()))
    with pytest.raises(RuntimeError, match="a mistake"):
        trainer.train()
    os.kill(os.getpid(), signal.SIGTERM)
    assert handled == [signal.SIGTERM]
    assert trainer.callback_handler.callbacks  # the callback, and its learner, are still there


def test_a_signal_that_is_ignored_stays_ignored(tmp_path, learners):
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        trainer = make_trainer(tmp_path, SendSigterm("on_step_begin"), DiLoCoCallback(plugin()))
        trainer.train()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert learners[0].calls == ["join", "finish", "close"]


def test_learners_that_are_threads_leave_signals_alone(tmp_path, learners, handled):
    trainer = make_trainer(tmp_path, SendSigterm("on_step_begin"), DiLoCoCallback(plugin()))
    thread = threading.Thread(target=trainer.train)
    thread.start()
    thread.join()
    assert learners[0].calls == ["join", "finish", "close"]
    assert handled == [signal.SIGTERM]
