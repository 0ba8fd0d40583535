"""The global model, written as ``from_pretrained`` loads it."""

from __future__ import annotations

import json
import logging
import os
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_diloco.core.model_notes import NOTES_FILE, ModelNotes
from hf_diloco.errors import DiLoCoError, DiLoCoWarning
from hf_diloco.syncer.checkpoint import check_plain_name, replace_directory
from hf_diloco.syncer.model_card import model_card

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

_MAX_SHARD_SIZE = "5GB"
_WEIGHT_ENDINGS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".pkl")


def export_model(
    values: Mapping[str, Tensor],
    constants: Mapping[str, Tensor],
    files: Mapping[str, bytes],
    out: Path,
    facts: Mapping[str, Any] | None = None,
) -> None:
    """Write the model to ``out``, exactly these values, floating ones in fp32.

    Of a PEFT model only the adapter is written, as PEFT does. Else the names in the files are those that the hub uses
    for this architecture (the experts of Mixtral one by one, for example), so that other tools read them too. A model
    that is not one of transformers' is written under the names that it has in memory, with a warning. ``out`` is whole
    when this returns, and as it was when this raises.

    Args:
        values: trained parameters under their canonical names in memory; tied ones once.
        constants: frozen parameters and persistent buffers.
        files: plain file name -> content, beside the weights: ``config.json``, tokenizer files; and the notes of the
            learner that sent them (:class:`~hf_diloco.core.model_notes.ModelNotes`).
        out: the directory to write; one that is there is replaced.
        facts: lines for the model card: what -> how much.

    Raises:
        DiLoCoError: the disk is full or ``out`` cannot be written, or one of ``files`` is not what it should be.
    """
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    for name in files:
        check_plain_name(name)
    state = {
        name: tensor.detach().to("cpu", torch.float32) if tensor.is_floating_point() else tensor.detach().cpu()
        for name, tensor in (*values.items(), *constants.items())
    }
    notes, config = ModelNotes.of(files), _read_config(files)
    kind = (config.get("architectures") or ["Model"])[0]
    if notes.adapter_names is not None:
        state, kind = _adapter_state(state, notes.adapter_names), "Adapter"
    out = Path(out).absolute()
    aside = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        if notes.adapter_names is not None:
            save_file(state, aside / "adapter_model.safetensors", metadata={"format": "pt"})
        else:
            _save_weights(state, config, aside)
        for name, content in files.items():
            if name.endswith(_WEIGHT_ENDINGS):
                logger.warning("%s is a file of weights and is left out: the weights are the run's own", name)
            elif name not in ("config.json", NOTES_FILE):
                (aside / name).write_bytes(content)
        (aside / "README.md").write_text(model_card(kind, notes, facts or {}), encoding="utf-8")
        replace_directory(aside, out)
    except (OSError, SafetensorError) as error:
        raise DiLoCoError(f"the model could not be written to {out}: {error}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _adapter_state(state: Mapping[str, Tensor], adapter_names: Mapping[str, str]) -> dict[str, Tensor]:
    """The adapter's tensors by their names in its file; no two share memory (tied ones would)."""
    missing = sorted(set(adapter_names.values()) - state.keys())
    if missing:
        raise DiLoCoError(f"{missing[0]!r} is part of the adapter, but the run has no such tensor.")
    return {in_file: state[name].clone() for in_file, name in adapter_names.items()}


def _read_config(files: Mapping[str, bytes]) -> dict[str, Any]:
    """``config.json`` with every dtype in it set to what is written."""
    if "config.json" not in files:
        return {}
    try:
        config = json.loads(files["config.json"])
    except ValueError as error:
        raise DiLoCoError(f"the config.json of the run is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise DiLoCoError(f"the config.json of the run holds a {type(config).__name__}, not an object")
    _set_dtype(config)
    return {**config, "dtype": "float32"}


def _set_dtype(config: dict[str, Any]) -> None:
    config.pop("torch_dtype", None)
    if "dtype" in config:
        config["dtype"] = "float32"
    for part in config.values():
        if isinstance(part, dict):
            _set_dtype(part)


def _save_weights(state: dict[str, Tensor], config: dict[str, Any], directory: Path) -> None:
    from huggingface_hub import save_torch_state_dict

    try:
        skeleton = _skeleton(config)
        aliases = _fit(state, skeleton)
    except _NotOneOfTransformersError as error:
        warnings.warn(
            f"{error}. The weights are written under the names they have in memory; from_pretrained loads them only "
            "into the same class.",
            DiLoCoWarning,
            stacklevel=3,
        )
        save_torch_state_dict(state, directory, max_shard_size=_MAX_SHARD_SIZE, metadata={"format": "pt"})
        if config:
            (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    else:
        skeleton.save_pretrained(directory, state_dict={**state, **aliases}, max_shard_size=_MAX_SHARD_SIZE)


class _NotOneOfTransformersError(Exception):
    """The values do not make a model class of transformers; the message says why."""


def _skeleton(config: dict[str, Any]) -> Any:
    """The model that ``config`` describes, without memory for its weights."""
    import torch
    import transformers

    architecture = (config.get("architectures") or ["none named in config.json"])[0]
    model_class = getattr(transformers, str(architecture), None)
    if not (isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel)):
        raise _NotOneOfTransformersError(f"the architecture ({architecture}) is not a model class of transformers")
    try:
        with torch.device("meta"):
            config_class: Any = model_class.config_class
            return model_class(config_class.from_dict(config))
    except Exception as error:  # a model's own code: whatever it raises, the values must still be saved
        raise _NotOneOfTransformersError(f"{architecture} cannot be made from config.json ({error})") from error


def _fit(state: Mapping[str, Tensor], skeleton: Any) -> dict[str, Tensor]:
    """The other names of tied tensors.

    Raises:
        _NotOneOfTransformersError: names or shapes differ; the first difference is named.
    """
    tied: dict[int, list[str]] = {}
    for name, parameter in skeleton.named_parameters(remove_duplicate=False):
        tied.setdefault(id(parameter), []).append(name)
    aliases = {}
    for names in tied.values():
        held = [name for name in names if name in state]
        if held:
            aliases.update({name: state[held[0]] for name in names if name not in state})
    expected = {name: tensor.shape for name, tensor in skeleton.state_dict().items()}
    found = {name: tensor.shape for name, tensor in (*state.items(), *aliases.items())}
    for name in [*expected, *found]:
        if expected.get(name) != found.get(name):
            wanted, got = (shapes.get(name) for shapes in (expected, found))
            raise _NotOneOfTransformersError(
                f"{name} is {_shown(got)} here and {_shown(wanted)} in {type(skeleton).__name__}"
            )
    return aliases


def _shown(shape: Any) -> str:
    return "not there" if shape is None else f"of shape {list(shape)}"
