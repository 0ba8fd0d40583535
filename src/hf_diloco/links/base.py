"""The seam between the protocol and the world.

A link joins one learner to the syncer. Both ends send :mod:`~hf_diloco.core.messages` with an optional payload
(one uint8 CPU tensor) and never wait for the network in ``send``. A link may go down at any moment: what was on
its way is lost, and the link comes back by itself. Everything above must live with that; nothing below hides it.

Messages with a payload (an empty tensor counts) arrive in order; messages without may overtake them. Nothing is
delivered twice within one link, and nothing of an old link is delivered on a new one.

``links.in_process`` (tests) and ``links.rpc`` implement this and pass the same contract tests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hf_diloco.core.messages import Message


@dataclass(frozen=True)
class LinkUp:
    """A link to this learner is up (again); it begins with a Hello."""

    learner_id: int


@dataclass(frozen=True)
class LinkDown:
    """The link is gone. It comes back by itself unless ``fatal``."""

    learner_id: int
    reason: str
    fatal: Exception | None = None  # learner's end only: it will never come back, and why (AuthenticationError, ...)


@dataclass(frozen=True)
class Received:
    """A message arrived.

    ``payload`` belongs to the receiver until it calls ``release``: the memory is shared with the process that
    received it and is reused afterwards. ``release`` may be called from any thread and more than once.
    """

    learner_id: int
    message: Message
    payload: Tensor | None = None

    def release(self) -> None:
        """The payload has been used; its memory may be reused."""


LinkEvent = LinkUp | LinkDown | Received


def check_payload(payload: Tensor | None) -> None:
    """Payloads are uint8 CPU tensors of one dimension.

    Raises:
        TypeError: this one is not.
    """
    if payload is None:
        return
    if payload.dtype != torch.uint8 or payload.dim() != 1 or payload.device.type != "cpu":
        raise TypeError(
            f"a payload is a uint8 CPU tensor of one dimension, not {payload.dtype} of shape {tuple(payload.shape)} "
            f"on {payload.device}"
        )


class LearnerLink(Protocol):
    """The learner's end of its one link."""

    def open(self) -> None:
        """Start linking, in the background. Returns at once; success shows as :class:`LinkUp` in ``receive``."""

    def send(self, message: Message, payload: Tensor | None = None) -> None:
        """Queue a message. The payload is copied before this returns. Dropped silently while the link is down."""

    def receive(self, timeout_seconds: float) -> LinkEvent | None:
        """The next event, or None after ``timeout_seconds``."""

    def last_error(self) -> str | None:
        """Why the last attempt to link failed, for messages to people; None if none failed since it was last up."""

    def close(self, *, drain_seconds: float = 0.0) -> None:
        """Send what is queued for at most ``drain_seconds``, then end the link and all it started. Idempotent."""


class SyncerLinks(Protocol):
    """The syncer's ends of all links."""

    address: str  # "host:port" that learners may use

    def open(self) -> None:
        """Start to listen. Returns when learners can link."""

    def send(self, learner_ids: list[int], message: Message, payload: Tensor | None = None) -> None:
        """Queue one message for several learners; the payload is copied once, before this returns.

        Dropped silently for learners whose link is down.
        """

    def receive(self, timeout_seconds: float) -> LinkEvent | None:
        """The next event of any link, or None after ``timeout_seconds``."""

    def drop(self, learner_id: int, reason: str) -> None:
        """End this learner's link (it may come back); ``LinkDown`` follows."""

    def bytes_moved(self, learner_id: int) -> tuple[int, int]:
        """Payload bytes received from and sent to this learner so far, over all its links."""

    def close(self, *, drain_seconds: float = 0.0) -> None:
        """Send what is queued for at most ``drain_seconds``, then end all links and all child processes. Idempotent."""
