"""The README.md of an exported model: what it is, and how it was trained."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from hf_diloco.config import SyncerConfig
from hf_diloco.core.model_notes import ModelNotes
from hf_diloco.syncer.roster import Account


def run_facts(
    config: SyncerConfig,
    accounts: Iterable[Account],
    *,
    outer_step: int,
    num_merges: int,
    num_participants: int,
) -> dict[str, str]:
    """The lines of the card about the run: what -> how much.

    Args:
        config: of the run, as the first learner resolved it.
        accounts: of all learners that ever took part.
        outer_step: t.
        num_merges: so far.
        num_participants: of all merges together.
    """
    accounts = list(accounts)
    merged, trained = sum(item.tokens_merged for item in accounts), sum(item.tokens_trained for item in accounts)
    mean = f", of {num_participants / num_merges:.2f} learners on average" if num_merges else ""
    return {
        "learners": f"{len(accounts)}",
        "outer steps": f"{outer_step:,} of {config.total_steps:,}" if config.total_steps else f"{outer_step:,}",
        "tokens merged": f"{merged:,.0f} of {trained:,} trained",
        "merges": f"{num_merges:,}{mean}",
        "fragments": f"{config.num_fragments}, each due every {config.sync_every} outer steps",
        "outer optimizer": f"SGD, learning rate {config.outer_lr}, Nesterov momentum {config.outer_momentum}",
        "merge rule": {"rda": "radial-directional average, plain average for embeddings"}.get(config.merge, "average"),
        "on arrival": config.on_arrival,
        "wire format": config.wire_format,
    }


def model_card(kind: str, notes: ModelNotes, facts: Mapping[str, Any]) -> str:
    """The text of the card.

    Args:
        kind: the architecture, or what else the title says.
        notes: base model, and whether this is an adapter.
        facts: of :func:`run_facts`.
    """
    is_adapter = notes.adapter_names is not None
    lines = ["---", f"library_name: {'peft' if is_adapter else 'transformers'}"]
    if notes.base_model:
        lines += [f"base_model: {json.dumps(notes.base_model)}"]
    lines += ["tags:", "- diloco", "- hf-diloco", "---", "", f"# {kind}, trained with hf-diloco", ""]
    lines += [
        f"Global {'adapter' if is_adapter else 'parameters'} of a [Decoupled DiLoCo](https://arxiv.org/abs/2604.21428) "
        "run: several learners trained without waiting for each other, and a syncer merged their updates, one fragment "
        "at a time. Weights are fp32.",
    ]
    if facts:
        lines += ["", "## How it was trained", "", *(f"- {what}: {value}" for what, value in facts.items())]
    if notes.base_model:
        lines += [f"- base model: {notes.base_model}"]
    return "\n".join(lines) + "\n"
