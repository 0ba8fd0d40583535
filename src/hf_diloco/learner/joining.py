"""What a learner does once, on its way into a run or out of it: the wait at the gate, the values it sends."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from hf_diloco.config import DiLoCoPlugin
from hf_diloco.core import messages as ms
from hf_diloco.core.codec import encode
from hf_diloco.core.fragments import Fragment
from hf_diloco.errors import DiLoCoError, SyncerUnreachableError
from hf_diloco.learner.exchange import Exchange
from hf_diloco.learner.parameters import ModelParameters
from hf_diloco.links.base import LearnerLink

logger = logging.getLogger(__name__)

_SAY_EVERY_SECONDS = 10.0
_AFTER_THE_END_SECONDS = 10.0  # for another run, where this process has seen one end
_EMPTY = torch.empty(0, dtype=torch.uint8)


_ended_at: set[str | None] = set()  # addresses of syncers whose runs have ended here


def has_ended(address: str | None) -> None:
    """Remember that this process has seen the run at this address come to its end."""
    _ended_at.add(address)


class Patience:
    """How long to look for the syncer, and what to say meanwhile.

    Args:
        learner_id: this learner's number.
        exchange: of this learner.
        address: of the syncer.
        timeout_seconds: how long it may take until the first link.
    """

    def __init__(self, learner_id: int, exchange: Exchange, address: str | None, timeout_seconds: float) -> None:
        self._learner_id, self._exchange, self._address = learner_id, exchange, address
        self._after_the_end = address in _ended_at  # a second train() or `with`
        self._timeout_seconds = min(timeout_seconds, _AFTER_THE_END_SECONDS) if self._after_the_end else timeout_seconds
        self._opened_at = self._said_at = time.monotonic()

    def check(self) -> None:
        """To be called again and again.

        Raises:
            SyncerUnreachableError: nobody answered in time.
        """
        exchange, now = self._exchange, time.monotonic()
        waited_seconds, error = now - self._opened_at, exchange.last_error() or "the first attempt to link is under way"
        if exchange.ever_linked:
            _ended_at.discard(self._address)
        elif waited_seconds > self._timeout_seconds:
            if self._after_the_end:
                raise SyncerUnreachableError(
                    f"the run at {self._address} has ended, as this process has seen, and no other one was there for "
                    f"{self._timeout_seconds:.0f} s (last: {error}). The model of the run is in its run directory "
                    "(`model`). To train on without a run, unset HF_DILOCO_SYNCER and make the callback or DiLoCo(...) "
                    "anew; to train in a new run, start a syncer first."
                )
            raise SyncerUnreachableError(
                f"no syncer answered at {self._address} for {self._timeout_seconds:.0f} s (last: {error}). Check that "
                "`hf-diloco syncer` is running, that the address is right and that a firewall lets its port through."
            )
        if now - self._said_at > _SAY_EVERY_SECONDS:
            self._said_at = now
            logger.warning("[learner %d] %s (%.0f s so far)", self._learner_id, self._waits_for(error), waited_seconds)

    def _waits_for(self, error: str) -> str:
        exchange = self._exchange
        if not exchange.linked:
            before = "the link is down, looking for the syncer" if exchange.ever_linked else "no syncer yet"
            return f"{before} at {self._address}: {error}"
        if exchange.welcome is None:
            return f"linked, waiting for the syncer's answer at {self._address}"
        if exchange.started_at is None:
            welcome = exchange.welcome
            return (
                f"waiting for the start: for the initial parameters, and until {welcome.expected_learners} learners "
                f"hold them; without the others {welcome.start_timeout_seconds:.0f} s after the first does"
            )
        return "waiting for the global parameters"


def supply(
    learner_id: int,
    exchange: Exchange,
    parameters: ModelParameters,
    fragments: Sequence[Fragment],
    files: Mapping[str, bytes],
) -> None:
    """Send the syncer all there is in the model, as the run's initial values."""
    logger.info("[learner %d] sending the initial parameters", learner_id)
    for index, fragment in enumerate(fragments):
        exchange.send(ms.SupplyFragment(fragment_index=index), encode(parameters.read(fragment).result(), "fp32"))
    running = parameters.running()
    for name, tensor in parameters.constants():
        _send_tensor(exchange, partial(ms.SupplyConstant, is_running=name in running), name, tensor)
    for name, content in files.items():
        payload = torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else _EMPTY
        exchange.send(ms.SupplyFile(name=name), payload)
    exchange.send(ms.Supplied(), _EMPTY)


def send_statistics(exchange: Exchange, parameters: ModelParameters) -> None:
    """Send what training changes besides the trained tensors, for the final model."""
    for name, tensor in parameters.statistics():
        _send_tensor(exchange, ms.Statistic, name, tensor)


def _send_tensor(exchange: Exchange, kind: Callable[..., ms.Message], name: str, tensor: Tensor) -> None:
    message = kind(name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape))
    exchange.send(message, tensor.contiguous().view(-1).view(torch.uint8))


def check_healed(exchange: Exchange, parameters: ModelParameters) -> None:
    """The model holds what was written to it.

    Raises:
        DiLoCoError: it does not.
    """
    for index, local in enumerate(exchange.fragments):
        assert local.anchor is not None
        if not parameters.holds(local.fragment, local.anchor):
            raise DiLoCoError(
                f"fragment {index} of the model does not hold the global value that was written to it. Does "
                "something else change the parameters before the first step (a callback, another thread)?"
            )


def rpc_link(plugin: DiLoCoPlugin, incarnation: str) -> LearnerLink:
    """A link to the syncer over the network, not yet opened."""
    from hf_diloco.links.rpc import RpcLearnerLink

    assert plugin.learner_id is not None
    host, port = plugin.address
    return RpcLearnerLink(host, port, plugin.read_token(), plugin.learner_id, incarnation)
