"""Wrong arguments are refused where they are given, with what was given and what to do."""

import contextlib
import dataclasses
import inspect
import os
import pathlib
import queue
import signal
import sys
import threading

import pytest
import torch
from accelerate import Accelerator
from accelerate.data_loader import skip_first_batches
from accelerate.state import AcceleratorState
from torch.utils.data import DataLoader
from trainers import make_data, make_model, make_trainer, plugin
from transformers import HfArgumentParser, Trainer, TrainerCallback, TrainingArguments, get_scheduler

from hf_diloco import DiLoCo, DiLoCoCallback, DiLoCoPlugin, SyncerConfig
from hf_diloco.core import messages as ms
from hf_diloco.errors import (
    ConfigError,
    DiLoCoError,
    LearnerRefusedError,
    MessageError,
    SyncerUnreachableError,
    UnsupportedError,
)
from hf_diloco.learner import joining
from hf_diloco.learner.exchange import Exchange
from hf_diloco.learner.preemption import Preemption
from hf_diloco.links.base import LinkUp
from hf_diloco.links.in_process import InProcessHub
from hf_diloco.links.rpc import RpcSyncerLinks
from hf_diloco.syncer.run_directory import RunDirectory
from hf_diloco.syncer.service import Syncer

pytestmark = pytest.mark.fast

SECONDS = 60


@pytest.fixture
def loop():
    """Accelerator, model and optimizer, prepared."""
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator, model = Accelerator(cpu=True), make_model()
    return accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.fixture
def start(tmp_path, request):
    """Starts a syncer in a thread."""

    def make(**settings):
        hub = InProcessHub()
        syncer = Syncer(SyncerConfig(num_fragments=2, sync_every=2, **settings), hub, RunDirectory(tmp_path / "run"))
        thread = threading.Thread(target=syncer.run, name="syncer")
        thread.start()
        request.addfinalizer(lambda: thread.join(SECONDS))
        request.addfinalizer(syncer.stop)
        return hub, thread

    return make


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"learner_id": "0"}, r"learner_id must be int or None, not '0' \(str\)"),
        ({"learner_id": True}, "learner_id must be int or None, not True"),
        ({"syncer": 29600}, "syncer must be str or None, not 29600"),
        ({"syncer": "http://host:29600"}, "is not an address; give host:port"),
        ({"syncer": "host"}, "is not an address; give host:port"),
        ({"join_timeout_seconds": "3"}, r"join_timeout_seconds must be float, not '3' \(str\)"),
        ({"lost_timeout_seconds": -1}, "lost_timeout_seconds=-1 is out of range"),
        ({"token": b"secret"}, "token must be str or None, not bytes"),
    ],
)
def test_a_plugin(given, said):
    with pytest.raises(ConfigError, match=said):
        DiLoCoPlugin(**{"syncer": "host:29600", "learner_id": 0, "token": "secret", **given})


def test_what_is_given_wins_over_the_environment(monkeypatch):
    for name, value in {"SYNCER": "host:1", "LEARNER_ID": "3", "JOIN_TIMEOUT_SECONDS": "5", "TOKEN": "secret"}.items():
        monkeypatch.setenv(f"HF_DILOCO_{name}", value)
    filled = DiLoCoPlugin()
    assert (filled.syncer, filled.learner_id, filled.join_timeout_seconds) == ("host:1", 3, 5.0)
    assert filled.lost_timeout_seconds == 600.0
    assert DiLoCoPlugin(join_timeout_seconds=60.0).join_timeout_seconds == 60.0, "the default, but given"
    alone = DiLoCoPlugin(syncer=None)
    assert alone.syncer is None
    assert repr(alone).startswith("DiLoCoPlugin(syncer=None, learner_id=3, token_file=None, num_shards=None, join_")
    assert dataclasses.replace(alone, learner_id=4).syncer is None
    assert "join_timeout_seconds: 'float' = 60.0" in str(inspect.signature(DiLoCoPlugin))


def test_a_path_is_as_good_as_its_name(tmp_path):
    assert DiLoCoPlugin(token_file=pathlib.Path(tmp_path)).token_file == str(tmp_path)


@pytest.mark.parametrize("given", [{"total_steps": "5000"}, {"sync_every": 2.5}, {"outer_lr": "0.7"}, {"merge": 1}])
def test_settings_of_the_wrong_type(given):
    with pytest.raises(ConfigError, match=f"{next(iter(given))} must be "):
        SyncerConfig(**given)


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"total_steps": "5000"}, TypeError, "total_steps must be a whole number of updates.*'5000'"),
        ({"total_steps": 2.5}, TypeError, r"not 2\.5"),
        ({"total_steps": 0}, ConfigError, "total_steps=0 is out of range"),
        ({"save_checkpoint": "dir"}, TypeError, "save_checkpoint must be a function, not 'dir'"),
        ({"plugin": "host:1"}, TypeError, "plugin must be a DiLoCoPlugin, not 'host:1'"),
        ({"plugin": SyncerConfig()}, TypeError, "not a SyncerConfig.*at the syncer"),
        ({"scheduler": [0.1]}, TypeError, "scheduler must be a learning rate scheduler, not a list"),
    ],
)
def test_a_loop(loop, given, error, said):
    with pytest.raises(error, match=said):
        DiLoCo(*loop, **{"plugin": plugin(), **given})


def test_several_optimizers(loop):
    accelerator, model, optimizer = loop
    with pytest.raises(TypeError, match=r"one optimizer, not a list.* Make one of all parameters"):
        DiLoCo(accelerator, model, [optimizer, optimizer], plugin=plugin())


def test_the_order_of_a_loops_arguments(loop):
    accelerator, model, optimizer = loop
    scheduler = accelerator.prepare(get_scheduler("constant", optimizer.optimizer))
    for wrong, name in [
        ((model, optimizer, accelerator), "accelerator"),
        ((accelerator, optimizer, model), "model"),
        ((accelerator, model, scheduler, optimizer), "optimizer"),
        ((accelerator, model, optimizer, optimizer), "scheduler"),
    ]:
        with pytest.raises(
            TypeError, match=rf"^{name} must be .* in this order: DiLoCo\(accelerator, model, optimizer"
        ):
            DiLoCo(*wrong, plugin=plugin())
    DiLoCo(accelerator, model, optimizer, scheduler, plugin=plugin(), link=object)


def test_a_dataloader_that_was_not_prepared(loop):
    accelerator, model, optimizer = loop
    loader = DataLoader(make_data(8), batch_size=2, shuffle=True)
    with pytest.raises(TypeError, match=r"as accelerator\.prepare gave it back, not a DataLoader"):
        DiLoCo(accelerator, model, optimizer, plugin=plugin(), dataloader=loader, link=object)
    prepared = accelerator.prepare(loader)
    for good in (prepared, skip_first_batches(prepared, 1)):
        DiLoCo(accelerator, model, optimizer, plugin=plugin(), dataloader=good, link=object)


def test_settings_on_a_command_line(monkeypatch):
    """As Hugging Face's scripts parse theirs: what is not given comes from the environment all the same."""
    monkeypatch.setenv("HF_DILOCO_DRAIN_SECONDS", "3")
    words = ["--learner_id", "1", "--token", "secret", "--join_timeout_seconds", "60"]
    (own,) = HfArgumentParser(DiLoCoPlugin).parse_args_into_dataclasses(words)
    assert own == DiLoCoPlugin(learner_id=1, token="secret", drain_seconds=3.0)
    (config,) = HfArgumentParser(SyncerConfig).parse_args_into_dataclasses(["--sync_every", "12"])
    assert config == SyncerConfig(sync_every=12)
    assert type("Own", (DiLoCoPlugin,), {})().drain_seconds == 3.0


def test_another_platform(loop, start, monkeypatch):
    hub, _ = start(total_steps=1)
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(UnsupportedError, match=r"on Linux only; this is darwin.*hf_diloco\.links\.in_process"):
        DiLoCo(*loop, plugin=plugin(0)).__enter__()
    with pytest.raises(UnsupportedError, match="on Linux only; this is darwin"):
        RpcSyncerLinks("127.0.0.1", 0, "secret")
    with DiLoCo(*loop, plugin=plugin(0), link=lambda: hub.connect(0)) as diloco:
        diloco.leave()


def test_a_callback(tmp_path, scripted):
    with pytest.raises(TypeError, match="plugin must be a DiLoCoPlugin, not 'host:1'"):
        DiLoCoCallback("host:1")
    with pytest.raises(ConfigError, match="2 DiLoCoCallbacks"):
        make_trainer(tmp_path, DiLoCoCallback(plugin(0)), DiLoCoCallback(plugin(1)))
    trainer = make_trainer(tmp_path, DiLoCoCallback(plugin(0)))
    trainer.callback_handler.callbacks.append(DiLoCoCallback(plugin(1)))
    with pytest.raises(ConfigError, match="2 DiLoCoCallbacks"):
        trainer.train()
    with pytest.raises(ConfigError, match="2 DiLoCoCallbacks"):
        DiLoCoCallback(plugin(0)).attach(make_trainer(tmp_path, DiLoCoCallback(plugin(0))))
    assert not scripted.instances
    make_trainer(tmp_path, DiLoCoCallback(), DiLoCoCallback(plugin(1)))  # one of them does nothing


def test_the_optimizer_of_another_model(loop, tmp_path, scripted):
    accelerator, model, _ = loop
    other = torch.optim.SGD(make_model().parameters(), lr=0.1)
    wrong = DiLoCo(accelerator, model, accelerator.prepare(other), plugin=plugin(), total_steps=3, link=object)
    with pytest.raises(ConfigError, match="none of the parameters of the optimizer"):
        wrong.__enter__()
    args = TrainingArguments(str(tmp_path), use_cpu=True, max_steps=2, report_to="none", disable_tqdm=True)
    trainer = Trainer(
        make_model(), args, train_dataset=make_data(8), optimizers=(other, None), callbacks=[DiLoCoCallback(plugin())]
    )
    with pytest.raises(ConfigError, match="none of the parameters of the optimizer"):
        trainer.train()


TWICE = r"this process is learner 2 of the run at localhost:29600 already.*one optimizer of all parameters"


def test_a_process_is_a_learner_only_once_at_a_time(loop, tmp_path, scripted):
    def diloco(own=None):
        return DiLoCo(*loop, plugin=own or plugin(), link=object)

    with diloco() as first:
        with pytest.raises(ConfigError, match=TWICE), diloco():
            pass
        with pytest.raises(ConfigError, match=TWICE):
            make_trainer(tmp_path, DiLoCoCallback(plugin(), link=object)).train()
        assert len(scripted.instances) == 1
        for other in (plugin(1), DiLoCoPlugin(syncer="localhost:29700", learner_id=2, token="secret")):
            with diloco(other):
                pass
        first.leave()
        with diloco():
            pass
    with diloco():
        pass
    assert [one.calls[-1] for one in scripted.instances] == ["close"] * 5


class Trains(TrainerCallback):
    """Another model, at the first step."""

    def __init__(self, other):
        self.other = other

    def on_step_end(self, args, state, control, **kwargs):
        self.other.train()


def test_a_trainer_within_a_trainer(tmp_path, scripted):
    inner = make_trainer(tmp_path, DiLoCoCallback(plugin(), link=object))
    outer = make_trainer(tmp_path, DiLoCoCallback(plugin(), link=object), Trains(inner))
    with pytest.raises(ConfigError, match=TWICE):
        outer.train()
    inner.train()  # the other one, still there, has raised
    assert [one.calls for one in scripted.instances] == [["join", "close"], ["join", "finish", "close"]]


def test_masters_in_fp32_of_a_model_in_bf16_are_not_refused(loop, scripted):
    accelerator, _, _ = loop
    model = make_model().to(torch.bfloat16)
    masters = torch.optim.SGD([parameter.detach().float() for parameter in model.parameters()], lr=0.1)
    with pytest.warns(UserWarning, match="bfloat16"), DiLoCo(accelerator, model, masters, plugin=plugin(), link=object):
        pass
    assert scripted.instances


def test_a_loop_without_the_block(loop):
    diloco = DiLoCo(*loop, plugin=plugin(), link=object)
    with pytest.raises(DiLoCoError, match="`with DiLoCo"):
        diloco.step()
    assert DiLoCo(*loop).step()


def test_a_run_whose_length_nobody_says(loop, start):
    hub, _ = start()
    with pytest.raises(LearnerRefusedError, match=r"DiLoCo\(\.\.\., total_steps=.*max_steps in.*--total-steps"):
        DiLoCo(*loop, plugin=plugin(0), link=lambda: hub.connect(0)).__enter__()


def test_joining_again_when_the_run_has_ended(loop, start, monkeypatch):
    hub, syncer_thread = start(total_steps=1)
    monkeypatch.setattr(joining, "_AFTER_THE_END_SECONDS", 0.5)
    accelerator, model, optimizer = loop
    diloco = DiLoCo(accelerator, model, optimizer, plugin=plugin(0), link=lambda: hub.connect(0))
    with diloco:
        ids = torch.ones(1, 4, dtype=torch.long)
        accelerator.backward(model(input_ids=ids, labels=ids).loss)
        optimizer.step()
        assert not diloco.step()
    syncer_thread.join(SECONDS)
    assert diloco.holds_global
    with pytest.raises(SyncerUnreachableError, match=r"the run at localhost:29600 has ended.*unset HF_DILOCO_SYNCER"):
        diloco.__enter__()


def test_a_malformed_hello_is_not_said_again_and_again():
    class Link:
        """Comes up once."""

        def __init__(self):
            self.sent, self.events = [], queue.SimpleQueue()
            self.events.put(LinkUp(0))

        def open(self):
            pass

        def receive(self, timeout_seconds):
            with contextlib.suppress(queue.Empty):
                return self.events.get(timeout=timeout_seconds)

        def send(self, message, payload=None):
            self.sent.append(message)

        def close(self, *, drain_seconds=0.0):
            pass

    hello = ms.Hello(
        incarnation="a", host="h", shapes=(), averaged=(), constants_digest="", total_steps="5000", num_shards=None,
        library_version="0", global_step=0, held=(),
    )  # fmt: skip
    link = Link()
    exchange = Exchange(0, "a", link, hello=lambda: hello, make_layout=lambda _: pytest.fail("no run"))
    exchange.open()
    try:
        with exchange.changed:
            assert exchange.changed.wait_for(lambda: exchange.fatal, SECONDS)
        with pytest.raises(MessageError, match=r"Hello\.total_steps must be int"):
            exchange.check()
    finally:
        exchange.close()
    assert not link.sent


def test_sigterm_after_a_training_that_raised_and_in_one_that_goes_on():
    """The first one's handler stays, for nobody told it that training had ended; the second one's calls it."""
    heard = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    raised, goes_on = Preemption(lambda frame: False), Preemption(lambda frame: True)
    try:
        raised.watch()
        goes_on.watch()
        os.kill(os.getpid(), signal.SIGTERM)
        assert goes_on.reason == "SIGTERM"
        assert raised.reason is None
        assert heard == [signal.SIGTERM]
        raised.end()
        goes_on.end()
        os.kill(os.getpid(), signal.SIGTERM)  # the first one's handler is the one that stays
        assert heard == [signal.SIGTERM] * 2
    finally:
        raised.end()
        goes_on.end()
        signal.signal(signal.SIGTERM, before)
