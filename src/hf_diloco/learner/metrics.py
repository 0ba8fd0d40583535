"""What a learner can say of its run, for logs and trackers."""

from __future__ import annotations

from hf_diloco.learner.accounts import Accounts
from hf_diloco.learner.exchange import Exchange


def metrics(exchange: Exchange, accounts: Accounts) -> dict[str, float]:
    """By the name under which they are logged. The last four are counts or shares since this process began.

    - ``diloco/outer_step``: of the newest merge that was heard of.
    - ``diloco/staleness``: how many outer steps ago the values were made that this learner has applied, mean over the
      fragments. Never below about half of H, since fragments are merged in turn.
    - ``diloco/participants``: learners in that merge.
    - ``diloco/steps_overwritten``: inner steps whose progress was given up, mean over the fragments.
    - ``diloco/bytes_sent``, ``diloco/bytes_received``: payloads.
    - ``diloco/goodput``: tokens merged / tokens trained, both by this learner.

    Args:
        exchange: of this learner.
        accounts: of this learner.
    """
    with exchange.lock:
        held = [local.version.outer_step for local in exchange.fragments if local.version is not None]
        accounted = sum(local.accounted_tokens for local in exchange.fragments) / max(len(exchange.fragments), 1)
        total_steps = exchange.welcome.total_steps if exchange.welcome else 0
        return {
            "diloco/outer_step": min(exchange.newest_outer_step, total_steps),  # the last merges come after the end
            "diloco/staleness": exchange.newest_outer_step - sum(held) / len(held) if held else 0.0,
            "diloco/participants": exchange.num_participants,
            "diloco/steps_overwritten": accounts.steps_overwritten,
            "diloco/bytes_sent": exchange.bytes_sent,
            "diloco/bytes_received": exchange.bytes_received,
            "diloco/goodput": (accounted - accounts.tokens_overwritten) / accounts.tokens if accounts.tokens else 0.0,
        }
