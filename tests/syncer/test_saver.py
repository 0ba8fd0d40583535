"""When a checkpoint is written, when the next one is due, and what happens if it cannot be written."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from hf_diloco import SyncerConfig
from hf_diloco.core import messages as ms
from hf_diloco.errors import DiLoCoError
from hf_diloco.syncer import saver as saver_module
from hf_diloco.syncer.roster import Terms
from hf_diloco.syncer.run_directory import RunDirectory
from hf_diloco.syncer.saved_run import Facts
from hf_diloco.syncer.saver import Saver
from hf_diloco.syncer.state import GlobalState
from hf_diloco.syncer.supply import Supply
from hf_diloco.syncer.tape import Tape, read_tape

pytestmark = pytest.mark.fast


class Syncer:
    """What a saver writes down, and where."""

    def __init__(self, path, *, frozen_values: int = 1, **settings) -> None:
        hello = ms.Hello(
            incarnation="a", host="h", shapes=(("w", (8, 4)),), averaged=(), constants_digest="x", total_steps=100,
            num_shards=None, library_version="1", global_step=0, held=(),
        )  # fmt: skip
        self.directory = RunDirectory(path)
        self.stopping = threading.Event()
        self.tape = Tape(self.directory.tape, self.stopping)
        terms = Terms.from_first(SyncerConfig(num_fragments=2, **settings), 0, hello)
        supply = Supply()
        supply.restore({"frozen": torch.zeros(frozen_values)}, {}, ())
        self.saver = Saver(self.directory, terms, GlobalState(terms.layout, terms.config), supply)

    def save(self, outer_step: int, **learner_checkpoints: str) -> None:
        self.saver.begin(facts(outer_step, **learner_checkpoints))
        self.saver.result(wait=True)

    def on_disk(self) -> list[str]:
        return sorted(path.name for path in self.directory.checkpoints.iterdir())


def facts(outer_step: int, **learner_checkpoints: str) -> Facts:
    return Facts(
        incarnation=1, outer_step=outer_step, started=True, known_learners=[0], accounts=[], num_merges=0,
        num_participants=0, tape_bytes=0, learner_checkpoints=learner_checkpoints,
    )  # fmt: skip


@pytest.fixture
def syncer(tmp_path):
    made: list[Syncer] = []

    def make(**settings) -> Syncer:
        made.append(Syncer(tmp_path / "run", **settings))
        return made[-1]

    yield make
    for item in made:
        item.tape.close()


def test_a_checkpoint_of_the_whole_run_does_not_put_off_the_syncers_own(syncer):
    one = syncer(checkpoint_every_seconds=1000.0, save_every=10)
    due_at = one.saver.due_at = time.monotonic() - 1.0
    one.save(10, **{"0": "/learner-0/checkpoint-10"})
    assert one.saver.due_at == due_at
    assert one.on_disk() == []
    one.save(11)
    assert one.saver.due_at > due_at
    assert one.on_disk() == ["step-00000011"]


def test_the_last_one_takes_its_frozen_parameters_from_the_one_that_was_under_way(syncer):
    """Which has just taken the place of the only one that was kept."""
    one = syncer(keep_checkpoints=1, frozen_values=17 << 20)
    one.save(0)
    one.saver.begin(facts(50))
    assert one.saver.write_now(facts(100), one.tape).name == "step-00000100"
    assert one.on_disk() == ["step-00000100"]


@pytest.mark.parametrize("stopped", [False, True])
def test_a_full_disk_holds_up_the_last_one_until_there_is_room_or_the_run_is_stopped(syncer, monkeypatch, stopped):
    one, tries = syncer(), []

    def save_run(*arguments, **options):
        tries.append(1)
        if len(tries) < 3 or stopped:
            if stopped and len(tries) == 2:
                one.stopping.set()
            raise DiLoCoError("no space left.")
        return real(*arguments, **options)

    real = saver_module.save_run
    monkeypatch.setattr(saver_module, "save_run", save_run)
    monkeypatch.setattr(saver_module, "_FINAL_RETRY_SECONDS", 0.001)
    if stopped:
        with pytest.raises(DiLoCoError, match="no space left"):
            one.saver.write_now(facts(100), one.tape)
        assert len(tries) == 2
    else:
        assert one.saver.write_now(facts(100), one.tape).name == "step-00000100"
        assert one.on_disk() == ["step-00000100"]
    warnings = [line["text"] for line in read_tape(one.directory.tape) if line["kind"] == "warning"]
    assert len(warnings) == 1, "it is said once"
    assert warnings[0].startswith("no space left. It is tried again")
