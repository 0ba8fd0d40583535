"""Learning rate schedules that go by the run's clock."""

from __future__ import annotations

import warnings
from typing import Any

from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import AcceleratorState
from accelerate.utils.deepspeed import DeepSpeedSchedulerWrapper
from torch.optim.lr_scheduler import ChainedScheduler, LambdaLR, LRScheduler, ReduceLROnPlateau

from hf_diloco.errors import DiLoCoWarning

LENGTH_TOLERANCE = 0.05  # of the run's steps: shards are not quite alike


def follow(scheduler: Any, global_step: int) -> None:
    """Set the learning rate to that of ``global_step``, as if that many updates had been made."""
    has_made, (scheduler, steps_per_update) = num_steps(scheduler), _unwrap(scheduler)
    to_make = global_step * steps_per_update
    if has_made is None or has_made == to_make:
        return
    if _is_deepspeeds_own(scheduler):
        scheduler.step(to_make - 1)
        return
    with warnings.catch_warnings():
        # torch warns when a scheduler steps before its optimizer ever did; here that is what is meant.
        warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step", category=UserWarning)
        if isinstance(scheduler, LambdaLR):  # a function of the step alone: all of Trainer's schedules but two
            scheduler.last_epoch = to_make - 1
            scheduler.step()
        else:
            for _ in range(has_made, to_make):  # each value is made from the one before
                scheduler.step()


def warn_if_stuck(scheduler: Any, *, stacklevel: int) -> bool:
    """Warn of a scheduler that cannot follow the run; returns whether it did."""
    if scheduler is None or num_steps(scheduler) is not None:
        return False
    warnings.warn(
        f"the learning rate of {type(scheduler).__name__} follows this learner's own metrics and not the run's step: a "
        "learner that joins late begins at its first value. Use linear, cosine, warmup_stable_decay or another "
        "schedule of the step.",
        DiLoCoWarning,
        stacklevel=stacklevel + 1,
    )
    return True


def warn_of_length(own_steps: int, run_steps: int, *, stacklevel: int) -> None:
    """Warn of epochs that come to another number of steps than the run has: the schedule was made for that number."""
    if abs(own_steps - run_steps) <= LENGTH_TOLERANCE * run_steps:
        return
    warnings.warn(
        f"the epochs of this learner come to {own_steps} steps, the run has {run_steps}. Its learning rate schedule is "
        f"made for {own_steps}, so that at the same step its rate is not that of other learners, and it trains no "
        f"longer than the shorter of both. Set max_steps={run_steps} in the training arguments of every learner; for "
        "another length, begin a new run: start the syncer with --total-steps, and give every learner the same "
        "max_steps.",
        DiLoCoWarning,
        stacklevel=stacklevel + 1,
    )


def num_steps(scheduler: Any) -> int | None:
    """How often it has stepped; None if there is none, or its rate depends on what the loss did (plateau, greedy)."""
    scheduler = _unwrap(scheduler)[0]
    if _is_deepspeeds_own(scheduler):
        return int(scheduler.last_batch_iteration) + 1
    if isinstance(scheduler, ChainedScheduler):  # it has no count of its own; all that are in it step together
        return num_steps(scheduler._schedulers[0])
    is_of_steps = isinstance(scheduler, LRScheduler) and not isinstance(scheduler, ReduceLROnPlateau)
    return scheduler.last_epoch if is_of_steps else None


def _is_deepspeeds_own(scheduler: Any) -> bool:
    """Whether it is one of those that DeepSpeed's configuration names: WarmupLR, OneCycle, ..."""
    return hasattr(scheduler, "last_batch_iteration")


def _unwrap(scheduler: Any) -> tuple[Any, int]:
    """The scheduler itself, and how many of its steps belong to one update: Accelerate's makes one a process."""
    if not isinstance(scheduler, AcceleratedScheduler):
        return scheduler, 1
    by_engine = isinstance(scheduler, DeepSpeedSchedulerWrapper)
    once = by_engine or scheduler.split_batches or not scheduler.step_with_optimizer
    return scheduler.scheduler, 1 if once else AcceleratorState().num_processes
