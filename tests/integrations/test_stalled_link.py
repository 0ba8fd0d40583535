"""No step waits for the network: a link that stalls in mid-transfer holds up nothing but itself."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from trainers import make_model, make_trainer, plugin
from transformers import TrainerCallback

from hf_diloco.config import SyncerConfig
from hf_diloco.core.messages import Message, Update
from hf_diloco.integrations.transformers import DiLoCoCallback
from hf_diloco.links.base import LinkEvent
from hf_diloco.links.in_process import InProcessHub, InProcessLearnerLink
from hf_diloco.syncer.run_directory import RunDirectory
from hf_diloco.syncer.service import Syncer

pytestmark = pytest.mark.fast

STEPS_MEANWHILE = 30
SECONDS = 60.0


class StalledLink(InProcessLearnerLink):
    """From the third update on neither sends payloads nor receives, until ``released``."""

    def __init__(self, hub: InProcessHub, learner_id: int) -> None:
        super().__init__(hub, learner_id, "0")
        self.stalled, self.released = threading.Event(), threading.Event()
        self.was_released: list[bool] = []  # of those who had to wait
        self._num_updates = 0

    def send(self, message: Message, payload: Tensor | None = None) -> None:
        self._num_updates += isinstance(message, Update)
        if self._num_updates >= 3 and payload is not None:
            self.stalled.set()
            self.was_released.append(self.released.wait(SECONDS))
        super().send(message, payload)

    def receive(self, timeout_seconds: float) -> LinkEvent | None:
        if self.stalled.is_set():
            self.was_released.append(self.released.wait(SECONDS))
        return super().receive(timeout_seconds)


class Steps(TrainerCallback):
    """Counts the steps that end while the link stalls, and releases it after enough of them."""

    def __init__(self, link: StalledLink) -> None:
        self.link, self.num_meanwhile = link, 0

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        if self.link.stalled.is_set() and not self.link.released.is_set():
            self.num_meanwhile += 1
            if self.num_meanwhile == STEPS_MEANWHILE:
                self.link.released.set()


def test_steps_go_on_while_the_link_stalls(tmp_path: Path) -> None:
    hub = InProcessHub()
    # H is larger than the stall lasts: nothing is given up as too old (after 4 H).
    syncer = Syncer(SyncerConfig(num_fragments=3, sync_every=12), hub, RunDirectory(tmp_path / "run"))
    link = StalledLink(hub, 0)
    steps = Steps(link)
    trainer = make_trainer(
        tmp_path, DiLoCoCallback(plugin(0), link=lambda: link), steps, model=make_model(), max_steps=150
    )
    thread = threading.Thread(target=syncer.run, name="syncer")
    thread.start()
    try:
        trainer.train()
        thread.join(SECONDS)
        assert not thread.is_alive()
    finally:
        link.released.set()
        syncer.stop()
    assert steps.num_meanwhile == STEPS_MEANWHILE
    assert link.was_released
    assert all(link.was_released), "the link was waited for"
    [account] = syncer.status()["learners"]
    assert account["tokens_merged"] == account["tokens_trained"] > 0
