"""Tells the syncer how far this learner is, and how fast."""

from __future__ import annotations

import time

from torch import Tensor

from hf_diloco.core import messages as ms
from hf_diloco.learner.accounts import Accounts
from hf_diloco.learner.exchange import Exchange

_REPORT_EVERY_SECONDS = 0.05
_WEIGHT_OF_NEWEST_STEP = 0.2
_LONGEST_STEP = 4  # times the usual one: an evaluation between two steps does not count in full


class Reporter:
    """Knows the usual time of a step, and what was last seen of the training.

    Args:
        exchange: of this learner.
        accounts: of this learner.
    """

    def __init__(self, exchange: Exchange, accounts: Accounts) -> None:
        self.finished = False
        self._exchange, self._accounts = exchange, accounts
        self._loss: float | None = None
        self._data_digest: tuple[int, ...] = ()
        self._digest_said_on = -1  # the link it was last sent on
        self._step_seconds = 0.0
        self._stepped_at: float | None = None
        self._reported_at = 0.0
        self._said_on = -1  # the link it has reported on while it waits

    def begin(self) -> None:
        """The first step begins."""
        self._stepped_at = time.monotonic()

    def step(self, loss: float | None, data_digest: tuple[int, ...] | None) -> None:
        """A step has ended, and the next one begins.

        Args:
            loss: the last training loss.
            data_digest: hashes of examples that were read, if there are new ones.
        """
        self._loss = loss
        if data_digest is not None:
            self._data_digest, self._digest_said_on = data_digest, -1
        now = time.monotonic()
        if self._stepped_at is not None:
            seconds = now - self._stepped_at
            if not self._step_seconds:
                self._step_seconds = seconds
            seconds = min(seconds, _LONGEST_STEP * self._step_seconds)
            self._step_seconds += _WEIGHT_OF_NEWEST_STEP * (seconds - self._step_seconds)
        self._stepped_at = now

    def report_now_and_then(self, global_step: int) -> None:
        """Report, if the last time is not just now."""
        assert self._stepped_at is not None
        if self._stepped_at - self._reported_at >= _REPORT_EVERY_SECONDS:
            self._reported_at = self._stepped_at
            self.report(global_step)

    def begin_to_wait(self) -> None:
        """From now on there are no steps."""
        self._said_on = -1

    def is_on_new_link(self) -> bool:
        """There is a link on which the syncer, which may have come back, was told nothing yet; said once."""
        with self._exchange.changed:
            num_links, linked = self._exchange.num_links, self._exchange.linked
        is_new = linked and num_links != self._said_on
        if is_new:
            self._said_on = num_links
        return is_new

    def report(self, global_step: int, payload: Tensor | None = None) -> None:
        """Say it all; with an empty payload, in order with other messages that have one."""
        is_news = self._digest_said_on != self._exchange.num_links
        self._digest_said_on = self._exchange.num_links
        self._exchange.send(
            ms.Progress(
                global_step=global_step,
                steps=self._accounts.steps,
                tokens=self._accounts.tokens,
                step_seconds=max(self._step_seconds, 1e-6),
                loss=self._loss,
                finished=self.finished,
                data_digest=self._data_digest if is_news else (),
                tokens_overwritten=round(self._accounts.tokens_overwritten),
            ),
            payload,
        )
