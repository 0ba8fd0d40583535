"""What a script gives to ``DiLoCo`` and ``DiLoCoCallback``, looked at where it is given."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderStateMixin
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from hf_diloco.config import DiLoCoPlugin
from hf_diloco.errors import ConfigError
from hf_diloco.learner.zero import is_zero

_ORDER = "Give them in this order: DiLoCo(accelerator, model, optimizer, scheduler)."


def plugin_of(plugin: Any) -> DiLoCoPlugin:
    """The plugin; that of the environment if there is none.

    Raises:
        TypeError: it is something else.
    """
    if plugin is not None and not isinstance(plugin, DiLoCoPlugin):
        raise TypeError(
            f"plugin must be a DiLoCoPlugin, not {_shown(plugin)}. Give DiLoCoPlugin(syncer='host:port', "
            "learner_id=...), or nothing and set HF_DILOCO_SYNCER. What is the run's is set at the syncer."
        )
    return plugin or DiLoCoPlugin()


def check_loop(
    accelerator: Any, model: Any, optimizer: Any, scheduler: Any, dataloader: Any, save_checkpoint: Any
) -> None:
    """Each is of its kind.

    Raises:
        TypeError: one is not.
    """
    if not isinstance(accelerator, Accelerator):
        raise TypeError(f"accelerator must be an accelerate.Accelerator, not {_shown(accelerator)}. {_ORDER}")
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {_shown(model)}. {_ORDER}")
    if isinstance(optimizer, list | tuple | dict):
        raise TypeError(
            f"optimizer must be one optimizer, not {_shown(optimizer)}: its updates are counted. Make one of all "
            "parameters; parts of the model may be groups of it, with settings of their own."
        )
    if not callable(getattr(optimizer, "step", None)) or not hasattr(optimizer, "param_groups"):
        raise TypeError(f"optimizer must be one of torch's, as prepared, not {_shown(optimizer)}. {_ORDER}")
    is_optimizer = isinstance(scheduler, torch.optim.Optimizer | AcceleratedOptimizer)
    if scheduler is not None and (is_optimizer or not callable(getattr(scheduler, "step", None))):
        raise TypeError(f"scheduler must be a learning rate scheduler, not {_shown(scheduler)}. {_ORDER}")
    if isinstance(dataloader, DataLoader) and not isinstance(dataloader, DataLoaderStateMixin):
        # Its order may not reach the one that the loop reads, and the end of a pass over it could not be seen.
        raise TypeError(
            f"dataloader must be as accelerator.prepare gave it back, not {_shown(dataloader)} from before. Write "
            "`dataloader = accelerator.prepare(dataloader)`, loop over that one, and give it here."
        )
    if save_checkpoint is not None and not callable(save_checkpoint):
        raise TypeError(
            f"save_checkpoint must be a function, not {_shown(save_checkpoint)}. Give "
            "save_checkpoint=lambda: accelerator.save_state(directory)."
        )


def updates_of(total_steps: Any) -> int | None:
    """The number of updates, as an int.

    Raises:
        TypeError: it is no whole number.
        ConfigError: it is not positive.
    """
    if total_steps is None:
        return None
    try:
        number = operator.index(total_steps)
    except TypeError:
        raise TypeError(f"total_steps must be a whole number of updates (int), not {_shown(total_steps)}.") from None
    if number < 1:
        raise ConfigError(
            f"total_steps={number} is out of range; it must be at least 1. Leave it out to train as long as the run."
        )
    return number


def check_optimizer(optimizer: Any, trainable: Mapping[str, Tensor]) -> None:
    """Refuse an optimizer that certainly trains another model: what this one contributes would be nothing.

    Wrappers may keep the parameters they update apart from the model's (DeepSpeed's, sharded or low-precision models
    with fp32 masters), so only an optimizer of torch over an unsharded fp32 model is judged.

    Raises:
        ConfigError: none of its parameters is one of the model's trainable ones.
    """
    if not isinstance(optimizer, torch.optim.Optimizer) or not type(optimizer).__module__.startswith("torch.optim."):
        return
    tensors = trainable.values()
    if any(isinstance(one, DTensor) or is_zero(one) or one.dtype != torch.float32 for one in tensors):
        return
    known = {id(tensor) for tensor in tensors}
    if any(id(tensor) in known for group in optimizer.param_groups for tensor in group["params"]):
        return
    raise ConfigError(
        f"none of the parameters of the optimizer ({type(optimizer).__name__}) is a trainable one of the model: this "
        "learner would contribute nothing. Make the optimizer from model.parameters() of this very model, and give "
        "both as accelerator.prepare gave them back."
    )


def _shown(value: Any) -> str:
    """Its type, and itself if that is short."""
    return f"{value!r}" if isinstance(value, str | int | float | bytes | type) else f"a {type(value).__name__}"
