"""What happens between two passes over the data."""

from __future__ import annotations

import time
from collections.abc import Callable

from hf_diloco.core import messages as ms
from hf_diloco.learner.exchange import Exchange

_ANSWER_SECONDS = 10.0  # at most; it usually takes milliseconds


def next_shard(exchange: Exchange, own: int, num_passes: int, interrupted: Callable[[], bool]) -> int:
    """The shard that the syncer leases to a learner that has read its own to the end.

    Waits for the answer while there is a link; without one it is the same shard again, which the next Hello says.

    Args:
        exchange: of the learner.
        own: the shard that was read.
        num_passes: that this process has ended.
        interrupted: looked at while waiting.
    """
    deadline = time.monotonic() + _ANSWER_SECONDS
    with exchange.changed:
        link = exchange.num_links
        if exchange.linked:
            exchange.send(ms.WantShard(shard=own, num_passes=num_passes))
        while exchange.linked and exchange.num_links == link and exchange.fatal is None:
            # The answer to a Hello, or a late one, is not the one that was asked for.
            if exchange.lease is not None and exchange.lease.num_passes == num_passes:
                return exchange.lease.shard
            if interrupted() or time.monotonic() > deadline:
                break
            exchange.changed.wait(timeout=0.2)
        return own
