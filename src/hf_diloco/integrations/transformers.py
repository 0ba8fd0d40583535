"""Decoupled DiLoCo for ``transformers.Trainer``: one callback."""

from __future__ import annotations

import logging
import math
import os
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, cast

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import IntervalStrategy, SaveStrategy, SchedulerType

from hf_diloco.config import DiLoCoPlugin
from hf_diloco.errors import ConfigError, DiLoCoWarning, UnsupportedError
from hf_diloco.integrations.arguments import plugin_of
from hf_diloco.integrations.membership import Membership, check_token, reseed
from hf_diloco.integrations.schedules import warn_if_stuck, warn_of_length
from hf_diloco.integrations.shard_position import ShardPosition
from hf_diloco.integrations.trainer_stack import end_training, put_first, save, serves, trainer_above
from hf_diloco.learner.data import data_seed
from hf_diloco.learner.lease import lease_of, trains_on
from hf_diloco.links.base import LearnerLink

logger = logging.getLogger(__name__)

_LAST_WORDS = {"train_runtime", "train_loss", "total_flos"}  # what Trainer logs when it has made its last update
_DATA = "hf-diloco data"  # in trainer_state.json


class DiLoCoCallback(TrainerCallback):
    """Makes a Trainer one learner of a Decoupled DiLoCo run.

    ``Trainer(..., callbacks=[DiLoCoCallback()])`` is all a script needs. When training begins it waits until the run
    starts, then trains on at its own pace; at step boundaries the callback ships and applies fragments. The learning
    rate and the end of training follow the run's clock (``global_step`` of the learner), while Trainer's own
    ``state.global_step`` goes on counting Trainer's own updates. When ``train()`` returns, the model holds the global
    parameters, so ``trainer.evaluate()`` and ``trainer.save_model()`` after it are about the global model; evaluation
    during training is about this learner's.

    It adds metrics of the run to Trainer's training logs (:func:`hf_diloco.learner.metrics.metrics`), and to those of
    an evaluation whether the model was the global one (``eval_of_global_model``).

    What it changes for this learner, because each learner is a world of its own: ``args.output_dir`` becomes
    ``{output_dir}/learner-{id}``, ``args.run_name`` ends in ``-learner-{id}`` (what comes before is the group in
    Weights & Biases, if ``WANDB_RUN_GROUP`` is not set), ``args.push_to_hub`` is off (all would push to one repository;
    push what the syncer exports, which nothing does by itself), and the order of the data depends on the learner's id
    as well as on ``args.data_seed`` (or ``args.seed``).

    While it trains, SIGTERM (and the end of an ``accelerate launch`` above it) makes this learner ship what it has,
    take leave and save a Trainer checkpoint of the step it is at; then ``train()`` does not return, but raises
    ``SystemExit(0)``, so that nothing of the script after it uses up the time that is left. A second SIGTERM, 3 s or
    more after the first, ends the process at once. Ctrl-C is ``KeyboardInterrupt``, as ever.

    Without a syncer address it does nothing, and says so once.

    Args:
        plugin: Where the syncer is and who this learner is. Default: ``DiLoCoPlugin()``, that is, the environment.
        link: Makes the link to the syncer; for tests and for learners that are threads of one process. Default: over
            the network, to ``plugin.syncer``.
    """

    def __init__(self, plugin: DiLoCoPlugin | None = None, *, link: Callable[[], LearnerLink] | None = None) -> None:
        self._plugin = plugin_of(plugin)
        self._make_link = link
        self._membership: Membership | None = None  # of the train() that is at work
        self._position: ShardPosition | None = None  # in a data set that was given to shard_dataset
        self._loss: float | None = None
        self._has_warned_of_schedule = False
        self._saved_at = -1  # Trainer's step of its last checkpoint
        self._ended_with_global: bool | None = None  # what train() left in the model; None before it has ended
        if not self._plugin.syncer:
            logger.info("hf-diloco is off: no syncer address (HF_DILOCO_SYNCER); training goes on without it.")
        elif link is None:
            check_token(self._plugin)

    def attach(self, trainer: Trainer) -> None:
        """Add it to a Trainer that exists already."""
        put_first(trainer, self)
        _check_alone(trainer)
        self.on_init_end(trainer.args, trainer.state, trainer.control)

    # ------------------------------------------------------------------------------------------------ Trainer's events

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Refuse what cannot work, and give this learner its own directory and run name."""
        if self._plugin.syncer:
            _check(args)
            _check_alone(trainer_above())
            self._separate(args)

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: Any = None,
        processing_class: Any = None,
        optimizer: Any = None,
        lr_scheduler: Any = None,
        train_dataloader: Any = None,
        **kwargs: Any,
    ) -> None:
        """Join the run; blocks until it starts. Called again after an out-of-memory retry or by a second train()."""
        self._end()
        self._ended_with_global = None
        if not self._plugin.syncer:
            return
        self.on_init_end(args, state, control)  # did not come if the callback was added later
        self._loss, self._saved_at = None, -1
        trains_on(self._plugin, getattr(train_dataloader, "dataset", None))
        me = weakref.ref(self)  # a signal handler lives on when training raises, and this object should not
        member = Membership(
            model,
            self._plugin,
            total_steps=state.max_steps,
            steps_from_epochs=args.max_steps <= 0,
            processing_class=processing_class,
            optimizer=optimizer,
            scheduler=lr_scheduler,
            link=self._make_link() if self._make_link else None,
            is_training=lambda frame: serves(me(), frame),
        )
        lease = lease_of(self._plugin)
        self._position = ShardPosition(lease, args, state) if lease is not None else None
        member.join()
        self._membership = member
        depends_on_length = args.max_steps <= 0 and args.lr_scheduler_type != SchedulerType.CONSTANT
        if depends_on_length and state.is_world_process_zero:
            warn_of_length(state.max_steps, member.learner.total_steps, stacklevel=2)
        epochs = self._position.begin(member, state, train_dataloader) if self._position is not None else 0
        self._order_data(args, state, train_dataloader, epochs)
        self._has_warned_of_schedule = self._has_warned_of_schedule or warn_if_stuck(lr_scheduler, stacklevel=2)
        if trainer := trainer_above():
            put_first(trainer, self)

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        """Ship and apply what is due. Gradients are gone by now, and a checkpoint of this step is not yet written."""
        member = self._membership
        if member is None or member.has_ended:
            return
        is_last = control.should_training_stop and state.global_step >= state.max_steps
        # It ends here and not in on_train_end: before that, Trainer saves and evaluates, and may load its best model.
        goes_on = member.step(
            loss=self._loss, is_last=is_last, was_skipped=getattr(optimizer, "step_was_skipped", False)
        )
        if member.save_wanted:
            control.should_save = True
        if not goes_on and not is_last:
            _stop(args, state, control)
        if member.told_to_stop:
            member.drain()
            control.should_training_stop = control.should_save = True
            control.should_evaluate = False

    def on_epoch_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        train_dataloader: Any = None,
        **kwargs: Any,
    ) -> None:
        """Take the shard for the next pass over the data; no evaluation when there is no time for it."""
        if self._membership is None:
            return
        if self._membership.told_to_stop:
            control.should_evaluate = False
        elif self._position is not None and not self._membership.has_ended:
            self._position.end_pass(self._membership, state, control, train_dataloader)

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Cut an evaluation short when there is no time for it."""
        if self._membership is not None and self._membership.told_to_stop:
            self._membership.drain()
            self._end_preempted(nobody_knows=True)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Remember that this step is on disk; tell the syncer if that is a part of a checkpoint of the whole run."""
        self._saved_at = state.global_step
        if self._membership is not None:
            self._membership.saved(f"{args.output_dir or '.'}/checkpoint-{state.global_step}")

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add to the logs what this learner knows of the run; remember the training loss, for the syncer's table."""
        member, logs = self._membership, {} if logs is None else logs
        is_evaluation = not logs.keys() & {"loss", "train_loss"} and any(name.endswith("_runtime") for name in logs)
        if member is None:
            if is_evaluation and self._ended_with_global is not None:
                _add(state, logs, {"eval_of_global_model": int(self._ended_with_global)})
            return
        if logs.keys() >= _LAST_WORDS:  # Trainer may load its best checkpoint next: no parameters to be merged
            self._end_loop(args, state, control)
        loss = logs.get("loss")
        if isinstance(loss, int | float) and math.isfinite(loss):
            self._loss = float(loss)
        added: dict[str, float] = {}
        if "loss" in logs or "train_loss" in logs:
            added = member.learner.metrics()
        elif is_evaluation:
            added = {"eval_of_global_model": int(member.holds_global)}
        _add(state, logs, added)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Leave the run: with the global parameters at its end, with the local ones if training ended early."""
        member = self._membership
        if member is None:
            return
        self._end_loop(args, state, control)  # unless this Trainer's own log has said it
        if member.holds_global and args.load_best_model_at_end and state.best_model_checkpoint:
            member.learner.restore()
            warnings.warn(
                "load_best_model_at_end: the model holds the run's global parameters, not this learner's best "
                f"checkpoint ({state.best_model_checkpoint}), which is still there.",
                DiLoCoWarning,
                stacklevel=2,
            )
        if member.told_to_stop:
            self._end_preempted()
        self._end()

    # ------------------------------------------------------------------------------------------------- what they need

    def _end_loop(self, args: TrainingArguments, state: TrainerState, control: TrainerControl) -> None:
        """No more updates are made: have merged what is not, while the model holds it. Idempotent."""
        member = self._membership
        assert member is not None
        if not member.has_ended and not member.told_to_stop:
            if control.should_training_stop:
                member.leave("training ended early at this learner")
                best = state.best_model_checkpoint if args.load_best_model_at_end else None
                keeps = f"is its best checkpoint ({best})" if best else "keeps its local parameters"
                warnings.warn(
                    "training ended early at this learner: what it had done is merged, and the others go on. Its model "
                    f"{keeps}. The global parameters are in the syncer's run directory when the run has ended "
                    "(`model`), or by `hf-diloco export` before.",
                    DiLoCoWarning,
                    stacklevel=3,
                )
            else:  # the data ran out
                member.end_loop()
        if member.told_to_stop:
            member.drain()

    def _separate(self, args: TrainingArguments) -> None:
        """Give this learner its own directory and run name. Idempotent."""
        own, directory = f"learner-{self._plugin.learner_id}", Path(args.output_dir or "tmp_trainer")
        if directory.name != own:
            name = args.run_name or directory.absolute().name
            if "wandb" in (args.report_to or ()):  # which Trainer starts after this event
                os.environ.setdefault("WANDB_RUN_GROUP", name)
            args.run_name = f"{name}-{own}"
            args.output_dir = str(directory / own)
            if args.should_save:
                (directory / own).mkdir(parents=True, exist_ok=True)
        if args.push_to_hub:
            args.push_to_hub = False
            warnings.warn(
                "push_to_hub is off for this learner: all learners would push to one repository. Push what the syncer "
                "exports (the directory `model` in its run directory, or `hf-diloco export`).",
                DiLoCoWarning,
                stacklevel=2,
            )

    def _order_data(self, args: TrainingArguments, state: TrainerState, dataloader: Any, epochs: int) -> None:
        """Give the data this learner's own order: a new one if it begins anew, the old one if Trainer resumes.

        Args:
            args: of the Trainer.
            state: of the Trainer.
            dataloader: of the training data.
            epochs: that were begun besides those that Trainer counts; samplers add the epoch to the seed.
        """
        assert self._membership is not None
        assert self._plugin.learner_id is not None
        saved = cast(dict[str, Any], state.stateful_callbacks)  # it goes into Trainer's checkpoints and comes from them
        if state.global_step == 0:
            saved[_DATA] = {"from_step": self._membership.learner.global_step}
        from_step = saved.get(_DATA, {}).get("from_step", 0)
        seed = args.seed if args.data_seed is None else args.data_seed
        # args.data_seed has been read before the first event: too late to set it
        reseed(dataloader, data_seed(seed, self._plugin.learner_id, from_step) + epochs)

    def _end_preempted(self, *, nobody_knows: bool = False) -> NoReturn:
        """Save this step, unless Trainer has; let the other callbacks end; end the process.

        Args:
            nobody_knows: no callback has had its on_train_end; else those before this one have.
        """
        trainer, member = trainer_above(), self._membership
        assert trainer is not None, "only Trainer's events come here"
        assert member is not None
        if self._saved_at != trainer.state.global_step:
            save(trainer)
        self._end()
        end_training(trainer, after=None if nobody_knows else self)
        logger.warning("%s checkpoint %d is saved; the process ends", member, trainer.state.global_step)
        member.preemption.exit()

    def _end(self) -> None:
        """End the membership, if there is one, and give the arguments back. Idempotent."""
        if self._position is not None:
            self._position.end()
        if self._membership is not None:
            self._membership.end()
            self._ended_with_global = self._membership.holds_global
            self._membership = None


def _check(args: TrainingArguments) -> None:
    if args.n_gpu > 1:
        raise UnsupportedError(
            f"Trainer would spread this learner over {args.n_gpu} GPUs with nn.DataParallel. Start it through "
            "`accelerate launch --num_processes 1`, or set CUDA_VISIBLE_DEVICES to one of them."
        )


def _add(state: TrainerState, logs: dict[str, Any], added: dict[str, float]) -> None:
    logs.update(added)
    if state.log_history and state.log_history[-1].get("step") == state.global_step:
        state.log_history[-1].update(added)  # Trainer has copied the logs before this event


def _check_alone(trainer: Trainer | None) -> None:
    """A Trainer is one learner."""
    callbacks = trainer.callback_handler.callbacks if trainer is not None else []
    ours = [one for one in callbacks if isinstance(one, DiLoCoCallback) and one._plugin.syncer]
    if len(ours) > 1:
        raise ConfigError(
            f"this Trainer has {len(ours)} DiLoCoCallbacks, and can be only one learner. Give it one: "
            "callbacks=[DiLoCoCallback()]."
        )


def _stop(args: TrainingArguments, state: TrainerState, control: TrainerControl) -> None:
    """End training at this step as Trainer does at its own last one: evaluate and save, if that is done by steps."""
    control.should_training_stop = True
    if args.eval_strategy == IntervalStrategy.STEPS and args.eval_delay <= state.global_step:
        control.should_evaluate = True
    if args.save_strategy == SaveStrategy.STEPS:
        control.should_save = True
