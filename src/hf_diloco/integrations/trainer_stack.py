"""The Trainer that is at work, for what its events cannot do. They do not name it, but it stands on the stack."""

from __future__ import annotations

import sys
from types import FrameType

from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import DefaultFlowCallback


def trainer_above(frame: FrameType | None = None) -> Trainer | None:
    """The innermost Trainer among the callers of ``frame`` (default: of the caller); None if there is none."""
    frame = frame or sys._getframe(1)
    while frame is not None and not isinstance(frame.f_locals.get("self"), Trainer):
        frame = frame.f_back
    return None if frame is None else frame.f_locals["self"]


def put_first(trainer: Trainer, callback: TrainerCallback) -> None:
    """Have ``callback`` called before the reporters, which then see what it adds to the logs.

    But after Trainer's own, which says at each step whether to evaluate, save and stop.
    """
    handler = trainer.callback_handler
    others = [one for one in handler.callbacks if one is not callback]
    place = 1 if others and isinstance(others[0], DefaultFlowCallback) else 0
    handler.callbacks = [*others[:place], callback, *others[place:]]  # a new list: an event may be on its way through


def serves(callback: TrainerCallback | None, frame: FrameType | None) -> bool:
    """Whether with this frame being executed a Trainer is at work that will call ``callback`` again."""
    trainer = trainer_above(frame) if callback is not None and frame is not None else None
    return trainer is not None and callback in trainer.callback_handler.callbacks


def save(trainer: Trainer) -> None:
    """Write a checkpoint of the step that training is at, as Trainer does when a callback has set ``should_save``."""
    assert trainer.model is not None
    trainer._save_checkpoint(trainer.model, trial=None)
    trainer.callback_handler.on_save(trainer.args, trainer.state, trainer.control)


def end_training(trainer: Trainer, *, after: TrainerCallback | None) -> None:
    """Give callbacks their ``on_train_end``: those that come after ``after``, or all."""
    handler = trainer.callback_handler
    everybody = handler.callbacks
    handler.callbacks = everybody[everybody.index(after) + 1 :] if after is not None else everybody
    try:
        handler.on_train_end(trainer.args, trainer.state, trainer.control)
    finally:
        handler.callbacks = everybody
