"""What a learner does the same way whoever drives its loop: Trainer's events, or a plain Accelerate loop."""

from __future__ import annotations

import logging
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn

from hf_diloco.config import DiLoCoPlugin
from hf_diloco.errors import ConfigError, DiLoCoError, DiLoCoWarning, UnsupportedError
from hf_diloco.integrations.arguments import check_optimizer
from hf_diloco.integrations.model_files import model_files
from hf_diloco.integrations.schedules import LENGTH_TOLERANCE, follow
from hf_diloco.learner.follower import Follower
from hf_diloco.learner.joining import has_ended
from hf_diloco.learner.learner import Learner
from hf_diloco.learner.parameters import ModelParameters
from hf_diloco.learner.preemption import Preemption
from hf_diloco.learner.ranks import ranks_of_this_learner
from hf_diloco.learner.tokens import TokenCounter
from hf_diloco.links.base import LearnerLink
from hf_diloco.links.token import read_token

logger = logging.getLogger(__name__)

_RANK_NAMES = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")  # those that Accelerate goes by
_STEPS_WITHOUT_TOKENS = 10  # in a row: something is wrong; counts on their way from a GPU come within a step or two


def check_token(plugin: DiLoCoPlugin) -> None:
    """Find a token that is missing or unusable before a model is loaded; other ranks than the first need none.

    Raises:
        ConfigError: it cannot be used.
    """
    rank = next((os.environ[name] for name in _RANK_NAMES if name in os.environ), "0")
    if rank == "0":
        read_token(plugin.read_token())


class Membership:
    """A learner's part in a run, from joining to leaving.

    Whoever drives the loop calls :meth:`join`, :meth:`step` after each update, and :meth:`end`, whatever happens. If
    it cannot (Trainer says nothing when training raises), the link ends with this object, or when the process exits.
    All processes of the learner do the same; only rank 0 has the link.

    Args:
        model: the module whose ``forward`` gets the batches.
        plugin: where the syncer is, and which learner this is.
        total_steps: how long the script means to train; None to take the run's.
        steps_from_epochs: ``total_steps`` was worked out from epochs and this learner's own data.
        processing_class: tokenizer or processor, for the exported model.
        optimizer: the inner optimizer.
        scheduler: of its learning rate, which is made to follow the run.
        link: to the syncer; default: over the network.
        is_training: whether, with this frame being executed, somebody will look at ``preemption`` again.

    Raises:
        ConfigError: this process is that learner already.
    """

    def __init__(
        self,
        model: nn.Module,
        plugin: DiLoCoPlugin,
        *,
        total_steps: int | None,
        steps_from_epochs: bool = False,
        processing_class: Any = None,
        optimizer: Any = None,
        scheduler: Any = None,
        link: LearnerLink | None = None,
        is_training: Callable[[FrameType | None], bool],
    ) -> None:
        _check_alone(plugin)
        self._is_training, self._thread = is_training, threading.get_ident()
        self.preemption = Preemption(is_training)
        self.has_ended = False  # the rest of the loop needs no more of the learner
        self.holds_global = False  # ... because the model holds the final global values
        self._plugin, self._scheduler = plugin, scheduler
        self._optimizer = inner_optimizer(optimizer)
        self._joint_step: int | None = None  # of the checkpoint of the whole run that is being saved
        self._counter = TokenCounter(model)
        self._num_tokens, self._num_tokenless = 0, 0  # in all; updates in a row without
        self._ranks = ranks_of_this_learner()
        parameters = ModelParameters(model, self._ranks.bulk)
        self._parameters = parameters
        check_optimizer(self._optimizer, parameters.trainable)
        files = model_files(parameters, processing_class)
        self.learner: Learner | Follower
        if self._ranks.rank == 0:
            self.learner = Learner(
                parameters,
                plugin,
                total_steps=total_steps,
                steps_from_epochs=steps_from_epochs,
                files=files,
                optimizer=self._optimizer,
                link=link,
                ranks=self._ranks,
            )
        else:
            self.learner = Follower(parameters, plugin, ranks=self._ranks, optimizer=self._optimizer)
        self._close = weakref.finalize(self, self.learner.close)

    def join(self) -> None:
        """Become part of the run; blocks until it starts.

        Raises:
            JoinError: it could not.
            SystemExit: this process was told to stop meanwhile.
        """
        try:
            _at_work[self._plugin.syncer, self._plugin.learner_id] = self
            self.preemption.watch()
            if not self.learner.join(interrupted=self.preemption.requested):
                self.drain()
                self.preemption.exit()
        except BaseException:  # Ctrl-C at the start gate, too
            self.end()
            raise
        follow(self._scheduler, self.learner.global_step)
        self._counter.attach()

    def step(self, *, loss: float | None = None, is_last: bool = False, was_skipped: bool = False) -> bool:
        """One update was made: ship and apply what is due, when no gradients are alive.

        Args:
            loss: the last training loss.
            is_last: the loop makes no more updates.
            was_skipped: the gradients overflowed (fp16), so that nothing was learned.

        Returns:
            False when training ends here; then the model holds the final global values, if :attr:`holds_global`.

        Raises:
            UnsupportedError: updates without tokens, or of parameters that are not synced; they would be lost.
        """
        tokens, goes_on = self._counter.take(wait=is_last), True
        self._parameters.check_frozen()
        self._check_tokens(tokens, is_last)
        if not was_skipped:
            goes_on = self.learner.step(tokens, loss=loss, data_digest=self._counter.data_digest())
            follow(self._scheduler, self.learner.global_step)
            if self.learner.starts_over():
                _forget_broken_state(self._optimizer)
            self._joint_step = self.learner.take_save_wanted()
        if is_last and goes_on:
            self.end_loop()
        elif not goes_on:
            self.finish()
        return goes_on

    def _check_tokens(self, tokens: int, is_last: bool) -> None:
        """Updates without tokens have no weight, and would never be merged."""
        self._num_tokens += tokens
        self._num_tokenless = 0 if tokens else self._num_tokenless + 1
        if self._num_tokenless == _STEPS_WITHOUT_TOKENS or (is_last and not self._num_tokens):
            raise UnsupportedError(
                f"no tokens were counted in {self._num_tokenless} updates, and without tokens nothing is merged. Give "
                "batches to the model itself (model(**batch)), not to a part or a method of it, and with gradients "
                "enabled. What calls several parts goes into the forward method of one module around them."
            )

    def end_pass(self) -> None:
        """A pass over the data has ended: the next one reads the shard that the syncer leases to this learner."""
        if self.learner.end_pass(interrupted=self.preemption.requested):
            self._counter.forget_examples()

    @property
    def told_to_stop(self) -> bool:
        """This process is to end; or any process of this learner, as all of them knew at their last step boundary."""
        return self.preemption.requested() if self._ranks.size == 1 else self.learner.interrupted

    @property
    def save_wanted(self) -> bool:
        """The syncer wants a checkpoint of this step, as a part of one of the whole run."""
        return self._joint_step is not None

    def saved(self, path: str) -> None:
        """A checkpoint of this step is in ``path``; tell the syncer, if it wanted one."""
        if self._joint_step is not None:
            self.learner.saved_checkpoint(self._joint_step, str(Path(path).absolute()))
            self._joint_step = None

    def end_loop(self) -> None:
        """The loop makes no more updates: wait for the final values. Warns if the run was to be much longer."""
        step, total = self.learner.global_step, self.learner.total_steps
        if step < (1 - LENGTH_TOLERANCE) * total and self._ranks.rank == 0:
            warnings.warn(
                f"the training of learner {self._plugin.learner_id} has ended by itself at step {step} of {total} (its "
                "epochs, its steps or its data ran out). The run ends for the other learners, too, finish_wait_seconds "
                f"after that. To train all steps, let the loop go on until the run ends it: max_steps={total} for "
                "Trainer; around a loop of your own, another one over the epochs.",
                DiLoCoWarning,
                stacklevel=4,
            )
        self.finish()

    def finish(self) -> None:
        """Wait for the final global values, unless told to stop meanwhile."""
        self.holds_global = self.learner.finish(interrupted=self.preemption.requested)
        self.has_ended = self.holds_global or not self.told_to_stop
        if self.holds_global:
            has_ended(self._plugin.syncer)

    def leave(self, reason: str, *, for_good: bool = True) -> None:
        """Have merged what is not, and take leave; the others go on. The model keeps the local values."""
        self.has_ended = True
        logger.info("%s leaves the run (%s); its model keeps the local parameters", self, reason)
        self.learner.leave(reason, drain_seconds=self._plugin.drain_seconds, for_good=for_good)

    def drain(self) -> None:
        """As told to stop: ship what is not merged, and take leave. Once."""
        if self.has_ended:
            return
        reason = self.preemption.reason or "as another rank of this learner was"
        logger.warning(
            "%s told to stop (%s): has what it did merged (for at most %.0f s), saves, and ends",
            self, reason, self._plugin.drain_seconds,
        )  # fmt: skip
        try:
            self.leave(f"told to stop ({reason})", for_good=False)
        except DiLoCoError as error:  # whatever it is, there is still a checkpoint to save
            logger.error("%s could not ship what is not merged: %s", self, error)

    def end(self) -> None:
        """Remove the hooks and close the link. Idempotent."""
        self.has_ended = True
        self._counter.detach()
        self._close()  # runs Learner.close once, now or earlier
        self.preemption.end()

    def __str__(self) -> str:
        return f"[learner {self._plugin.learner_id} · step {self.learner.global_step}]"


# Who was the last to join as this learner: it may still be at work.
_at_work: weakref.WeakValueDictionary[tuple[str | None, int | None], Membership] = weakref.WeakValueDictionary()


def _check_alone(plugin: DiLoCoPlugin) -> None:
    """A process may be several learners, or one after another, but not one twice: the syncer would refuse it."""
    other = _at_work.get((plugin.syncer, plugin.learner_id))
    if other is None or other.has_ended:
        return
    frame: FrameType | None = sys._getframe()
    while frame is not None and not other._is_training(frame):  # by each: a Trainer may be at work above another one
        frame = frame.f_back
    if frame is None:  # it raised without a word, and what it was in may be kept: by a notebook, with the exception
        if other._thread == threading.get_ident():
            other.end()
    else:
        raise ConfigError(
            f"this process is learner {plugin.learner_id} of the run at {plugin.syncer} already, and a run merges one "
            "model. Put several models into one module whose forward calls them, with one optimizer of all parameters. "
            "Or start a syncer for each model, and give each its own: DiLoCoPlugin(syncer=...)."
        )


def inner_optimizer(optimizer: Any) -> Any:
    """The optimizer of torch in what Accelerate makes of it."""
    return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer


def reseed(dataloader: Any, seed: int) -> None:
    """Make the order of the data this learner's own, before the first batch is drawn.

    A dataset without a sampler (iterable) keeps its order: it differs by its shard.
    """
    while dataloader is not None:  # then its batch sampler, what that wraps, and last the sampler of examples
        batches = getattr(dataloader, "batch_sampler", None)
        dataloader = getattr(dataloader, "sampler", None) if batches is None else batches
        if hasattr(dataloader, "initial_seed"):  # accelerate's, Trainer's default: seeded anew for each epoch
            dataloader.initial_seed = seed
        elif hasattr(dataloader, "generator"):  # None would be the process-wide one, seeded alike at all learners
            dataloader.generator = torch.Generator().manual_seed(seed)


def _forget_broken_state(optimizer: Any) -> None:
    """Moments that are NaN or infinite would break the model again at the next step; the others are kept."""
    state = getattr(optimizer, "state", {})
    for parameter in list(state):
        if any(torch.is_tensor(value) and not bool(torch.isfinite(value).all()) for value in state[parameter].values()):
            del state[parameter]
