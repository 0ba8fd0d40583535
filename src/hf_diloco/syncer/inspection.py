"""Which updates may be merged: of the right size, finite, and not absurdly long."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from hf_diloco.core import messages as ms
from hf_diloco.core.codec import decode
from hf_diloco.core.fragments import FragmentLayout
from hf_diloco.errors import MessageError

_WINDOW = 32  # accepted updates of a fragment that its bound is taken from
_FEWEST = 8  # before so many there is no bound
_TIMES_MEDIAN = 100.0  # the bound; a learning rate that warms up or restarts stays well below
_LARGEST_NORM = 1e18  # of any update: squares and outer steps of that size are far from the end of fp32, 3e38
_NEW_NORMAL = 8  # refusals of a fragment in a row, none accepted: not a broken learner, the run has changed


class Inspector:
    """Judges updates one by one.

    The bound is on the norm per inner step: 100 times the median of the last accepted ones of the same fragment. It
    is meant for what breaks a run at once (a diverged or corrupted learner), not for what is merely poor. A norm of
    more than 1e18 is refused from the first update on: the global parameters could overflow.

    Args:
        layout: how the parameters are split.
    """

    def __init__(self, layout: FragmentLayout) -> None:
        self._layout = layout
        self._norms: list[deque[float]] = [deque(maxlen=_WINDOW) for _ in layout.fragments]
        self._refused_in_a_row = [0] * layout.num_fragments

    def inspect(self, message: ms.Update, payload: Tensor | None) -> tuple[Tensor | None, str | None]:
        """The shipped difference, flat fp32; or why it must not be merged."""
        fragments = self._layout.fragments
        if not 0 <= message.fragment_index < len(fragments):
            return None, f"there is no fragment {message.fragment_index}"
        if payload is None:
            return None, "it has no payload"
        try:
            shape = (fragments[message.fragment_index].num_parameters,)
            shipped = decode(payload, message.wire_format, shape)
        except (MessageError, ValueError) as error:
            return None, str(error)
        if not bool(torch.isfinite(shipped).all()):
            return None, "it holds NaN or infinite values"
        norm = float(shipped.norm())
        if not norm <= _LARGEST_NORM:
            return None, f"its norm of {norm:.3g} could make the global parameters infinite"
        if objection := self._judge_norm(message.fragment_index, norm / message.steps):
            return None, objection
        return shipped, None

    @property
    def norms(self) -> list[list[float]]:
        """What the bounds are taken from: of each fragment the norms per inner step of the last accepted updates."""
        return [list(norms) for norms in self._norms]

    def restore(self, *earlier: Sequence[Sequence[float]]) -> None:
        """Go on with the bounds of an earlier inspector; the oldest :attr:`norms` first."""
        for norms in earlier:
            for own, given in zip(self._norms, norms, strict=False):
                own.extend(given)

    def _judge_norm(self, fragment_index: int, norm_per_step: float) -> str | None:
        norms = self._norms[fragment_index]
        median = statistics.median(norms) if len(norms) >= _FEWEST else math.inf
        if norm_per_step <= _TIMES_MEDIAN * median or median == 0:
            norms.append(norm_per_step)
            self._refused_in_a_row[fragment_index] = 0
            return None
        self._refused_in_a_row[fragment_index] += 1
        if self._refused_in_a_row[fragment_index] >= _NEW_NORMAL:
            norms.clear()
            self._refused_in_a_row[fragment_index] = 0
        return (
            f"its norm of {norm_per_step:.3g} per inner step is more than {_TIMES_MEDIAN:g} times the usual "
            f"{median:.3g} of fragment {fragment_index}"
        )
