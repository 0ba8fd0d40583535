"""A received message whose payload goes back to its owner once, whoever releases it and however often."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from hf_diloco.links.base import Received


@dataclass(frozen=True)
class LentReceived(Received):
    """``release`` calls what it was made with, the first time only."""

    _once: list[Callable[[], object]] = field(default_factory=list, compare=False, repr=False)

    def release(self) -> None:
        """Give the payload's memory back."""
        try:
            give_back = self._once.pop()  # atomic: a second call, or another thread's, finds nothing
        except IndexError:
            return
        give_back()
