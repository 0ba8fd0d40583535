"""A learner that is started again when the others have finished: it gets the global model, and ends with 0."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from processes import wait_until

pytestmark = [pytest.mark.distributed, pytest.mark.long]


def test_a_learner_that_comes_after_the_end(start_run: Any) -> None:
    run = start_run(num_fragments=4, sync_every=4, linger_seconds=600)
    assert run.start_learner(0, max_steps=24).wait() == 0, run.learners[0].tail()
    wait_until(
        lambda: "waits 600 s for learners that come late" in run.syncer.tail(), "the syncer to say that it waits"
    )
    assert (run.directory / "model" / "model.safetensors").exists(), "whoever waits for the model has it already"

    late = run.start_learner(1, max_steps=24)
    assert late.wait() == 0, late.tail()
    assert run.result(1)["digests"] == run.result(0)["digests"], "what it would save is not the global model"
    assert [line["learner_id"] for line in run.tape() if line["kind"] == "join"] == [0, 1]
    run.syncer.signal(signal.SIGTERM)
    assert run.syncer.wait() == 0, run.syncer.tail()

    run.start_syncer("--linger-seconds", "0")
    assert run.syncer.wait() == 0, run.syncer.tail()
    assert "has ended; its global model is in" in run.syncer.tail()
