"""Read and write one fragment of a live model."""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DataParallel, DistributedDataParallel

from hf_diloco.core.fragments import Fragment, FragmentSlice
from hf_diloco.errors import DiLoCoWarning, NoTrainableParametersError, UnsupportedError
from hf_diloco.learner.adapters import adapter_file_names
from hf_diloco.learner.snapshots import Snapshot, Snapshots

_WRAPPER_PREFIXES = ("_orig_mod.", "_checkpoint_wrapped_module.")  # torch.compile, activation checkpointing
_SUPPORTED = "Start each learner as one process with the whole model on its device (plain, or torch.compile)."


class ModelParameters:
    """The trainable tensors of a model, by names that do not depend on how it is wrapped; tied tensors once.

    Values are read and written in place, in fp32 arithmetic whatever the model's dtype: the tensors stay the same
    objects at the same addresses, as optimizers, compiled graphs and tied layers need it.

    Call :meth:`read`, :meth:`add_` and :meth:`write_` between two training steps (Trainer: ``on_step_end``), from the
    thread that trains: earlier, gradients or saved activations still belong to the old values. In a learner of several
    ranks all ranks make the same calls in the same order; what is read is complete on rank 0 of ``group`` only.

    Args:
        model: The model; DDP, DataParallel and ``torch.compile`` wrappers are looked through.
        group: A gloo group of all ranks of this learner, for the rows that rank 0 does not hold; None with one rank.

    Raises:
        UnsupportedError: the parameters are sharded (FSDP, DeepSpeed), without data (meta device), or not real numbers.
        NoTrainableParametersError: no parameter has ``requires_grad=True``.
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
        self._model = _unwrapped(model)
        self._rank = dist.get_rank(group) if group is not None else 0
        parameters = {_canonical(name): parameter for name, parameter in self._model.named_parameters()}
        for name, parameter in parameters.items():
            _check(name, parameter)
        self._trainable = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
        self._frozen = {name: parameter for name, parameter in parameters.items() if not parameter.requires_grad}
        if not any(parameter.numel() for parameter in self._trainable.values()):
            raise NoTrainableParametersError(
                f"{type(self._model).__name__} has nothing to train: none of its {len(parameters)} parameters has "
                "requires_grad=True. Unfreeze some of them, or attach an adapter, before training starts."
            )
        self.shapes = {name: tuple(parameter.shape) for name, parameter in self._trainable.items()}
        self.averaged = self._embeddings()
        self.adapter_names = self._adapter_names()  # of a PEFT model: name in the adapter's file -> canonical name
        self._snapshots = Snapshots()
        self._warn_of_low_precision()

    # ------------------------------------------------------------------------------------------------ one fragment

    def read(self, fragment: Fragment) -> Snapshot:
        """Copy the fragment's current values. The copy is complete when ``result()`` of what is returned returns.

        For rank 0: on other ranks ``result()`` is an error.

        On CUDA the values are cloned on the device at once, so that training may change them right away, and travel
        to pinned memory on a side stream; nothing waits on the host. Device memory: the fragment in fp32, until it
        has arrived.
        """
        if self._rank:
            return Snapshot(_elsewhere)
        on_cuda = any(self._trainable[name].is_cuda for name in fragment.names)
        values = torch.empty(fragment.num_parameters, dtype=torch.float32, pin_memory=on_cuda)
        return self._snapshots.take(values, ((_part(values, piece), self._rows(piece)) for piece in fragment.slices))

    def add_(self, fragment: Fragment, correction: Tensor) -> None:
        """theta += correction, added in fp32 and rounded once to the dtype of the weights.

        Args:
            fragment: What to change.
            correction: Its flat fp32 vector, on any device.
        """
        with torch.no_grad():
            for rows, part in self._targets(fragment, correction):
                rows.add_(part)  # computed in the wider dtype of the two, then cast

    def write_(self, fragment: Fragment, value: Tensor, local_mix: float = 0.0) -> None:
        """theta = local_mix * theta + (1 - local_mix) * value, in fp32 and rounded once to the dtype of the weights.

        Args:
            fragment: What to change.
            value: Its flat fp32 vector, on any device.
            local_mix: Share (alpha) of the local value that is kept; 0 replaces it.
        """
        with torch.no_grad():
            for rows, part in self._targets(fragment, value):
                if local_mix == 0.0:
                    rows.copy_(part)
                elif rows.dtype == part.dtype:
                    rows.lerp_(part, 1.0 - local_mix)
                else:
                    rows.copy_(rows.to(part.dtype).lerp_(part, 1.0 - local_mix))

    def holds(self, fragment: Fragment, value: Tensor) -> bool:
        """Whether the fragment's weights are ``value``, rounded to their dtype, bit for bit."""
        return all(torch.equal(rows, part.to(rows.dtype)) for rows, part in self._targets(fragment, value))

    @property
    def model(self) -> nn.Module:
        """The user's own module, without wrappers."""
        return self._model

    @property
    def trainable(self) -> Mapping[str, Tensor]:
        """The trainable tensors themselves."""
        return self._trainable

    def _rows(self, piece: FragmentSlice) -> Tensor:
        tensor = self._trainable[piece.name].detach()
        return tensor[piece.first_row : piece.last_row] if tensor.dim() else tensor

    def _targets(self, fragment: Fragment, flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Rows of the model and the part of ``flat`` that belongs to them, on the same device."""
        assert flat.numel() == fragment.num_parameters, (flat.shape, fragment.num_parameters)
        moved: dict[torch.device, Tensor] = {flat.device: flat.detach().to(torch.float32)}
        for piece in fragment.slices:
            rows = self._rows(piece)
            if rows.device not in moved:
                source = moved[flat.device]
                if rows.is_cuda and not source.is_cuda and not source.is_pinned():
                    source = source.pin_memory()  # from pageable memory the copy would wait for the whole stream
                moved[rows.device] = source.to(rows.device, non_blocking=True)
            yield rows, _part(moved[rows.device], piece)

    # --------------------------------------------------------------------------------------- what does not change

    def constants(self) -> Iterator[tuple[str, Tensor]]:
        """Frozen parameters and persistent buffers by name, each as a CPU copy: what a saved model needs besides.

        Of a PEFT model only those that the adapter's file holds; the base model is saved already. All ranks have to
        exhaust it, but it yields on rank 0 only.
        """
        if self._rank:
            return
        wanted = None if self.adapter_names is None else set(self.adapter_names.values())
        for name, tensor, _ in self._constant_tensors():
            if wanted is None or name in wanted:
                yield name, tensor.detach().to("cpu", copy=True).contiguous()

    def constants_digest(self) -> str:
        """32 hex digits over names, dtypes, shapes and bytes of the constants; "" on all ranks but 0.

        Running statistics (batch norm) are left out: they are saved with the model, but change as it trains, and a
        learner that resumes from its own checkpoint still has the same base model.
        """
        if self._rank:
            return ""
        digest = hashlib.blake2b(digest_size=16)
        for name, tensor, changes in self._constant_tensors():
            if changes:
                continue
            digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
            data = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
            digest.update(data.numpy().data)
        return digest.hexdigest()

    def _constant_tensors(self) -> list[tuple[str, Tensor, bool]]:
        """Name, tensor, and whether training changes it; sorted by name."""
        found: list[tuple[str, Tensor, bool]] = [(name, tensor, False) for name, tensor in self._frozen.items()]
        seen: set[int] = set()
        for prefix, module in self._model.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                if name in module._non_persistent_buffers_set or id(buffer) in seen:
                    continue
                seen.add(id(buffer))
                full_name = _canonical(f"{prefix}.{name}" if prefix else name)
                _check(full_name, buffer)
                found.append((full_name, buffer, isinstance(module, _NormBase)))
        return sorted(found, key=lambda item: item[0])

    # ------------------------------------------------------------------------------------------------------ checks

    def _embeddings(self) -> tuple[str, ...]:
        """Names of the trainable tensors that embed or un-embed tokens, found by identity: names differ by model."""
        weights = set()
        for getter in ("get_input_embeddings", "get_output_embeddings"):
            try:
                weights.add(id(getattr(self._model, getter)().weight))
            except (AttributeError, NotImplementedError):
                continue  # no such method, no such layer (vision), or a layer with several weights
        return tuple(sorted(name for name, parameter in self._trainable.items() if id(parameter) in weights))

    def _adapter_names(self) -> Mapping[str, str] | None:
        names = adapter_file_names(self._model)
        if names is None:
            return None
        names = {_canonical(in_file): _canonical(name) for in_file, name in names.items()}
        outside = sorted(self._trainable.keys() - set(names.values()))
        if outside:
            warnings.warn(
                f"{len(outside)} trained tensors are not part of the adapter (the first: {outside[0]!r}), so its file "
                "will not hold them. Name their modules in modules_to_save of the PEFT configuration.",
                DiLoCoWarning,
                stacklevel=3,
            )
        return names

    def _warn_of_low_precision(self) -> None:
        low = [name for name, p in self._trainable.items() if p.dtype in (torch.bfloat16, torch.float16)]
        if low:
            dtype = str(self._trainable[low[0]].dtype).removeprefix("torch.")
            warnings.warn(
                f"{len(low)} of {len(self._trainable)} trainable tensors are {dtype} (the first: {low[0]!r}): most "
                "small updates are rounded away when they are written to such weights. Load the model with "
                "dtype=torch.float32 and train with TrainingArguments(bf16=True) instead.",
                DiLoCoWarning,
                stacklevel=3,
            )


def _elsewhere() -> Tensor:
    raise AssertionError("what is read is on rank 0 only")


def _part(flat: Tensor, piece: FragmentSlice) -> Tensor:
    return flat.narrow(0, piece.offset, math.prod(piece.shape)).view(piece.shape)


def _canonical(name: str) -> str:
    for prefix in _WRAPPER_PREFIXES:
        name = name.replace(prefix, "")
    return name


def _unwrapped(model: nn.Module) -> nn.Module:
    """The user's own module inside DDP, DataParallel and torch.compile."""
    while True:
        if isinstance(model, DistributedDataParallel | DataParallel):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model._orig_mod  # type: ignore[assignment]
        else:
            break
    if type(model).__module__.startswith("deepspeed."):
        raise UnsupportedError(f"the model is wrapped by DeepSpeed, which is not supported yet. {_SUPPORTED}")
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise UnsupportedError(f"the model is wrapped by FSDP version 1, which is not supported. {_SUPPORTED}")
    return model


def _check(name: str, tensor: Tensor) -> None:
    if isinstance(tensor, DTensor):
        raise UnsupportedError(f"{name!r} is sharded (FSDP2 or tensor parallel), not supported yet. {_SUPPORTED}")
    if hasattr(tensor, "ds_id"):
        raise UnsupportedError(f"{name!r} is sharded by DeepSpeed ZeRO-3, not supported yet. {_SUPPORTED}")
    if tensor.is_meta:
        raise UnsupportedError(f"{name!r} is on the meta device and has no values. Load the weights before training.")
    if tensor.requires_grad and tensor.dtype not in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        raise UnsupportedError(
            f"trainable {name!r} is {tensor.dtype}; float64, float32, bfloat16 and float16 can be synced."
        )
