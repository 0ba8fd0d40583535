"""Trainers that come back in mid-run: with their own checkpoint, or with the state of a peer."""

import threading

import peft
import pytest
import torch
from test_transformers_run import Run
from trainers import callback, make_model
from transformers import MixtralConfig, MixtralForCausalLM, TrainerCallback

from hf_diloco import last_checkpoint
from hf_diloco.core.codec import digest

pytestmark = [
    pytest.mark.fast,
    pytest.mark.filterwarnings("ignore:training ended early:hf_diloco.errors.DiLoCoWarning"),  # how the tests end
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # PEFT's
]

SECONDS = 60
STEPS = 1000  # of the run; nobody gets there


class Dies(TrainerCallback):
    """Raises after a step, as if the process had ended there: nobody takes leave."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise RuntimeError("killed")


class LeavesWhen(TrainerCallback):
    def __init__(self, event):
        self.event = event

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = control.should_training_stop or self.event.is_set()
        threading.Event().wait(0.002)


class AtStart(TrainerCallback):
    """Remembers what a Trainer begins with, after DiLoCoCallback has joined the run."""

    def on_train_begin(self, args, state, control, optimizer=None, lr_scheduler=None, **kwargs):
        self.state = {index: dict(entry) for index, entry in optimizer.state_dict()["state"].items()}
        self.state = {index: {key: value.clone() for key, value in one.items()} for index, one in self.state.items()}
        self.rate, self.trainer_step = lr_scheduler.get_last_lr()[0], state.global_step
        learner = self.callback._membership.learner
        self.global_step = learner.global_step
        self.held = {  # digests of what is in the model, by fragment and version
            (index, local.version.outer_step): digest(learner._parameters.read(local.fragment).result())
            for index, local in enumerate(learner._exchange.fragments)
        }


class RejoinRun(Run):
    """Two learners, of which the second one has died.

    All Trainers are made before the first one trains: making one resets what Accelerate keeps for the process.
    """

    def __init__(self, tmp_path, model=make_model, **arguments):
        super().__init__(tmp_path, expected_learners=2)
        self.model, self.over, self.stepped, self.threads = model, threading.Event(), threading.Event(), []
        self.arguments = {"max_steps": STEPS, "save_strategy": "steps", "save_steps": 4, **arguments}
        self.began = AtStart()
        other = self.trainer(0, LeavesWhen(self.over), save_strategy="no")
        self.first = self.trainer(1, Dies(10))
        self.again = self.trainer(1, self.began, Tells(self.stepped), LeavesWhen(self.over))
        self.began.callback = callback(self.again)
        self.thread.start()
        self.begin(other)
        with pytest.raises(RuntimeError, match="killed"):
            self.first.train()
        callback(self.first)._end()

    def trainer(self, learner_id, *callbacks, **arguments):
        trainer = super().trainer(learner_id, *callbacks, **{**self.arguments, **arguments})
        trainer.model = trainer.model_wrapped = self.model(learner_id)
        return trainer

    def begin(self, trainer, **options):
        def body():
            try:
                trainer.train(**options)
            except BaseException as error:
                self.errors.append(error)
                self.stepped.set()

        self.threads.append(threading.Thread(target=body, daemon=True))
        self.threads[-1].start()

    def rejoin(self, **options):
        """The second learner in a new Trainer; returns what it began with."""
        self.begin(self.again, **options)
        assert self.stepped.wait(SECONDS)
        self.over.set()
        for thread in (*self.threads, self.thread):
            thread.join(SECONDS)
            assert not self.errors, self.errors
            assert not thread.is_alive(), thread
        return self.began


class Tells(TrainerCallback):
    def __init__(self, event):
        self.event = event

    def on_step_end(self, args, state, control, **kwargs):
        self.event.set()


@pytest.fixture
def start(tmp_path, request):
    def make(**options):
        run = RejoinRun(tmp_path, **options)
        request.addfinalizer(run.end)
        request.addfinalizer(run.over.set)
        return run

    return make


def mixtral(seed):
    """One of the models whose parameters have other names in files: Trainer's resume does not restore its experts."""
    torch.manual_seed(seed)
    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2, num_local_experts=2, max_position_embeddings=32,
        )
    )  # fmt: skip


def lora(seed):
    """An adapter on a base model that all learners have."""
    base = make_model(0)
    torch.manual_seed(seed)
    return peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj", "v_proj"]))


@pytest.mark.parametrize(
    ("model", "by_path"), [(make_model, False), (mixtral, True), (lora, False)], ids=["llama", "mixtral", "lora"]
)
def test_its_own_checkpoint_gives_the_state_and_the_syncer_the_values(start, model, by_path, caplog):
    run = start(model=model)
    checkpoint = last_checkpoint(run.first.args.output_dir)
    assert checkpoint.endswith("out/learner-1/checkpoint-8")
    with caplog.at_level("INFO", "hf_diloco"):
        began = run.rejoin(resume_from_checkpoint=checkpoint if by_path else True)
    (line,) = run.lines("state")
    assert (line["learner_id"], line["source"], line["reason"]) == (1, "own", "")
    assert "[learner 1] state of the inner optimizer: its own" in caplog.text

    saved = torch.load(f"{checkpoint}/optimizer.pt")["state"]
    assert began.state.keys() == saved.keys()
    for index, entry in saved.items():
        assert all(torch.equal(began.state[index][key], value) for key, value in entry.items())
    assert began.trainer_step == 8

    published = {(index, 0): digest for index, digest in enumerate(run.lines("values")[0]["digests"])}
    for round in run.lines("round"):
        published[round["fragment_index"], round["version"][1]] = round["digest"]
    assert began.held == {place: published[place] for place in began.held}
    assert len(began.held) == 3
    assert began.rate == pytest.approx(1e-3 * (1 - began.global_step / STEPS), rel=1e-12)


def test_without_a_checkpoint_the_peer_gives_the_state(start):
    run = start(save_strategy="no")
    began = run.rejoin()
    (line,) = run.lines("state")
    assert (line["learner_id"], line["source"], line["donor_ids"]) == (1, "peer", [0])
    steps = {float(entry["step"]) for entry in began.state.values()}
    assert min(steps) >= 10
    assert began.trainer_step == 0


def test_resuming_without_anything_to_resume_says_where_it_looked(start, tmp_path):
    run = start(save_strategy="no")
    again = run.again
    with pytest.raises(ValueError, match=r"No valid checkpoint found in output directory \(.*out/learner-1\)"):
        again.train(resume_from_checkpoint=True)
    assert last_checkpoint(again.args.output_dir) is None
    assert len(run.lines("join")) == 2
    run.rejoin(resume_from_checkpoint=last_checkpoint(again.args.output_dir))


def test_a_checkpoint_without_optimizer_is_as_none(start):
    run = start(save_only_model=True)
    run.rejoin(resume_from_checkpoint=True)
    (line,) = run.lines("state")
    assert (line["source"], line["donor_ids"]) == ("peer", [0])
