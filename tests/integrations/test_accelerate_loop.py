"""DiLoCo in real Accelerate loops, each a learner of a real run: links inside the process."""

import logging
import os
import signal
import threading
from pathlib import Path

import datasets
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DataLoaderConfiguration
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.nn.functional import softplus
from torch.utils.data import DataLoader
from trainers import make_data, make_model, plugin
from transformers import default_data_collator, get_scheduler

from hf_diloco import DiLoCo, SyncerConfig
from hf_diloco.errors import DiLoCoError, DiLoCoWarning, UnsupportedError
from hf_diloco.learner.data import shard_dataset
from hf_diloco.learner.lease import lease_of
from hf_diloco.links.in_process import InProcessHub
from hf_diloco.syncer.run_directory import RunDirectory
from hf_diloco.syncer.service import Syncer
from hf_diloco.syncer.tape import read_tape

pytestmark = pytest.mark.fast

SECONDS = 60


class Run:
    """A syncer in a thread."""

    def __init__(self, path, **settings):
        self.directory, self.hub = RunDirectory(path / "run"), InProcessHub()
        config = SyncerConfig(**{"num_fragments": 3, "sync_every": 6, **settings})
        self.syncer = Syncer(config, self.hub, self.directory)
        self.thread = threading.Thread(target=self.syncer.run, name="syncer")
        self.thread.start()

    def over(self):
        self.thread.join(SECONDS)
        return not self.thread.is_alive()

    def model(self):
        return self.syncer.model()[0]

    def account(self):
        return self.syncer.status()["learners"][0]

    def lines(self, kind):
        return [line for line in read_tape(self.directory.tape) if line["kind"] == kind]


class Loop:
    """What a script prepares; ``train`` is its loop. Without a run it trains by itself."""

    def __init__(
        self,
        run=None,
        *,
        learner_id=0,
        accumulate=1,
        max_steps=30,
        own_order=False,
        compiled=False,
        logs=None,
        checkpoint=None,
        data=None,
        **options,
    ):
        AcceleratorState._reset_state(reset_partial_state=True)
        self.accelerator = Accelerator(
            cpu=True,
            dynamo_backend="eager" if compiled else None,
            gradient_accumulation_steps=accumulate,
            dataloader_config=DataLoaderConfiguration(
                use_seedable_sampler=own_order, data_seed=1 if own_order else None
            ),
            log_with="tensorboard" if logs else None,
            project_dir=logs,
        )
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        scheduler = get_scheduler("cosine", optimizer, num_warmup_steps=4, num_training_steps=max_steps)
        self.start = flat(model.named_parameters())
        loader = DataLoader(data or make_data(), batch_size=4, shuffle=own_order, collate_fn=default_data_collator)
        self.model, self.optimizer, self.scheduler, self.loader = self.accelerator.prepare(
            model, optimizer, scheduler, loader
        )
        self.updates, self.rates, self.batches, self.num_tokens = 0, [], [], 0
        self.optimizer.optimizer.register_step_post_hook(self.count)
        if run:
            options |= {"plugin": plugin(learner_id), "link": lambda: run.hub.connect(learner_id)}
        if own_order:
            options["dataloader"] = self.loader
        if checkpoint:
            options["save_checkpoint"] = lambda: self.accelerator.save_state(checkpoint)
        self.diloco = DiLoCo(self.accelerator, self.model, self.optimizer, self.scheduler, **options)

    def count(self, *_):
        self.updates += 1

    def micro_batches(self):
        while True:
            yield from self.loader

    def train(self, micro_batches, at=None):
        """At most so many; returns what the last ``diloco.step()`` said. ``at`` is called before each."""
        goes_on = True
        with self.diloco as diloco:
            for _, batch in zip(range(micro_batches), self.micro_batches(), strict=False):
                with self.accelerator.accumulate(self.model):
                    loss = self.model(**batch).loss
                    self.accelerator.backward(loss)
                    self.optimizer.step()
                    self.scheduler.step()
                    self.optimizer.zero_grad()
                self.batches.append(batch["input_ids"])
                self.num_tokens += int(batch["attention_mask"].sum())
                if at:
                    at(self)
                goes_on = diloco.step(loss.item())
                self.rates.append(self.scheduler.get_last_lr()[0])
                if not goes_on:
                    break
        return goes_on

    def holds(self, values):
        return all(torch.equal(parameter, values[name]) for name, parameter in self.model.named_parameters())


def flat(named):
    return torch.cat([parameter.detach().flatten().double() for _, parameter in named])


@pytest.fixture
def start(tmp_path, request):
    def make(name="a", **settings):
        (tmp_path / name).mkdir()
        run = Run(tmp_path / name, **settings)
        request.addfinalizer(run.over)
        request.addfinalizer(run.syncer.stop)
        return run

    return make


# ---------------------------------------------------------------------------------------------------------- whole runs


@pytest.mark.parametrize("on_arrival", ["carry", "overwrite"])
def test_one_learner_alone_is_the_plain_loop(start, tmp_path, on_arrival):
    """And with ``overwrite`` it is not: the steps that are lost then are seen by the same comparison."""
    steps, micro_batches = 60, 120
    options = {"accumulate": 2, "max_steps": steps}
    plain = Loop(**options)
    assert plain.train(micro_batches)
    run = start(
        outer_lr=1.0, outer_momentum=0.0, wire_format="fp32", on_arrival=on_arrival, total_steps=steps, sync_every=3
    )
    loop = Loop(run, logs=str(tmp_path / "logs"), **options)
    loop.accelerator.init_trackers("loop")

    def log(loop):
        loop.accelerator.log(loop.diloco.metrics(), step=loop.updates)

    assert not loop.train(10 * micro_batches, at=log)
    log(loop)
    loop.accelerator.end_training()
    assert run.over()
    assert loop.diloco.holds_global
    assert loop.holds(run.model())
    assert loop.diloco.global_step == 60
    assert not loop.diloco.step(), "nothing more to do"

    movement = flat(plain.model.named_parameters()) - plain.start
    distance = float((flat(loop.model.named_parameters()) - flat(plain.model.named_parameters())).norm())
    if on_arrival == "overwrite":
        assert distance > 1e-2 * float(movement.norm())
        return
    assert distance <= 1e-4 * float(movement.norm())
    assert loop.rates == plain.rates
    assert loop.updates == plain.updates == run.account()["steps"] == 60
    assert min(len([line for line in run.lines("round") if line["fragment_index"] == i]) for i in range(3)) >= 3

    account = run.account()
    assert account["tokens_trained"] == loop.num_tokens
    assert account["tokens_merged"] == pytest.approx(loop.num_tokens, abs=1)
    (file,) = Path(tmp_path / "logs").rglob("events.out.tfevents.*")
    events = EventAccumulator(str(file))
    events.Reload()
    goodput = events.Scalars("diloco/goodput")
    assert (goodput[-1].step, goodput[-1].value) == (60, pytest.approx(1.0, abs=1e-3))
    assert [event.value for event in events.Scalars("diloco/participants")][-1] == 1


def test_a_compiled_model(start):
    run = start(total_steps=10)
    loop = Loop(run, compiled=True)
    assert not loop.train(100)
    assert run.over()
    assert all(torch.equal(p, run.model()[name]) for name, p in loop.model._orig_mod.named_parameters())
    assert run.account()["tokens_trained"] == loop.num_tokens


def test_gradients_accumulated_by_hand(start):
    """The optimizer steps with every third batch, and Accelerate is not told; ``diloco.step()`` comes with each."""
    run = start()
    loop = Loop(run, total_steps=10)
    with loop.diloco as diloco:
        for number, batch in enumerate(loop.micro_batches(), 1):
            loop.accelerator.backward(loop.model(**batch).loss / 3)
            loop.num_tokens += int(batch["attention_mask"].sum())
            if number % 3 == 0:
                loop.optimizer.step()
                loop.scheduler.step()
                loop.optimizer.zero_grad()
            if not diloco.step():
                break
    assert run.over()
    assert loop.holds(run.model())
    assert loop.updates <= 10
    assert number == 3 * loop.updates
    account = run.account()
    assert (account["steps"], account["tokens_trained"]) == (loop.updates, loop.num_tokens)


def test_when_the_data_runs_out_it_waits_for_the_end_of_the_run(start):
    run = start(finish_wait_seconds=0.1)
    loop = Loop(run, total_steps=1000)
    with pytest.warns(DiLoCoWarning, match=r"learner 0 has ended by itself at step 12 of 1000 .*max_steps=1000"):
        assert loop.train(12)
    assert run.over()
    assert loop.diloco.holds_global
    assert loop.holds(run.model())


def test_early_stopping(start):
    run = start()
    loop = Loop(run, total_steps=1000)

    def stop(loop):
        if loop.updates == 12:
            loop.diloco.leave()

    assert not loop.train(100, at=stop)
    assert run.over(), "all have left for good"
    assert loop.updates == 12
    assert not loop.diloco.holds_global
    assert loop.diloco.metrics()["diloco/goodput"] == pytest.approx(1.0, abs=0.1)
    assert run.lines("leave")[0]["reason"] == "training ended early at this learner"


@pytest.mark.parametrize("error", [ValueError("a mistake"), KeyboardInterrupt()], ids=["mistake", "interrupted cell"])
def test_training_again_after(start, error):
    run = start(total_steps=20)
    loop = Loop(run, max_steps=20)
    hooks = len(loop.model._forward_pre_hooks)

    def fail(loop):
        if loop.updates == 8:
            raise error

    with pytest.raises(type(error)):
        loop.train(100, at=fail)
    assert not loop.diloco.step()
    assert not loop.train(100)
    assert run.over()
    assert len(run.lines("join")) == 2
    assert loop.updates < 8 + 20, "the clock of the run went on"
    assert loop.holds(run.model())
    assert loop.rates[-1] == pytest.approx(0.0, abs=1e-9), "the learning rate too: cosine, to its end"
    assert len(loop.model._forward_pre_hooks) == hooks


# --------------------------------------------------------------------------------------------------- preemption, resume


@pytest.mark.parametrize(("accumulate", "batch"), [(1, 8), (2, 15)], ids=["at an update", "before the update"])
def test_preempted_saved_and_resumed(start, tmp_path, accumulate, batch):
    run = start(total_steps=40)
    checkpoint = str(tmp_path / "checkpoint")
    loop = Loop(run, max_steps=40, own_order=True, checkpoint=checkpoint, accumulate=accumulate)

    def preempt(loop):
        if len(loop.batches) == batch:
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        with pytest.raises(SystemExit) as raised:
            loop.train(100, at=preempt)
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)
    assert raised.value.code == 0
    assert (loop.updates, len(loop.batches)) == (8, 8 * accumulate), "what is accumulated goes into an update"
    assert run.lines("leave")[0]["reason"] == "told to stop (SIGTERM)"
    assert run.account()["tokens_merged"] == pytest.approx(loop.num_tokens, abs=1), "it was merged before it left"

    again = Loop(run, max_steps=40, own_order=True, accumulate=accumulate)
    again.accelerator.load_state(checkpoint)
    assert not again.train(100)
    assert run.over()
    assert again.holds(run.model())
    assert all(map(torch.equal, loop.batches, again.batches)), "in the order that it had begun with"
    (state,) = [line for line in run.lines("state") if line["learner_id"] == 0 and line["reason"] == ""][-1:]
    assert state["source"] == "own"


def test_the_order_of_the_data_is_the_learners_own(start):
    orders = []
    for learner_id in (0, 1, 0):
        run = start(f"{learner_id} {len(orders)}", total_steps=5)
        torch.manual_seed(3)
        loop = Loop(run, learner_id=learner_id, own_order=True)
        loop.train(5)
        orders.append(torch.cat(loop.batches[:5]))
    assert torch.equal(orders[0], orders[2])
    assert not torch.equal(orders[0], orders[1])


# -------------------------------------------------------------------------------------------- without a run, and misuse


def test_each_pass_over_a_stream_reads_the_shard_that_is_leased(start, tmp_path):
    rows = [{name: [3 + row // 8, 3 + row] for name in ("input_ids", "labels", "attention_mask")} for row in range(24)]
    stream = datasets.Dataset.from_list(rows).to_iterable_dataset(num_shards=3)
    run = start()
    loop = Loop(run, max_steps=20, total_steps=20, data=shard_dataset(stream, num_shards=3, plugin=plugin(0)))
    assert not loop.train(100)  # two steps a pass
    assert run.over()
    assert [int(ids[0, 0]) - 3 for ids in loop.batches[::2]] == [0, 1, 2, 0, 1, 2, 0, 1, 2, 0]
    assert [int(ids[0, 0]) - 3 for ids in loop.batches[1::2]] == [0, 1, 2, 0, 1, 2, 0, 1, 2, 0]
    state = loop.diloco.state_dict()
    assert state["shard"] == lease_of(plugin(0)).shard
    lease_of(plugin(0)).move(2)
    loop.diloco.load_state_dict({**state, "shard": 1})
    assert lease_of(plugin(0)).shard == 1


@pytest.mark.parametrize("accumulate", [1, 4])
def test_each_pass_over_a_table_reads_the_shard_that_is_leased(start, tmp_path, accumulate):
    rows = [{name: [3 + row // 12, 3 + row] for name in ("input_ids", "labels", "attention_mask")} for row in range(36)]
    run = start(total_steps=12 // accumulate)
    data = shard_dataset(datasets.Dataset.from_list(rows), num_shards=3, plugin=plugin(0))
    loop = Loop(run, accumulate=accumulate, data=data, own_order=True)
    assert not loop.train(100)  # three batches a pass, of which accelerate's last is always an update
    assert run.over()
    shards = [{int(number) - 3 for number in ids[:, 0]} for ids in loop.batches]
    passes = [0, 1, 2, 0] if accumulate == 1 else [0, 1, 2]
    assert shards == [{shard} for shard in passes for _ in range(3)]
    assert len({int(number) for ids in loop.batches[:9] for number in ids[:, 1]}) == 36


def test_without_a_syncer_nothing_happens_and_it_is_said_once(caplog, tmp_path):
    with caplog.at_level(logging.INFO, "hf_diloco"):
        loop = Loop()
        assert loop.train(20)
        assert loop.train(5)
    assert [record.message for record in caplog.records if record.name.startswith("hf_diloco")] == [
        "hf-diloco is off: no syncer address (HF_DILOCO_SYNCER); training goes on without it."
    ]
    assert loop.diloco.metrics() == {}
    assert loop.diloco.learner_id is None
    loop.accelerator.save_state(str(tmp_path / "saved"))
    loop.accelerator.load_state(str(tmp_path / "saved"))


def test_a_scheduler_that_comes_too_late_is_warned_about(start):
    run = start(total_steps=3)
    loop = Loop(run)
    with loop.diloco as diloco:
        loop.accelerator.backward(loop.model(**next(iter(loop.loader))).loss)
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        with pytest.warns(DiLoCoWarning, match="did not step with the first update"):
            diloco.step()
        diloco.leave()


def test_a_model_that_is_left_in_evaluation_mode_is_merged_all_the_same(start):
    run = start(total_steps=12)
    loop = Loop(run)
    loop.model.eval()
    loop.train(12)
    assert run.over()
    assert run.account()["tokens_merged"] == run.account()["tokens_trained"] > 0


class Gan(torch.nn.Module):
    """Two models in one."""

    def __init__(self):
        super().__init__()
        self.generator, self.critic = torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)

    def forward(self, noise, real=None):
        made = self.generator(noise)
        if real is None:
            return softplus(-self.critic(made)).mean()
        return (softplus(-self.critic(real)) + softplus(self.critic(made.detach()))).mean()


def test_two_models_in_one_module_with_one_optimizer(start):
    run = start(total_steps=12)
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator, model = Accelerator(cpu=True), Gan()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    before, updates, goes_on = [one.detach().clone() for one in model.parameters()], 0, True
    with DiLoCo(accelerator, model, optimizer, plugin=plugin(0), link=lambda: run.hub.connect(0)) as diloco:
        while goes_on:
            part, real = (model.generator, None) if updates % 2 else (model.critic, torch.randn(8, 8))
            other = model.critic if updates % 2 else model.generator
            kept = [one.detach().clone() for one in other.parameters()]
            accelerator.backward(model(torch.randn(8, 4), real), inputs=list(part.parameters()))
            optimizer.step()
            optimizer.zero_grad()
            updates += 1
            assert all(map(torch.equal, kept, other.parameters()))
            goes_on = diloco.step()
    assert updates == 12
    assert run.over()
    assert run.account()["tokens_merged"] == 12 * 8 * 4
    assert not any(map(torch.equal, before, model.parameters()))
    assert all(torch.equal(value, run.model()[name]) for name, value in model.named_parameters())


class Forward:
    """A model of which only the forward method is called."""

    def __init__(self, model):
        self.forward = model.forward

    def __call__(self, **batch):
        return self.forward(**batch)


@pytest.mark.parametrize("counted", [0, 12])
def test_updates_without_tokens_would_be_lost_and_are_an_error(start, counted):
    """From the start, or from some step on."""
    loop = Loop(start(total_steps=1000, link_timeout_seconds=1))
    model, loop.model = loop.model, loop.model if counted else Forward(loop.model)

    def change(loop):
        if loop.updates == counted:
            loop.model = Forward(model)

    with pytest.raises(UnsupportedError, match=r"no tokens were counted in 10 updates.*model\(\*\*batch\)"):
        loop.train(1000, at=change)
    assert loop.updates == counted + 10


def test_what_is_unfrozen_in_mid_run_is_named(start):
    loop = Loop(start(total_steps=1000, link_timeout_seconds=1))
    loop.model.lm_head.requires_grad_(False)
    loop.model.model.norm.requires_grad_(False)

    def unfreeze(loop):
        if loop.updates == 5:
            loop.model.requires_grad_(True)

    with pytest.raises(UnsupportedError, match=r"'model\.norm\.weight' was frozen .*1 others"):
        loop.train(1000, at=unfreeze)
    assert loop.updates == 5


def test_a_cell_of_a_notebook_that_runs_again(tmp_path):
    loop = Loop()
    again = DiLoCo(loop.accelerator, loop.model, loop.optimizer)
    assert loop.accelerator._custom_objects == [again]


def test_state_is_loaded_before_joining(start, tmp_path):
    run = start(total_steps=3)
    loop = Loop(run)
    loop.accelerator.save_state(str(tmp_path / "saved"))
    with pytest.raises(DiLoCoError, match="before the `with`"), loop.diloco:
        loop.accelerator.load_state(str(tmp_path / "saved"))
