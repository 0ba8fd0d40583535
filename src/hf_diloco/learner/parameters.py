"""Read and write one fragment of a live model."""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DataParallel, DistributedDataParallel

from hf_diloco.core.fragments import Fragment, FragmentSlice
from hf_diloco.errors import DiLoCoWarning, NoTrainableParametersError, UnsupportedError
from hf_diloco.learner.adapters import adapter_file_names
from hf_diloco.learner.gathering import Gathering
from hf_diloco.learner.snapshots import Snapshot, Snapshots
from hf_diloco.learner.stored import LOW_PRECISION, Rows, ShardedTensor, Stored, WholeTensor
from hf_diloco.learner.zero import ZeroTensor, check_engine, is_zero

_WRAPPER_PREFIXES = ("_orig_mod.", "_checkpoint_wrapped_module.")  # torch.compile, activation checkpointing
_HASHED_AT_ONCE = 1 << 24  # values


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
        UnsupportedError: the parameters are out of reach (FSDP version 1, DeepSpeed's pipelines and experts, or its
            fp32 masters without ZeRO), without data (meta device), or not real numbers.
        NoTrainableParametersError: no parameter has ``requires_grad=True``.
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
        self._model = _unwrapped(model)
        self._gathering = Gathering(group)
        self._fsdp_modules = [module for module in self._model.modules() if isinstance(module, FSDPModule)]
        self._reshard()
        parameters = {_canonical(name): parameter for name, parameter in self._model.named_parameters()}
        stored = {name: _stored(name, parameter, self._gathering) for name, parameter in parameters.items()}
        self._trainable = {name: of for name, of in stored.items() if of.tensor.requires_grad}
        self._frozen = {name: of for name, of in stored.items() if not of.tensor.requires_grad}
        self.shapes = {name: of.shape for name, of in self._trainable.items()}
        if not any(math.prod(shape) for shape in self.shapes.values()):
            raise NoTrainableParametersError(
                f"{type(self._model).__name__} has nothing to train: none of its {len(parameters)} parameters has "
                "requires_grad=True. Unfreeze some of them, or attach an adapter, before training starts."
            )
        self.averaged = self._embeddings()
        self.adapter_names = self._adapter_names()  # of a PEFT model: name in the adapter's file -> canonical name
        self._snapshots = Snapshots()
        self._buffers_at_start: dict[str, tuple[tuple[int, ...], bytes]] = {}  # shape and hash, by constants_digest()
        self._warn_of_low_precision()

    def _reshard(self) -> None:
        """After an evaluation, FSDP2 modules may hold whole copies, which the next forward pass would still use."""
        for module in self._fsdp_modules:
            module.reshard()

    def check_frozen(self) -> None:
        """What was frozen when training started still is.

        Raises:
            UnsupportedError: some of it is trained now; it would be another one at each learner.
        """
        found = [name for name, of in self._frozen.items() if of.tensor.requires_grad]
        if found:
            raise UnsupportedError(
                f"{found[0]!r} was frozen when training started and is trained now (as are {len(found) - 1} others), "
                "but only what was trainable at the start is synced. Have it trainable from the start, with learning "
                "rate 0 until its time comes; or begin another run for each stage, from the model of the one before."
            )

    # ------------------------------------------------------------------------------------------------ one fragment

    def read(self, fragment: Fragment) -> Snapshot:
        """Copy the fragment's current values. The copy is complete when ``result()`` of what is returned returns.

        For rank 0, which has to call ``result()`` each time; on other ranks that is an error. Each rank copies what it
        holds at once, so that training may change it right away; rows that rank 0 does not hold travel to it in the
        background (so no rank may end before rank 0 has its results). On CUDA the values are cloned on the device and
        travel to pinned memory on a side stream; nothing waits on the host. Device memory: what this rank holds of the
        fragment in fp32, until it has arrived, and with DeepSpeed one whole tensor.
        """
        tag, rank = self._gathering.new_tag(), self._gathering.rank
        mine = self._shipped(fragment, rank)
        sizes = [last - first for first, last in mine]
        on_cuda = any(self._trainable[name].tensor.is_cuda for name in fragment.names)
        size = sum(sizes) if rank else fragment.num_parameters
        values = torch.empty(size, dtype=torch.float32, pin_memory=on_cuda)
        targets = torch.split(values, sizes) if rank else [values[first:last] for first, last in mine]
        snapshot = self._snapshots.take(values, self._sources(fragment, targets))
        if rank:
            if sizes:
                self._gathering.send(snapshot, tag)
            return Snapshot(_elsewhere)
        return snapshot if sum(sizes) == size else Snapshot(lambda: self._completed(fragment, snapshot, tag))

    def _shipped(self, fragment: Fragment, rank: int) -> list[tuple[int, int]]:
        """First and last place, in the flat vector, of all that this rank sends to rank 0 (rank 0: has itself)."""
        pieces = [(piece, self._trainable[piece.name].shipped.get(rank)) for piece in fragment.slices]
        overlaps = [(piece, held.overlap(piece.first_row, piece.last_row)) for piece, held in pieces if held]
        return [_places(piece, rows) for piece, rows in overlaps if rows.num_rows]

    def _sources(self, fragment: Fragment, targets: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Each of the targets with the rows that belong there."""
        remaining = iter(targets)
        for piece in fragment.slices:
            stored = self._trainable[piece.name]
            rows = stored.held.overlap(piece.first_row, piece.last_row)
            if rows.num_rows:
                source = stored.rows(rows)  # also if it is not shipped: DeepSpeed needs all ranks for that
                if self._gathering.rank in stored.shipped:
                    yield next(remaining).view(source.shape), source

    def _completed(self, fragment: Fragment, own: Snapshot, tag: int) -> Tensor:
        values = own.result()
        others = {rank for name in fragment.names for rank in self._trainable[name].shipped} - {0}
        places = {rank: self._shipped(fragment, rank) for rank in sorted(others)}
        self._gathering.receive(
            {rank: [values[first:last] for first, last in found] for rank, found in places.items() if found}, tag
        )
        return values

    def add_(self, fragment: Fragment, correction: Tensor) -> None:
        """theta += correction, added in fp32 and rounded once to the dtype of the weights.

        Args:
            fragment: What to change.
            correction: Its flat fp32 vector, on any device.
        """
        with torch.no_grad():
            for live, part in self._changing(fragment, correction):
                live.add_(part)  # computed in the wider dtype of the two, then cast

    def write_(self, fragment: Fragment, value: Tensor, local_mix: float = 0.0) -> None:
        """theta = local_mix * theta + (1 - local_mix) * value, in fp32 and rounded once to the dtype of the weights.

        Args:
            fragment: What to change.
            value: Its flat fp32 vector, on any device.
            local_mix: Share (alpha) of the local value that is kept; 0 replaces it.
        """
        with torch.no_grad():
            for live, part in self._changing(fragment, value):
                if local_mix == 0.0:
                    live.copy_(part)
                elif live.dtype == part.dtype:
                    live.lerp_(part, 1.0 - local_mix)
                else:
                    live.copy_(live.to(part.dtype).lerp_(part, 1.0 - local_mix))

    def holds(self, fragment: Fragment, value: Tensor) -> bool:
        """Whether what this rank holds of the fragment is ``value``, rounded to its dtype; without communication."""
        return all(stored.equals(rows, part) for stored, rows, part in self._held(fragment, value))

    @property
    def model(self) -> nn.Module:
        """The user's own module, without wrappers."""
        return self._model

    @property
    def trainable(self) -> Mapping[str, Tensor]:
        """The trainable tensors themselves."""
        return {name: stored.tensor for name, stored in self._trainable.items()}

    def _held(self, fragment: Fragment, flat: Tensor) -> Iterator[tuple[Stored, Rows, Tensor]]:
        """All that this rank holds of the fragment: tensor, rows, and the part of ``flat`` that belongs to them."""
        assert flat.numel() == fragment.num_parameters, (flat.shape, fragment.num_parameters)
        flat = flat.detach().to(torch.float32)
        for piece in fragment.slices:
            stored = self._trainable[piece.name]
            rows = stored.held.overlap(piece.first_row, piece.last_row)
            if rows.num_rows:
                first, last = _places(piece, rows)
                yield (
                    stored,
                    rows,
                    flat[first:last].view(rows.num_rows, *piece.shape[1:]) if piece.shape else flat[first],
                )

    def _changing(self, fragment: Fragment, flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """The same to be changed in place: rows, and the part of ``flat`` that belongs to them, on the same device."""
        self._reshard()
        for stored, rows, part in self._held(fragment, flat):
            with stored.changing(rows) as live:
                yield live, _beside(live, part)

    # --------------------------------------------------------------------------------------- what does not change

    def constants(self) -> Iterator[tuple[str, Tensor]]:
        """Frozen parameters and persistent buffers by name, each as a CPU copy: what a saved model needs besides.

        Of a PEFT model only those that the adapter's file holds; the base model is saved already. All ranks have to
        exhaust it, but it yields on rank 0 only.
        """
        for name, stored, _ in self._saved_constants():
            whole = stored.whole()
            if whole is not None:
                yield name, whole

    def running(self) -> frozenset[str]:
        """Names of those of the constants that are running statistics (batch norm)."""
        return frozenset(name for name, _, is_running in self._saved_constants() if is_running)

    def statistics(self) -> Iterator[tuple[str, Tensor]]:
        """Running statistics (batch norm), and the other persistent buffers that changed since ``constants_digest``.

        What no average can be made of is left out, with a warning. Each rank holds buffers whole, so rank 0 may call
        this alone.
        """
        unusable = []
        for name, stored, is_running in self._saved_constants():
            whole = None if name in self._frozen else stored.whole()
            if whole is None:
                continue
            shape, hashed = self._buffers_at_start.get(name, (None, b""))
            if not is_running and hashed == _hash(stored, whole):
                continue
            if bool(torch.isfinite(whole).all()) and (is_running or shape == stored.shape):
                yield name, whole
            else:
                unusable.append(name)
        if unusable:
            warnings.warn(
                f"{len(unusable)} buffers hold NaN or infinite values, or had another shape or were not there when "
                f"training began (the first: {unusable[0]!r}): what this learner has of them does not enter the final "
                "model.",
                DiLoCoWarning,
                stacklevel=3,
            )

    def _saved_constants(self) -> Iterator[tuple[str, Stored, bool]]:
        wanted = None if self.adapter_names is None else set(self.adapter_names.values())
        return (found for found in self._constants() if wanted is None or found[0] in wanted)

    def constants_digest(self) -> str:
        """32 hex digits over names, shapes and values of the constants; "" on all ranks but 0.

        The dtype of floating ones does not count as long as the values are the same: FSDP2 and DeepSpeed may hold the
        weights of a bf16 checkpoint in fp32. Running statistics (batch norm) are left out: they are saved with the
        model, but change as it trains, and a learner that resumes from its own checkpoint still has the same base
        model.
        """
        digest = hashlib.blake2b(digest_size=16)
        for name, stored, is_running in self._constants():
            whole = None if is_running else stored.whole()
            if whole is None:
                continue
            hashed = _hash(stored, whole)
            digest.update(name.encode() + b"\0" + hashed)
            if name not in self._frozen:
                self._buffers_at_start[name] = stored.shape, hashed
        return "" if self._gathering.rank else digest.hexdigest()

    def _constants(self) -> list[tuple[str, Stored, bool]]:
        """Name, tensor, and whether it is a running statistic; sorted by name."""
        found: list[tuple[str, Stored, bool]] = [(name, stored, False) for name, stored in self._frozen.items()]
        seen: set[int] = set()
        for prefix, module in self._model.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                if name in module._non_persistent_buffers_set or id(buffer) in seen:
                    continue
                seen.add(id(buffer))
                full_name = _canonical(f"{prefix}.{name}" if prefix else name)
                stored = _stored(full_name, buffer, self._gathering)
                found.append((full_name, stored, isinstance(module, _NormBase)))
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
        return tuple(sorted(name for name, stored in self._trainable.items() if id(stored.tensor) in weights))

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
        low = [name for name, stored in self._trainable.items() if not stored.keeps_small_updates]
        if low:
            dtype = str(self._trainable[low[0]].tensor.dtype).removeprefix("torch.")
            remedy = "Load the model with dtype=torch.float32 and train with TrainingArguments(bf16=True) instead."
            if self.adapter_names is not None:
                remedy = "Before training, set parameter.data = parameter.data.float() for each of them."
            warnings.warn(
                f"{len(low)} of {len(self._trainable)} trainable tensors are {dtype} (the first: {low[0]!r}): most "
                f"small updates are rounded away when they are written to such weights. {remedy}",
                DiLoCoWarning,
                stacklevel=3,
            )


def _hash(stored: Stored, whole: Tensor) -> bytes:
    dtype = torch.float32 if whole.dtype in LOW_PRECISION else whole.dtype
    digest = hashlib.blake2b(f"{dtype}\0{stored.shape}\0".encode(), digest_size=16)
    for values in torch.split(whole.reshape(-1), _HASHED_AT_ONCE):
        digest.update(values.to(dtype).view(torch.uint8).numpy().data)
    return digest.digest()


def _places(piece: FragmentSlice, rows: Rows) -> tuple[int, int]:
    """First and last place of these rows of a slice in the fragment's flat vector."""
    row_size = math.prod(piece.shape[1:])
    first = piece.offset + (rows.first - piece.first_row) * row_size
    return first, first + rows.num_rows * row_size


def _beside(live: Tensor, part: Tensor) -> Tensor:
    """The part on the device of the rows it belongs to."""
    if live.is_cuda and not part.is_cuda and not part.is_pinned():
        part = part.pin_memory()  # from pageable memory the copy would wait for the whole stream
    return part.to(live.device, non_blocking=live.is_cuda)


def _elsewhere() -> Tensor:
    raise AssertionError("what is read is on rank 0 only")


def _canonical(name: str) -> str:
    for prefix in _WRAPPER_PREFIXES:
        name = name.replace(prefix, "")
    return name


def _unwrapped(model: nn.Module) -> nn.Module:
    """The user's own module inside DDP, DataParallel, a DeepSpeed engine and torch.compile."""
    while True:
        if isinstance(model, DistributedDataParallel | DataParallel):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model._orig_mod  # type: ignore[assignment]
        elif type(model).__module__.startswith("deepspeed."):
            check_engine(model)
            model = model.module  # type: ignore[assignment]
        else:
            break
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise UnsupportedError(
            "the model is wrapped by FSDP version 1, which is not supported. Use version 2: `fsdp_version: 2` in the "
            'file for `accelerate launch`, or TrainingArguments(fsdp=True, fsdp_config={"version": 2}).'
        )
    return model


def _stored(name: str, tensor: Tensor, gathering: Gathering) -> Stored:
    if tensor.is_meta:
        raise UnsupportedError(f"{name!r} is on the meta device and has no values. Load the weights before training.")
    if tensor.requires_grad and tensor.dtype not in (torch.float64, torch.float32, *LOW_PRECISION):
        raise UnsupportedError(
            f"trainable {name!r} is {tensor.dtype}; float64, float32, bfloat16 and float16 can be synced."
        )
    if is_zero(tensor):
        return ZeroTensor(name, tensor, gathering)
    if isinstance(tensor, DTensor):
        return ShardedTensor(name, tensor, gathering)
    return WholeTensor(tensor, gathering)
