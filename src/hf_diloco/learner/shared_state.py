"""What rank 0 of a learner has for its inner optimizer, given to the other ranks as well."""

from __future__ import annotations

import json

import torch

from hf_diloco.core import messages as ms
from hf_diloco.learner.optimizer_state import OptimizerState
from hf_diloco.learner.ranks import Ranks


def send_state(ranks: Ranks, taken: ms.StateTaken, state: OptimizerState | None) -> None:
    """Tell the other ranks what it is; give it to them if it came from a peer."""
    if ranks.size == 1:
        return
    is_shared = taken.source == "peer"
    plan = state.plan() if state is not None and is_shared else None
    facts = {"source": taken.source, "without": plan.without if plan else ()}
    ranks.share(json.dumps(facts).encode())
    if plan is not None and state is not None:
        for piece in plan.pieces:
            ranks.share_tensor(state.read(piece).result())


def receive_state(ranks: Ranks, state: OptimizerState | None) -> str:
    """Have the same as rank 0, whose optimizer is of the same kind; returns where it is from."""
    facts = json.loads(ranks.share(None))
    if facts["source"] == "peer":
        assert state is not None
        state.fill()
        for piece in (plan := state.plan(facts["without"])).pieces:
            content = torch.empty_like(state.read(piece).result())
            ranks.share_tensor(content)
            state.write(piece, content)
        state.clear(plan.without)
    return str(facts["source"])
