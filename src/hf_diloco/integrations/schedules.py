"""Learning rate schedules that go by the run's clock."""

from __future__ import annotations

import warnings
from typing import Any

from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau


def can_follow(scheduler: Any) -> bool:
    """Whether its learning rate depends on steps alone, and not on what the loss did (plateau, greedy)."""
    return isinstance(scheduler, LRScheduler) and not isinstance(scheduler, ReduceLROnPlateau)


def follow(scheduler: Any, global_step: int) -> None:
    """Set the learning rate to that of ``global_step``, as if that many steps had been taken."""
    if not can_follow(scheduler) or scheduler.last_epoch == global_step:
        return
    with warnings.catch_warnings():
        # torch warns when a scheduler steps before its optimizer ever did; here that is what is meant.
        warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step", category=UserWarning)
        if isinstance(scheduler, LambdaLR):  # a function of the step alone: all of Trainer's schedules but two
            scheduler.last_epoch = global_step - 1
            scheduler.step()
        else:
            while scheduler.last_epoch < global_step:  # each value is made from the one before
                scheduler.step()
