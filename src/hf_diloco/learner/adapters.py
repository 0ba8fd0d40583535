"""PEFT models: which of their tensors make up the adapter, and what its file calls them."""

from __future__ import annotations

import sys

from torch import nn

from hf_diloco.errors import UnsupportedError


def adapter_name(model: nn.Module) -> str | None:
    """The adapter that a PEFT model trains; None for any other model.

    Raises:
        UnsupportedError: it is not one adapter of tensors inside the model.
    """
    peft = sys.modules.get("peft")  # whoever made such a model has imported it
    if peft is None or not isinstance(model, peft.PeftModel):
        if getattr(model, "_hf_peft_config_loaded", False):
            raise UnsupportedError(
                "the adapter was put into the model by transformers (model.add_adapter), which is not supported. Put "
                "it around the model: peft.get_peft_model(model, config)."
            )
        return None
    active = model.active_adapters
    if len(active) != 1:
        raise UnsupportedError(
            f"{len(active)} adapters of this model are active ({', '.join(active) or 'none'}); one can be trained in a "
            "run. Choose it with model.set_adapter(...)."
        )
    config = model.peft_config[active[0]]
    if config.is_prompt_learning:
        raise UnsupportedError(
            f"{config.peft_type.value} trains a prompt and not the model; that is not supported. Use LoRA or another "
            "method that adds weights to layers."
        )
    return str(active[0])


def adapter_file_names(model: nn.Module) -> dict[str, str] | None:
    """Of a PEFT model: name in the adapter's file -> name in memory, as ``model.named_parameters`` has it (or buffers).

    None for any other model.

    Raises:
        UnsupportedError: the adapter is not made up of tensors of the model.
    """
    adapter = adapter_name(model)
    if adapter is None:
        return None
    from peft import get_peft_model_state_dict

    own = {id(tensor): name for name, tensor in [*model.named_buffers(), *model.named_parameters()]}
    state = model.state_dict(keep_vars=True)
    chosen = get_peft_model_state_dict(model, state_dict=state, adapter_name=adapter)
    computed = [name for name, tensor in chosen.items() if id(tensor) not in own]
    if computed:
        raise UnsupportedError(
            f"{computed[0]!r} of the adapter is computed when it is saved and is no tensor of the model; "
            f"{model.peft_config[adapter].peft_type.value} is not supported. Use LoRA."  # type: ignore[union-attr,index]
        )
    return {name: own[id(tensor)] for name, tensor in chosen.items()}
