"""What belongs beside the weights of a saved model."""

from __future__ import annotations

import copy
import re
import tempfile
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from hf_diloco.core.model_notes import NOTES_FILE, ModelNotes
from hf_diloco.learner.adapters import adapter_name
from hf_diloco.learner.parameters import ModelParameters

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def model_files(parameters: ModelParameters, processing_class: Any = None) -> dict[str, bytes]:
    """Configuration, generation configuration, tokenizer or processor files by name, and the :class:`ModelNotes`.

    Args:
        parameters: of the model.
        processing_class: tokenizer or processor, if there is one.
    """
    model = parameters.model
    with tempfile.TemporaryDirectory(prefix="hf-diloco-") as directory:
        if parameters.adapter_names is not None:
            _save_adapter_config(model, directory)
        elif isinstance(model, PreTrainedModel):
            config = copy.deepcopy(model.config)  # as model.save_pretrained does, without its side effects
            config.architectures = [_class(model).__name__]
            config.dtype = str(model.dtype).removeprefix("torch.")
            config.save_pretrained(directory)
            if model.can_generate() and model.generation_config is not None:
                model.generation_config.save_pretrained(directory)
        if hasattr(processing_class, "save_pretrained"):
            processing_class.save_pretrained(directory)
        files = {path.name: path.read_bytes() for path in sorted(Path(directory).iterdir()) if path.is_file()}
    notes = ModelNotes(base_model=_base_model(model), adapter_names=parameters.adapter_names)
    return {**files, NOTES_FILE: notes.to_bytes()}


def _save_adapter_config(model: Any, directory: str) -> None:
    """``adapter_config.json`` as ``PeftModel.save_pretrained`` writes it."""
    config = copy.deepcopy(model.peft_config[adapter_name(model)])
    base = model.get_base_model()
    config.base_model_name_or_path = config.base_model_name_or_path or getattr(base, "name_or_path", None) or None
    config.inference_mode = True
    mapping = {"base_model_class": _class(base).__name__, "parent_library": _class(base).__module__}
    config.save_pretrained(directory, auto_mapping_dict=mapping if config.task_type is None else None)


def _class(model: nn.Module) -> type:
    """The user's class: FSDP2 gives the model one of its own, derived from it."""
    return next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))


def _base_model(model: nn.Module) -> str | None:
    """Name on the hub; a path of this machine means nothing to others."""
    name = getattr(getattr(model, "config", None), "_name_or_path", None)
    return name if name and _HUB_NAME.fullmatch(name) and not Path(name).exists() else None
