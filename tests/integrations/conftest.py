"""What the tests of integrations share."""

import pytest
from scripted import ScriptedLearner

from hf_diloco.integrations import membership


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch):
    for name in ("SYNCER", "LEARNER_ID", "NUM_SHARDS", "TOKEN", "TOKEN_FILE"):
        monkeypatch.delenv(f"HF_DILOCO_{name}", raising=False)


@pytest.fixture
def scripted(monkeypatch):
    """A fresh ScriptedLearner class in the place of Learner."""
    script = type("Script", (ScriptedLearner,), {"instances": []})
    monkeypatch.setattr(membership, "Learner", script)
    return script
