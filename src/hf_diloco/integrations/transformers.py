"""Decoupled DiLoCo for ``transformers.Trainer``: one callback."""

from __future__ import annotations

import copy
import logging
import math
import tempfile
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import DefaultFlowCallback
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from hf_diloco.config import DiLoCoPlugin
from hf_diloco.errors import DiLoCoError, DiLoCoWarning, UnsupportedError
from hf_diloco.integrations.schedules import can_follow, follow
from hf_diloco.integrations.trainer_stack import end_training, save, serves, trainer_above
from hf_diloco.learner.data import data_seed
from hf_diloco.learner.learner import Learner
from hf_diloco.learner.parameters import ModelParameters
from hf_diloco.learner.preemption import Preemption
from hf_diloco.learner.tokens import TokenCounter
from hf_diloco.links.base import LearnerLink

logger = logging.getLogger(__name__)

_DATA = "hf-diloco data"  # in trainer_state.json


class DiLoCoCallback(TrainerCallback):
    """Makes a Trainer one learner of a Decoupled DiLoCo run.

    ``Trainer(..., callbacks=[DiLoCoCallback()])`` is all a script needs. When training begins it waits until the run
    starts, then trains on at its own pace; at step boundaries the callback ships and applies fragments. The learning
    rate and the end of training follow the run's clock (``global_step`` of the learner), while Trainer's own
    ``state.global_step`` goes on counting Trainer's own updates. When ``train()`` returns, the model holds the global
    parameters, so ``trainer.evaluate()`` and ``trainer.save_model()`` after it are about the global model; evaluation
    during training is about this learner's.

    What it changes for this learner, because each learner is a world of its own: ``args.output_dir`` becomes
    ``{output_dir}/learner-{id}``, ``args.run_name`` ends in ``-learner-{id}``, ``args.push_to_hub`` is off (only the
    syncer's export is pushed), and the order of the data depends on the learner's id as well as on ``args.data_seed``
    (or ``args.seed``).

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
        self._plugin = plugin or DiLoCoPlugin()
        self._make_link = link
        self._learner: Learner | None = None
        self._counter: TokenCounter | None = None
        self._close: weakref.finalize[..., Any] | None = None
        self._loss: float | None = None
        self._has_ended = False  # this train() needs no more of the learner
        self._holds_global = False  # ... because the model holds the final global values
        self._has_warned_of_schedule = False
        self._joint_step: int | None = None  # of the checkpoint of the whole run that is being saved
        self._preemption = self._new_preemption()
        self._saved_at = -1  # Trainer's step of its last checkpoint
        if not self._plugin.syncer:
            logger.info("hf-diloco is off: no syncer address (HF_DILOCO_SYNCER); training goes on without it.")

    def attach(self, trainer: Trainer) -> None:
        """Add it to a Trainer that exists already, before the reporters (``callbacks=[...]`` puts it behind them)."""
        callbacks = trainer.callback_handler.callbacks
        # Behind Trainer's own, which says at each step whether to evaluate, save and stop.
        callbacks.insert(1 if callbacks and isinstance(callbacks[0], DefaultFlowCallback) else 0, self)
        self.on_init_end(trainer.args, trainer.state, trainer.control)

    # ------------------------------------------------------------------------------------------------ Trainer's events

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Refuse what cannot work, and give this learner its own directory and run name."""
        if self._plugin.syncer:
            _check(args)
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
        if not self._plugin.syncer:
            return
        self.on_init_end(args, state, control)  # did not come if the callback was added later
        assert self._plugin.learner_id is not None
        self._loss, self._has_ended, self._holds_global, self._saved_at = None, False, False, -1
        self._learner = Learner(
            ModelParameters(model),
            self._plugin,
            total_steps=state.max_steps,
            steps_from_epochs=args.max_steps <= 0,
            files=_files(model, processing_class),
            optimizer=optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer,
            link=self._make_link() if self._make_link else None,
        )
        # Trainer does not call on_train_end when training raises: then the link ends with this object, or at exit.
        self._close = weakref.finalize(self, self._learner.close)
        self._preemption = self._new_preemption()
        try:
            self._preemption.watch()
            if not self._learner.join(interrupted=self._preemption.requested):
                self._drain()
                self._preemption.exit()
        except BaseException:  # Ctrl-C at the start gate, too
            self._end()
            raise
        self._order_data(args, state, train_dataloader)
        self._warn_of_schedule(lr_scheduler)
        follow(lr_scheduler, self._learner.global_step)
        self._counter = TokenCounter(model)
        self._counter.attach()

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        optimizer: Any = None,
        lr_scheduler: Any = None,
        **kwargs: Any,
    ) -> None:
        """Ship and apply what is due. Gradients are gone by now, and a checkpoint of this step is not yet written."""
        if self._learner is None or self._counter is None or self._has_ended:
            return
        is_last = control.should_training_stop and state.global_step >= state.max_steps
        tokens = self._counter.take(wait=is_last)
        goes_on = True
        if not getattr(optimizer, "step_was_skipped", False):  # fp16: the gradients overflowed, nothing was learned
            goes_on = self._learner.step(tokens, loss=self._loss, data_digest=self._counter.data_digest())
            follow(lr_scheduler, self._learner.global_step)
            if self._learner.starts_over():
                _forget_broken_state(optimizer)
            self._joint_step = self._learner.take_save_wanted()
            if self._joint_step is not None:
                control.should_save = True
        if is_last or not goes_on:
            # Here and not in on_train_end: before that, Trainer saves and evaluates, and may load its best model.
            self._finish()
        if not goes_on and not is_last:
            _stop(args, state, control)
        if self._preemption.requested():
            self._drain()
            control.should_training_stop = control.should_save = True
            control.should_evaluate = False

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """No evaluation of the epoch when there is no time for it."""
        if self._preemption.requested():
            control.should_evaluate = False

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Cut an evaluation short when there is no time for it."""
        if self._learner is not None and self._preemption.requested():
            self._drain()
            self._end_preempted(nobody_knows=True)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Remember that this step is on disk; tell the syncer if that is a part of a checkpoint of the whole run."""
        self._saved_at = state.global_step
        if self._learner is not None and self._joint_step is not None:
            path = Path(args.output_dir or ".").absolute() / f"checkpoint-{state.global_step}"
            self._learner.saved_checkpoint(self._joint_step, str(path))
            self._joint_step = None

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Remember the training loss, for the syncer's table."""
        loss = (logs or {}).get("loss")
        if isinstance(loss, int | float) and math.isfinite(loss):
            self._loss = float(loss)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Leave the run: with the global parameters at its end, with the local ones if training ended early."""
        if self._learner is None:
            return
        if not self._has_ended and not self._preemption.requested():
            if control.should_training_stop:
                self._leave("training ended early at this learner")
                warnings.warn(
                    "training ended early at this learner: what it had done is merged, and the others go on. Its model "
                    "keeps its local parameters. The global ones are in the syncer's run directory when the run has "
                    "ended (`model`), or by `hf-diloco export` before.",
                    DiLoCoWarning,
                    stacklevel=2,
                )
            else:  # the data ran out
                self._finish()
        if self._preemption.requested():
            self._drain()
        if self._holds_global and args.load_best_model_at_end and state.best_model_checkpoint:
            self._learner.restore()
            warnings.warn(
                "load_best_model_at_end: the model holds the run's global parameters, not this learner's best "
                f"checkpoint ({state.best_model_checkpoint}), which is still there.",
                DiLoCoWarning,
                stacklevel=2,
            )
        if self._preemption.requested():
            self._end_preempted()
        self._end()

    # --------------------------------------------------------------------------------------------------------- steps

    def _separate(self, args: TrainingArguments) -> None:
        """Give this learner its own directory and run name. Idempotent."""
        own, directory = f"learner-{self._plugin.learner_id}", Path(args.output_dir or "tmp_trainer")
        if directory.name != own:
            args.run_name = f"{args.run_name or directory.absolute().name}-{own}"
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

    def _order_data(self, args: TrainingArguments, state: TrainerState, dataloader: Any) -> None:
        """Give the data this learner's own order: a new one if it begins anew, the old one if Trainer resumes."""
        assert self._learner is not None
        assert self._plugin.learner_id is not None
        saved = cast(dict[str, Any], state.stateful_callbacks)  # it goes into Trainer's checkpoints and comes from them
        if state.global_step == 0:
            saved[_DATA] = {"from_step": self._learner.global_step}
        from_step = saved.get(_DATA, {}).get("from_step", 0)
        seed = args.seed if args.data_seed is None else args.data_seed
        _reseed(dataloader, data_seed(seed, self._plugin.learner_id, from_step))

    def _warn_of_schedule(self, scheduler: Any) -> None:
        if scheduler is not None and not can_follow(scheduler) and not self._has_warned_of_schedule:
            self._has_warned_of_schedule = True
            warnings.warn(
                f"the learning rate of {type(scheduler).__name__} follows this learner's own metrics and not the "
                "run's step: a learner that joins late begins at its first value. Use linear, cosine, "
                "warmup_stable_decay or another schedule of the step.",
                DiLoCoWarning,
                stacklevel=2,
            )

    def _finish(self) -> None:
        assert self._learner is not None
        self._holds_global = self._learner.finish(interrupted=self._preemption.requested)
        self._has_ended = self._holds_global or not self._preemption.requested()

    def _leave(self, reason: str, *, for_good: bool = True) -> None:
        assert self._learner is not None
        self._has_ended = True
        logger.info("%s leaves the run (%s); its model keeps the local parameters", self._identity(), reason)
        self._learner.leave(reason, drain_seconds=self._plugin.drain_seconds, for_good=for_good)

    # --------------------------------------------------------------------------------------------------- preemption

    def _new_preemption(self) -> Preemption:
        me = weakref.ref(self)  # a signal handler lives on when training raises, and this object should not
        return Preemption(lambda frame: serves(me(), frame))

    def _drain(self) -> None:
        """Ship what is not merged, and take leave. Once."""
        if self._has_ended:
            return
        logger.warning(
            "%s told to stop (%s): has what it did merged (for at most %.0f s), saves, and ends",
            self._identity(), self._preemption.reason, self._plugin.drain_seconds,
        )  # fmt: skip
        try:
            self._leave(f"told to stop ({self._preemption.reason})", for_good=False)
        except DiLoCoError as error:  # whatever it is, there is still a checkpoint to save
            logger.error("%s could not ship what is not merged: %s", self._identity(), error)

    def _end_preempted(self, *, nobody_knows: bool = False) -> NoReturn:
        """Save this step, unless Trainer has; let the other callbacks end; end the process.

        Args:
            nobody_knows: no callback has had its on_train_end; else those before this one have.
        """
        trainer, identity = trainer_above(), self._identity()
        assert trainer is not None, "only Trainer's events come here"
        if self._saved_at != trainer.state.global_step:
            save(trainer)
        self._end()
        end_training(trainer, after=None if nobody_knows else self)
        logger.warning("%s checkpoint %d is saved; the process ends", identity, trainer.state.global_step)
        self._preemption.exit()

    def _end(self) -> None:
        """Remove the hooks and close the link. Idempotent."""
        if self._counter is not None:
            self._counter.detach()
            self._counter = None
        if self._close is not None:
            self._close()  # runs Learner.close once, now or earlier
            self._close = None
        self._preemption.end()
        self._learner = None

    def _identity(self) -> str:
        step = self._learner.global_step if self._learner else 0
        return f"[learner {self._plugin.learner_id} · step {step}]"


def _check(args: TrainingArguments) -> None:
    if args.world_size > 1:
        raise UnsupportedError(
            f"this learner has {args.world_size} processes; learners of several processes come with the next release. "
            "Start one learner for each process: `hf-diloco launch --num-learners N`, or `accelerate launch "
            "--num_processes 1` with its own HF_DILOCO_LEARNER_ID each."
        )
    if args.n_gpu > 1:
        raise UnsupportedError(
            f"Trainer would spread this learner over {args.n_gpu} GPUs with nn.DataParallel. Start it through "
            "`accelerate launch --num_processes 1`, or set CUDA_VISIBLE_DEVICES to one of them."
        )
    if args.deepspeed_plugin is not None:
        raise UnsupportedError("DeepSpeed is not supported yet. Remove `deepspeed` from the training arguments.")


def _stop(args: TrainingArguments, state: TrainerState, control: TrainerControl) -> None:
    """End training at this step as Trainer does at its own last one: evaluate and save, if that is done by steps."""
    control.should_training_stop = True
    if args.eval_strategy == IntervalStrategy.STEPS and args.eval_delay <= state.global_step:
        control.should_evaluate = True
    if args.save_strategy == SaveStrategy.STEPS:
        control.should_save = True


def _forget_broken_state(optimizer: Any) -> None:
    """Moments that are NaN or infinite would break the model again at the next step; the others are kept."""
    state = getattr(optimizer, "state", {})
    for parameter in list(state):
        if any(torch.is_tensor(value) and not bool(torch.isfinite(value).all()) for value in state[parameter].values()):
            del state[parameter]


def _reseed(dataloader: Any, seed: int) -> None:
    """Make the order of the data this learner's own.

    ``args.data_seed`` cannot do it: it has been read before the first event. The sampler can, until the first batch
    is drawn. A dataset without a sampler (iterable) keeps its order: it differs by its shard.
    """
    while dataloader is not None:  # then its batch sampler, what that wraps, and last the sampler of examples
        batches = getattr(dataloader, "batch_sampler", None)
        dataloader = getattr(dataloader, "sampler", None) if batches is None else batches
        if hasattr(dataloader, "initial_seed"):  # accelerate's, Trainer's default: seeded anew for each epoch
            dataloader.initial_seed = seed
        elif hasattr(dataloader, "generator"):  # None would be the process-wide one, seeded alike at all learners
            dataloader.generator = torch.Generator().manual_seed(seed)


def _files(model: nn.Module, processing_class: Any) -> dict[str, bytes]:
    """What belongs beside the weights of a saved model: configuration and tokenizer or processor files, by name."""
    with tempfile.TemporaryDirectory(prefix="hf-diloco-") as directory:
        if isinstance(model, PreTrainedModel):
            config = copy.deepcopy(model.config)  # as model.save_pretrained does, without its side effects
            config.architectures = [type(model).__name__]
            config.dtype = str(model.dtype).removeprefix("torch.")
            config.save_pretrained(directory)
            if model.can_generate() and model.generation_config is not None:
                model.generation_config.save_pretrained(directory)
        if hasattr(processing_class, "save_pretrained"):
            processing_class.save_pretrained(directory)
        return {path.name: path.read_bytes() for path in sorted(Path(directory).iterdir()) if path.is_file()}
