"""What Trainer can do besides stepping, as a learner of a real run."""

import json
import threading
import uuid
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_transformers_run import SECONDS, Run
from trainers import Recorder, callback, make_trainer, plugin
from transformers import EarlyStoppingCallback, TrainerCallback

from hf_diloco.integrations.transformers import DiLoCoCallback

pytestmark = pytest.mark.fast

METRICS = {
    f"diloco/{name}"
    for name in (
        "outer_step", "staleness", "participants", "steps_overwritten", "bytes_sent", "bytes_received", "goodput",
    )
}  # fmt: skip


@pytest.fixture
def run(tmp_path, request):
    def make(path="run", **settings):
        (tmp_path / path).mkdir()
        run = Run(tmp_path / path, **settings)
        request.addfinalizer(run.end)
        return run

    return make


class Raises(TrainerCallback):
    """Once, after a step."""

    def __init__(self, error, step=5):
        self.error, self.step = error, step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step and self.error is not None:
            error, self.error = self.error, None
            raise error


def holds_the_runs_model(trainer, run):
    values, _, _ = run.syncer.model()
    return all(torch.equal(parameter, values[name]) for name, parameter in trainer.model.named_parameters())


def scalars(directory):
    (file,) = Path(directory).rglob("events.out.tfevents.*")
    events = EventAccumulator(str(file))
    events.Reload()
    return {tag: events.Scalars(tag) for tag in events.Tags()["scalars"]}


def test_what_is_logged(run):
    """By a callback that was given as ``callbacks=[DiLoCoCallback()]``: it comes after the reporters at first."""
    run = run()
    trainer = run.trainer(
        0, max_steps=15, gradient_accumulation_steps=2, include_num_input_tokens_seen="non_padding", logging_steps=5,
        report_to="tensorboard", eval_strategy="steps", eval_steps=5,
    )  # fmt: skip
    run.train(trainer)
    history = trainer.state.log_history
    trained, (summary,) = [log for log in history if "loss" in log], [log for log in history if "train_loss" in log]
    assert [log["step"] for log in trained] == [5, 10, 15]
    assert all(log.keys() >= METRICS for log in (*trained, summary))
    for log in (*trained, summary):
        assert (log["diloco/participants"], log["diloco/steps_overwritten"]) in ((1, 0), (0, 0))
        assert 0 <= log["diloco/staleness"] <= log["diloco/outer_step"] <= 15
    assert trained[-1]["diloco/participants"] == 1
    assert summary["diloco/goodput"] == pytest.approx(1.0, abs=1e-3)
    assert [log["eval_of_global_model"] for log in history if "eval_loss" in log] == [0, 0, 1]

    (row,) = run.syncer.status()["learners"]
    assert row["steps"] == 15, "updates, not micro-batches"
    assert row["tokens_trained"] == trainer.state.num_input_tokens_seen
    received, sent = run.hub.bytes_moved(0)
    assert (summary["diloco/bytes_sent"], summary["diloco/bytes_received"]) == (received, sent)

    found = scalars(trainer.args.output_dir)
    assert {f"train/{name}" for name in METRICS} | {"eval/of_global_model"} <= found.keys()
    goodput = [(event.step, pytest.approx(event.value)) for event in found["train/diloco/goodput"]]
    assert goodput == [(log["step"], log["diloco/goodput"]) for log in (*trained, summary)]
    evaluated = trainer.evaluate()
    assert evaluated.keys().isdisjoint(METRICS), "after the run there are no metrics of it"
    assert evaluated["eval_of_global_model"] == 1


@pytest.mark.filterwarnings("ignore:load_best_model_at_end:hf_diloco.errors.DiLoCoWarning")
def test_the_best_model_is_not_what_stays(run):
    run = run()
    best = {"save_strategy": "steps", "eval_strategy": "steps", "eval_steps": 4, "save_steps": 4}
    trainer = run.trainer(0, max_steps=10, load_best_model_at_end=True, **best)
    run.train(trainer)
    assert trainer.state.best_model_checkpoint
    assert holds_the_runs_model(trainer, run)


class AtTheEnd(TrainerCallback):
    """Remembers the model as it was after the last step."""

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.values = {name: value.detach().clone() for name, value in model.named_parameters()}


@pytest.mark.filterwarnings("ignore:training ended early:hf_diloco.errors.DiLoCoWarning")
def test_what_is_merged_of_a_learner_that_loads_its_best_checkpoint(run):
    """It stops early; the run ends with what it had at its last step, and its own model is the best that it had."""
    run = run(outer_lr=1.0, outer_momentum=0.0, wire_format="fp32")
    last = AtTheEnd()
    trainer = run.trainer(
        0, last, EarlyStoppingCallback(2), max_steps=100, learning_rate=1e-2, load_best_model_at_end=True,
        save_strategy="steps", eval_strategy="steps", eval_steps=4, save_steps=4,
        metric_for_best_model="eval_loss", greater_is_better=True,  # so that the first checkpoint is the best
    )  # fmt: skip
    run.train(trainer)
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-4")
    values, _, _ = run.syncer.model()
    best = load_file(f"{trainer.state.best_model_checkpoint}/model.safetensors")
    assert all(torch.equal(value, best[name]) for name, value in trainer.model.named_parameters())
    moved = sum((last.values[name] - best[name]).square().sum() for name in values)
    missed = sum((last.values[name] - values[name]).square().sum() for name in values)
    assert missed < 1e-6 * moved


class StepRates(TrainerCallback):
    """The learning rates that the optimizer steps with, for each attempt."""

    def __init__(self):
        self.attempts = []

    def on_train_begin(self, args, state, control, optimizer=None, **kwargs):
        rates = []
        self.attempts.append(rates)
        optimizer.optimizer.register_step_pre_hook(lambda optimizer, *_: rates.append(optimizer.param_groups[0]["lr"]))
        optimizer.optimizer.register_step_post_hook(lambda *_: None)


def test_an_attempt_in_mid_run_is_warmed_up_once(run):
    run, rates = run(), StepRates()
    arguments = {"max_steps": 60, "learning_rate": 1e-3, "lr_scheduler_type": "constant"}
    killed = run.trainer(0, Raises(ValueError("killed")), **arguments)
    too_large = Raises(RuntimeError("CUDA out of memory."), step=3)
    again = run.trainer(0, too_large, rates, auto_find_batch_size=True, **arguments)
    run.thread.start()
    with pytest.raises(ValueError, match="killed"):
        killed.train()
    callback(killed)._end()  # as its process would have ended
    again.train()
    run.thread.join(SECONDS)
    assert not run.thread.is_alive()
    rising = [pytest.approx(1e-3 * step / 20) for step in range(1, 21)]
    first, second = rates.attempts
    assert first[:3] == rising[:3]
    assert second[:20] == [*rising[3:], *[1e-3] * 3]


def test_a_batch_size_that_is_too_large(run):
    """Trainer begins anew with half of it, and does not say that the first attempt has ended."""
    run = run()
    trainer = run.trainer(0, Raises(RuntimeError("CUDA out of memory.")), max_steps=20, auto_find_batch_size=True)
    run.train(trainer)
    joined = run.lines("join")
    assert len(joined) == 2
    assert len({line["incarnation"] for line in joined}) == 2
    assert holds_the_runs_model(trainer, run)
    assert 10 <= trainer.state.global_step <= 15 + 5, "the clock of the run went on from where the first attempt was"


@pytest.mark.parametrize("error", [ValueError("a mistake"), KeyboardInterrupt()], ids=["mistake", "interrupted cell"])
def test_training_again_after(run, error):
    run = run()
    trainer = run.trainer(0, Raises(error), max_steps=20)
    run.thread.start()
    with pytest.raises(type(error)):
        trainer.train()
    trainer.train()
    run.thread.join(SECONDS)
    assert not run.thread.is_alive()
    assert len(run.lines("join")) == 2
    assert trainer.state.global_step < 20, "its own count began anew, the run's did not"
    assert holds_the_runs_model(trainer, run)
    assert run.syncer.status()["outer_step"] == 20


def test_a_cell_that_makes_the_trainer_and_raised_is_run_again(run):
    """While the exception, which a notebook keeps, holds the first Trainer."""
    run = run()
    run.thread.start()

    def trainer(*callbacks):
        link = DiLoCoCallback(plugin(0), link=lambda: run.hub.connect(0, uuid.uuid4().hex))
        return make_trainer(run.path, link, *callbacks, max_steps=20)

    with pytest.raises(ValueError, match="a mistake") as kept:
        trainer(Raises(ValueError("a mistake"))).train()
    again = trainer()
    again.train()
    run.thread.join(SECONDS)
    assert not run.thread.is_alive()
    assert kept.tb is not None
    assert len(run.lines("join")) == 2
    assert holds_the_runs_model(again, run)


def test_training_in_one_run_and_then_in_another(run, tmp_path):
    runs = iter([run("first"), run("second")])
    both = []

    def link():
        both.append(next(runs))
        both[-1].thread.start()
        return both[-1].hub.connect(0)

    trainer = make_trainer(tmp_path, DiLoCoCallback(plugin(0), link=link), max_steps=10)
    for number in (0, 1):
        trainer.train()
        both[number].thread.join(SECONDS)
        assert not both[number].thread.is_alive()
        assert holds_the_runs_model(trainer, both[number])
        assert trainer.state.global_step == 10
    first, second = (one.syncer.model()[0] for one in both)
    assert any(not torch.equal(first[name], second[name]) for name in first)


# --------------------------------------------------------------------------------------------------------- late joiners


class Rates(TrainerCallback):
    """Learning rates by the run's step; after its first step, or at step ``hold_at``, it lets others know and waits."""

    def __init__(self, learner_id, *, hold_at=None, said=None, waits_for=None):
        self.rates, self.held, self.said, self.waits_for = {}, hold_at, said, waits_for
        self.callback = self.last = None

    def on_train_begin(self, args, state, control, lr_scheduler=None, **kwargs):
        self.begins_at = self.callback._membership.learner.global_step
        self.rates[self.begins_at] = lr_scheduler.get_last_lr()[0]
        if self.held is None:
            self.said.set()

    def on_step_end(self, args, state, control, lr_scheduler=None, **kwargs):
        self.last = self.callback._membership.learner.global_step
        self.rates[self.last] = lr_scheduler.get_last_lr()[0]
        if state.global_step < (self.held or 0):
            threading.Event().wait(0.02)  # so that the syncer is told of nearly every step
        elif state.global_step == self.held:
            self.said.set()
            assert self.waits_for.wait(SECONDS)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("linear", {}),
        pytest.param("cosine", {}, marks=pytest.mark.long),
        pytest.param("cosine_with_restarts", {"num_cycles": 3}, marks=pytest.mark.long),
        ("warmup_stable_decay", {"num_decay_steps": 12}),
    ],
)
def test_who_joins_late_has_the_learning_rate_of_the_others_and_stops_with_them(run, request, tmp_path, kind, options):
    schedule = {"lr_scheduler_type": kind, "lr_scheduler_kwargs": options, "warmup_steps": 4, "max_steps": 40}
    arguments = {**schedule, "optim": "sgd"}  # without state there is nothing to take over from the one that waits
    whole = Recorder()
    make_trainer(tmp_path, whole, **arguments).train()
    expected = dict(enumerate([whole.first_rate, *whole.rates]))

    run, joined, ahead = run(finish_wait_seconds=SECONDS), threading.Event(), threading.Event()
    for event in (joined, ahead):
        request.addfinalizer(event.set)  # nobody waits any more
    first = Rates(0, hold_at=10, said=ahead, waits_for=joined)
    late = Rates(1, said=joined)
    trainers = [run.trainer(number, rates, **arguments) for number, rates in enumerate((first, late))]
    for trainer, rates in zip(trainers, (first, late), strict=True):
        rates.callback = next(one for one in trainer.callback_handler.callbacks if isinstance(one, DiLoCoCallback))
    begin = trainers[1].train

    def begin_late():
        assert ahead.wait(SECONDS)
        begin()

    trainers[1].train = begin_late
    run.train(*trainers)
    assert late.begins_at >= 5
    assert trainers[1].state.global_step < 35
    for rates in (first, late):
        assert rates.last == 40
        assert rates.rates == {step: expected[step] for step in rates.rates}
    assert len(set(late.rates.values())) > 3
    json.dumps(trainers[1].state.log_history)
