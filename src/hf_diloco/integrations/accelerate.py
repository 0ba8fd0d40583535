"""Decoupled DiLoCo for a plain Accelerate loop: one context manager."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType
from torch import nn

from hf_diloco.config import DiLoCoPlugin
from hf_diloco.errors import DiLoCoError, DiLoCoWarning, UnsupportedError
from hf_diloco.integrations.arguments import check_loop, plugin_of, updates_of
from hf_diloco.integrations.membership import Membership, check_token, inner_optimizer, reseed
from hf_diloco.integrations.schedules import num_steps, warn_if_stuck
from hf_diloco.learner.data import data_seed
from hf_diloco.learner.lease import lease_of, trains_on
from hf_diloco.learner.optimizer_steps import around_steps
from hf_diloco.links.base import LearnerLink

logger = logging.getLogger(__name__)


class DiLoCo:
    """Makes an Accelerate loop one learner of a Decoupled DiLoCo run.

    ::

        with DiLoCo(accelerator, model, optimizer, scheduler) as diloco:
            for batch in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(model(**batch).loss)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                if not diloco.step():
                    break
        # here the model holds the global parameters

    Entering waits until the run starts. The learning rate and the end of training follow the run's clock. What becomes
    of the learner when the block is left:

    - after :meth:`step` has returned False, or because the data ran out: it waits for the end of the run, and the model
      holds the global parameters (:attr:`holds_global`);
    - after :meth:`leave` (early stopping): it has left, the others go on, and the model keeps its local parameters;
    - by an exception, Ctrl-C too: the link is closed. Another ``with`` joins again;
    - by SIGTERM: at the next :meth:`step` after an update what it did is merged, it takes leave, ``save_checkpoint`` is
      called, and ``SystemExit(0)`` raised.

    It registers itself with ``accelerator.register_for_checkpointing``: make it before ``accelerator.load_state``, and
    load before the ``with``. Without a syncer address it does nothing, and says so once; :meth:`step` is then True.

    Args:
        accelerator: Of this learner.
        model: As prepared by it.
        optimizer: As prepared by it. Its real updates are counted, however gradients are accumulated.
        scheduler: If it goes by updates: it is made to follow the run. Leave it out if it goes by epochs.
        plugin: Where the syncer is and who this learner is. Default: ``DiLoCoPlugin()``, that is, the environment.
        total_steps: Updates that the script means to make. Default: what the run says.
        dataloader: That of the training data, as prepared: it is shuffled in an order of this learner's own.
        processing_class: Tokenizer or processor, to be saved with the global model.
        save_checkpoint: Writes a checkpoint and returns its directory, as ``accelerator.save_state`` does; called when
            this learner is told to stop, and for its part of a checkpoint of the whole run.
        link: Makes the link to the syncer; for tests. Default: over the network, to ``plugin.syncer``.

    Raises:
        TypeError: an argument is of another kind.
        ConfigError: a value is out of range.
        UnsupportedError: this way of training cannot be served.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        optimizer: Any,
        scheduler: Any = None,
        *,
        plugin: DiLoCoPlugin | None = None,
        total_steps: int | None = None,
        dataloader: Any = None,
        processing_class: Any = None,
        save_checkpoint: Callable[[], str | None] | None = None,
        link: Callable[[], LearnerLink] | None = None,
    ) -> None:
        check_loop(accelerator, model, optimizer, scheduler, dataloader, save_checkpoint)
        self._plugin = plugin_of(plugin)
        self._accelerator, self._model, self._optimizer, self._scheduler = accelerator, model, optimizer, scheduler
        self._total_steps = updates_of(total_steps)
        self._dataloader, self._processing_class = dataloader, processing_class
        self._save_checkpoint, self._make_link = save_checkpoint, link
        self._membership: Membership | None = None  # of this `with` block, or of the last one
        self._is_open = False
        self._num_updates = 0  # since the last step()
        self._loss: float | None = None
        self._order: dict[str, int] | None = None  # of the data; from a checkpoint, or as it was when training began
        self._resumes = False
        self._has_warned = False  # that it cannot save
        self._register()
        if not self._plugin.syncer:
            logger.info("hf-diloco is off: no syncer address (HF_DILOCO_SYNCER); training goes on without it.")
            return
        if link is None:
            check_token(self._plugin)
        is_deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED
        if is_deepspeed and not isinstance(optimizer, AcceleratedOptimizer):
            raise UnsupportedError(
                f"DiLoCo got an optimizer ({type(optimizer).__name__}) that does not know of DeepSpeed's steps. Pass "
                "model, optimizer and scheduler as accelerator.prepare gave them back."
            )

    def __enter__(self) -> DiLoCo:
        if not self._plugin.syncer:
            return self
        trains_on(self._plugin, getattr(self._dataloader, "dataset", None))
        member = Membership(
            self._accelerator.unwrap_model(self._model, keep_torch_compile=False),
            self._plugin,
            total_steps=self._total_steps,
            processing_class=self._processing_class,
            optimizer=self._optimizer,
            scheduler=self._scheduler,
            link=self._make_link() if self._make_link else None,
            is_training=lambda frame: True,  # until __exit__, whatever happens
        )
        member.join()
        try:
            self._order_data(member)
            warn_if_stuck(self._scheduler, stacklevel=2)
            self._began_at = num_steps(self._scheduler)
            self._stop_counting = around_steps(inner_optimizer(self._optimizer), after=self._count)
        except BaseException:  # then there is no __exit__
            member.end()
            raise
        self._membership, self._is_open, self._num_updates = member, True, 0
        return self

    def step(self, loss: float | None = None) -> bool:
        """Ship and apply what is due, if an update was made. Call it last in the loop, after each batch.

        Args:
            loss: the training loss, for the syncer's table.

        Returns:
            False when training should end: the run is over and the model holds the global parameters, or this learner
            has left.

        Raises:
            DiLoCoError: there is a syncer, and this is before the ``with`` block.
        """
        member = self._membership
        if member is None:
            if self._plugin.syncer:
                raise DiLoCoError(
                    "diloco.step() before the run was joined: nothing would be synced. Put the loop into the block "
                    "`with DiLoCo(...) as diloco:`."
                )
            return True
        if member.has_ended or not self._is_open:
            return False
        if loss is not None and math.isfinite(loss):
            self._loss = float(loss)
        num_updates, self._num_updates = self._num_updates, 0
        if num_updates:
            self._check_scheduler()
        elif self._accelerator.sync_gradients and getattr(self._optimizer, "step_was_skipped", False):
            member.step(was_skipped=True)
        goes_on = True
        while num_updates and goes_on:
            num_updates -= 1
            goes_on = member.step(loss=self._loss)
        if member.told_to_stop and self._accelerator.sync_gradients:  # what is accumulated goes into an update first
            self._end_preempted(member)
        if goes_on and self._accelerator.gradient_state.end_of_dataloader:
            member.end_pass()
        if goes_on and member.save_wanted:  # after that: with the shard that is read next
            self._save(member)
        return goes_on

    def leave(self, reason: str = "training ended early at this learner") -> None:
        """Early stopping: have merged what is not, and take leave. The others go on; the model keeps its values."""
        if self._membership is not None and self._is_open and not self._membership.has_ended:
            self._membership.leave(reason)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        member = self._membership
        if member is None or not self._is_open:
            return
        try:
            if error is None and not member.has_ended and not member.told_to_stop:
                member.end_loop()
            if error is None and member.told_to_stop:
                self._end_preempted(member)
        finally:
            self._close(member)

    # ------------------------------------------------------------------------------------------ what a script may ask

    @property
    def learner_id(self) -> int | None:
        """Number of this learner; None without a run."""
        return self._plugin.learner_id if self._plugin.syncer else None

    @property
    def holds_global(self) -> bool:
        """Whether the model holds the final global parameters."""
        return self._membership is not None and self._membership.holds_global

    @property
    def global_step(self) -> int:
        """The run's step, as far as this learner knows; 0 without a run."""
        return self._membership.learner.global_step if self._membership is not None else 0

    def metrics(self) -> dict[str, float]:
        """How this learner is doing, for ``accelerator.log``; empty without a run.

        See :func:`hf_diloco.learner.metrics.metrics`.
        """
        return self._membership.learner.metrics() if self._membership is not None else {}

    # ----------------------------------------------------------------------------------------- accelerate's checkpoints

    def state_dict(self) -> dict[str, int]:
        """What ``accelerator.save_state`` saves: order and shard of the data, and for people the run's step."""
        lease = lease_of(self._plugin)
        shard = {} if lease is None else {"shard": lease.shard}
        return {**(self._order or {}), **shard, "global_step": self.global_step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on reading the same shard (it is asked for) in the same order.

        Raises:
            DiLoCoError: the learner has joined already, and the model holds what the syncer sent.
        """
        if self._is_open:
            raise DiLoCoError(
                "accelerator.load_state inside `with DiLoCo(...)` would overwrite the parameters that the syncer sent. "
                "Call it after DiLoCo(...) is made and before the `with`."
            )
        self._order = {name: state[name] for name in ("seed", "from_step") if name in state} or None
        self._resumes = self._order is not None
        lease = lease_of(self._plugin)
        if lease is not None and "shard" in state:
            lease.move(state["shard"] % lease.num_shards)

    # --------------------------------------------------------------------------------------------------------- inside

    def _register(self) -> None:
        """For accelerate's checkpoints, in the place of the last one: a notebook's cell may run again."""
        objects = self._accelerator._custom_objects
        for index, known in enumerate(objects):
            if isinstance(known, DiLoCo):
                objects[index] = self
                return
        self._accelerator.register_for_checkpointing(self)

    def _count(self) -> None:
        if not getattr(inner_optimizer(self._optimizer), "overflow", False):  # DeepSpeed's, with fp16
            self._num_updates += 1

    def _order_data(self, member: Membership) -> None:
        assert self._plugin.learner_id is not None
        if not self._resumes:
            self._order = {"seed": torch.initial_seed(), "from_step": member.learner.global_step}
        self._resumes = False  # a second `with` begins anew
        assert self._order is not None
        reseed(self._dataloader, data_seed(self._order["seed"], self._plugin.learner_id, self._order["from_step"]))

    def _check_scheduler(self) -> None:
        """At the first update: has the scheduler stepped with it?"""
        began_at, self._began_at = self._began_at, None
        if began_at is not None and num_steps(self._scheduler) == began_at:
            warnings.warn(
                "the scheduler did not step with the first update. Call scheduler.step() once an update, before "
                "diloco.step(), or the learning rate will not be that of the run's step. A scheduler that goes by "
                "epochs cannot follow the run: leave it out of DiLoCo(...).",
                DiLoCoWarning,
                stacklevel=3,
            )

    def _save(self, member: Membership) -> None:
        """A part of a checkpoint of the whole run."""
        path = self._save_checkpoint() if self._save_checkpoint is not None else None
        if path is not None:
            member.saved(path)
        elif not self._has_warned:
            self._has_warned = True
            logger.warning("%s the syncer wants a checkpoint, but DiLoCo(save_checkpoint=...) gives none", member)

    def _end_preempted(self, member: Membership) -> NoReturn:
        member.drain()
        path = self._save_checkpoint() if self._save_checkpoint is not None else None
        self._close(member)
        what = "no checkpoint is saved" if path is None else f"its checkpoint is saved in {path}"
        logger.warning("%s %s; the process ends", member, what)
        member.preemption.exit()

    def _close(self, member: Membership) -> None:
        self._is_open = False
        self._stop_counting()
        member.end()
