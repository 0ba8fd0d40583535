"""A run that goes on after its syncer died: from the checkpoint, the tape, and what learners hand back."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from hf_diloco.core import events as ev
from hf_diloco.core import messages as ms
from hf_diloco.core.codec import decode, digest
from hf_diloco.core.recovery import Recovered, Recovery
from hf_diloco.errors import MessageError
from hf_diloco.syncer.history import History
from hf_diloco.syncer.saved_run import SavedRun
from hf_diloco.syncer.state import GlobalState

logger = logging.getLogger(__name__)


class Restart:
    """From the moment that a syncer reads its run directory to the end of the recovery.

    Args:
        saved: the newest checkpoint.
        history: what the tape says happened after it.
        state: filled from them here.
    """

    def __init__(self, saved: SavedRun, history: History, state: GlobalState) -> None:
        self._history, self._state, self._started = history, state, saved.facts.started
        for index in range(state.layout.num_fragments):
            state.load_fragment(index, saved.fragment(index))
        self._ended = history.final or (self._started and history.all_left)
        vouched = [made.keys() for made in history.made]
        self._recovery = Recovery(history.held, history.known_learners, vouched, ended=self._ended)
        self.num_handed_back = 0

    def handle(self, event: ev.Event, now: float) -> list[ev.Action]:
        """Take one event in, as :meth:`Rounds.handle <hf_diloco.core.rounds.Rounds.handle>` does later."""
        return self._recovery.handle(event, now)

    def take(self, learner_id: int, message: ms.HandedBack, payload: Tensor | None) -> ev.HandedBack:
        """Adopt a value that a learner handed back, if it is what the tape says of its version.

        Raises:
            MessageError: there is no such fragment, or no value.
        """
        index, version = message.fragment_index, message.version
        if not 0 <= index < self._state.layout.num_fragments or payload is None:
            raise MessageError(f"fragment {index} was handed back without value")
        value = decode(payload, "fp32", (self._state.layout.fragments[index].num_parameters,))
        is_known = version in self._history.made[index] and version > self._state.versions[index]
        is_good = is_known and digest(value) == self._history.digest(index, version)
        if is_good:
            self._state.adopt(index, value, version, self._history.merged_in(index, version))
            self.num_handed_back += 1
        else:
            logger.warning("[syncer] learner %d handed back a value that the tape does not know", learner_id)
        return ev.HandedBack(learner_id=learner_id, fragment_index=index, version=version, refused=not is_good)

    def end(self) -> Recovered:
        """What the rounds go on from."""
        state = self._state
        outer_step = max(self._history.outer_step, *(version.outer_step for version in state.versions))
        return Recovered(
            held=list(state.versions), merged=[dict(merged) for merged in state.merged], outer_step=outer_step,
            started=self._started, ended=self._ended,
        )  # fmt: skip

    def said(self) -> list[ev.Event]:
        """By learners that are linked: for the rounds that follow."""
        return self._recovery.said()

    def merges(self, recovered: Recovered) -> list[Sequence[Mapping[str, Any]]]:
        """Participants of each merge that the checkpoint's accounts lack."""
        return self._history.merges_up_to(recovered.held)

    def describe(self, recovered: Recovered) -> list[dict[str, Any]]:
        """For the tape: the version and digest of each fragment that the run goes on from."""
        return [
            {"adopted": list(version), "digest": value_digest}
            for version, value_digest in zip(recovered.held, self._state.digests, strict=True)
        ]
