"""What the script of a learner gets that cannot join."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import Any

import pytest
from processes import wait_until
from train_tiny import dataset, model
from transformers import Trainer, TrainingArguments

from hf_diloco import DiLoCoCallback, DiLoCoPlugin
from hf_diloco.errors import SyncerUnreachableError

pytestmark = pytest.mark.distributed


def test_nobody_answers(tmp_path: Path) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        plugin = DiLoCoPlugin(syncer=address, learner_id=0, token="secret", join_timeout_seconds=1.0)
        arguments = TrainingArguments(str(tmp_path), max_steps=2, use_cpu=True, report_to="none", disable_tqdm=True)
        trainer = Trainer(model(0, 16), arguments, train_dataset=dataset(0), callbacks=[DiLoCoCallback(plugin)])
        said = rf"no syncer answered at {address} for 1 s \(last: .+\)\. Check that .* is running, that the address"
        with pytest.raises(SyncerUnreachableError, match=said):
            trainer.train()


@pytest.mark.long
def test_the_token_of_another_run(start_run: Any, tmp_path: Path) -> None:
    run = start_run()
    token = tmp_path / "token"
    token.touch(mode=0o600)
    token.write_text("of another run")
    learner = run.start_learner(0, str(token))
    assert learner.wait() == 1
    said = r"AuthenticationError: .* does not accept this learner's token.*HF_DILOCO_TOKEN_FILE"
    assert re.search(said, learner.tail()), learner.tail()
    wait_until(lambda: "came with a wrong token" in run.syncer.tail(), "the syncer to say so too")
    assert not [line for line in run.tape() if line["kind"] == "join"]
