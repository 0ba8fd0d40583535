"""Trainers as learners of a real run: the real learner and syncer, joined by links inside the process."""

import json
import threading
import time
import warnings

import pytest
import torch
from safetensors.torch import load_file
from trainers import make_model, make_trainer, plugin
from transformers import TrainerCallback

from hf_diloco.config import SyncerConfig
from hf_diloco.errors import DiLoCoError
from hf_diloco.integrations.transformers import DiLoCoCallback
from hf_diloco.links.base import LinkDown
from hf_diloco.links.in_process import InProcessHub
from hf_diloco.syncer.run_directory import RunDirectory
from hf_diloco.syncer.service import Syncer
from hf_diloco.syncer.tape import read_tape

pytestmark = pytest.mark.fast

SECONDS = 240.0  # of patience: on a machine with other work every step takes its time


class Run:
    """A syncer in a thread; learners are Trainers in threads."""

    def __init__(self, tmp_path, **settings):
        self.path, self.hub = tmp_path, InProcessHub()
        self.directory = RunDirectory(tmp_path / "run")
        self.syncer = Syncer(SyncerConfig(num_fragments=3, sync_every=3, **settings), self.hub, self.directory)
        self.thread = threading.Thread(target=self.syncer.run, name="syncer", daemon=True)
        self.errors, self.threads = [], []

    def trainer(self, learner_id, *callbacks, **arguments):
        callback = DiLoCoCallback(plugin(learner_id), link=lambda: self.hub.connect(learner_id))
        return make_trainer(self.path, callback, *callbacks, model=make_model(learner_id), **arguments)

    def train(self, *trainers):
        def body(trainer):
            try:
                trainer.train()
            except BaseException as error:
                self.errors.append(error)

        self.threads += [threading.Thread(target=body, args=(trainer,), daemon=True) for trainer in trainers]
        deadline = time.monotonic() + SECONDS
        for thread in (self.thread, *self.threads):
            thread.start()
        for thread in (*self.threads, self.thread):
            thread.join(max(deadline - time.monotonic(), 0.0))
            assert not thread.is_alive(), (thread, self.errors)
        assert not self.errors, self.errors

    def end(self):
        """Nothing goes on when the test has failed: learners fail where they wait, or at their next step."""
        self.syncer.stop()
        with self.hub._changed:
            for link in self.hub._ends:
                error = DiLoCoError("the test is over")
                link._inbox.put(LinkDown(link.learner_id, str(error), fatal=error))
        for thread in (*self.threads, self.thread):
            if thread.ident is not None:
                thread.join(30)

    def lines(self, kind):
        return [line for line in read_tape(self.directory.tape) if line["kind"] == kind]


@pytest.fixture
def run(tmp_path, request):
    def make(**settings):
        run = Run(tmp_path, **settings)
        request.addfinalizer(run.end)
        return run

    return make


def test_two_trainers_end_with_the_model_of_the_syncer(run):
    run = run(expected_learners=2)
    first, second = (run.trainer(learner_id, max_steps=30) for learner_id in (0, 1))
    run.train(first, second)
    values, _, files = run.syncer.model()
    for trainer in (first, second):
        for name, parameter in trainer.model.named_parameters():
            assert torch.equal(parameter, values[name]), name
        trainer.save_model()
        saved = load_file(f"{trainer.args.output_dir}/model.safetensors")
        assert saved.keys() == values.keys()
        assert all(torch.equal(saved[name], values[name]) for name in values)
    assert any(len(line["participants"]) == 2 for line in run.lines("round"))
    assert json.loads(files["config.json"])["architectures"] == ["LlamaForCausalLM"]
    assert first.args.output_dir != second.args.output_dir


@pytest.mark.filterwarnings("ignore:training ended early at this learner")
def test_a_learner_that_stops_early_leaves_and_the_other_goes_on(run):
    class StopAt(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 5:
                control.should_training_stop = True

    run = run(expected_learners=2)
    first, second = run.trainer(0, StopAt(), max_steps=30), run.trainer(1, max_steps=30)
    run.train(first, second)
    assert first.state.global_step == 5
    values, _, _ = run.syncer.model()
    assert all(torch.equal(parameter, values[name]) for name, parameter in second.model.named_parameters())
    assert not all(torch.equal(parameter, values[name]) for name, parameter in first.model.named_parameters())
    reasons = [line["reason"] for line in run.lines("leave") if line["learner_id"] == 0]
    assert "training ended early at this learner" in reasons
    row = run.syncer.status()["learners"][0]
    assert row["tokens_merged"] == pytest.approx(row["tokens_trained"], abs=1)
    assert row["tokens_trained"] > 0


def test_merged_tokens_are_trained_tokens(run):
    run = run()
    trainer = run.trainer(0, max_steps=30, include_num_input_tokens_seen="non_padding")
    run.train(trainer)
    (row,) = run.syncer.status()["learners"]
    assert row["tokens_trained"] == trainer.state.num_input_tokens_seen
    assert row["tokens_merged"] == pytest.approx(row["tokens_trained"], abs=1)


def test_no_warnings_reach_a_user_who_did_nothing_wrong(run):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = run()
        run.train(run.trainer(0, warmup_steps=2))
