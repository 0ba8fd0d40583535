"""The state of an inner optimizer, in pieces that another learner's optimizer of the same kind can take over."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from hf_diloco.core.messages import STATE_PIECE_BYTES
from hf_diloco.errors import MessageError, UnsupportedError
from hf_diloco.learner.snapshots import Snapshot, Snapshots
from hf_diloco.learner.zero import check_masters, is_zero

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Part:
    """Some consecutive elements of one state tensor."""

    name: str  # of the parameter
    key: str  # exp_avg, step, momentum_buffer, ...
    first: int
    last: int


@dataclass(frozen=True)
class StatePlan:
    """How the state is cut into pieces. Two optimizers with one fingerprint have the same plan."""

    fingerprint: str
    without: tuple[str, ...]  # parameters that have no state (yet) and are left out
    pieces: tuple[tuple[Part, ...], ...]
    size_bytes: int


class OptimizerState:
    """The state tensors of an optimizer by canonical parameter name and key.

    For the thread that trains, between two steps. Serves the optimizers of ``torch.optim`` whose state is tensors.

    Args:
        trainable: the model's trainable tensors by canonical name.
        optimizer: of these tensors.

    Raises:
        UnsupportedError: it is of another kind, or also of other tensors.
    """

    def __init__(self, trainable: Mapping[str, Tensor], optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._snapshots = Snapshots()
        kind = type(optimizer)
        self._kind = f"{kind.__module__}.{kind.__qualname__}"
        if not self._kind.startswith("torch.optim."):
            raise UnsupportedError(f"{self._kind} is not an optimizer of torch.optim")
        names = {id(tensor): name for name, tensor in trainable.items()}
        tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        if any(id(tensor) not in names for tensor in tensors):
            raise UnsupportedError("the optimizer has parameters that are not the model's trainable ones")
        if any(isinstance(tensor, DTensor) or is_zero(tensor) for tensor in tensors):
            raise UnsupportedError("its state is sharded over the ranks of this learner")
        self._parameters = dict(sorted(((names[id(t)], t) for t in tensors), key=lambda pair: pair[0]))

    @property
    def is_empty(self) -> bool:
        """No parameter has any state: the optimizer has not made a step, or is of a kind that keeps none."""
        return not any(self._optimizer.state.values())

    def fill(self) -> None:
        """Give every parameter the state that a step with zero gradients makes. No parameter is changed.

        Raises:
            UnsupportedError: the optimizer cannot make such a step (it needs a closure, sparse gradients, ...).
        """
        groups = self._optimizer.param_groups
        rates = [group["lr"] for group in groups]
        try:
            for group in groups:
                group["lr"] = 0.0 * group["lr"]
            for tensor in self._parameters.values():
                tensor.grad = torch.zeros_like(tensor)
            self._optimizer.step()
        except Exception as error:
            self.clear()
            raise UnsupportedError(f"{self._kind} makes no step with zero gradients: {error}") from error
        finally:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate
            for tensor in self._parameters.values():
                tensor.grad = None

    def clear(self, names: Collection[str] | None = None) -> None:
        """Forget the state of these parameters; of all if None."""
        for name in self._parameters if names is None else names:
            self._optimizer.state.pop(self._parameters[name], None)

    def plan(self, without: Collection[str] | None = None) -> StatePlan:
        """How to cut the present state.

        Args:
            without: parameters to leave out; None for those that have no state.

        Raises:
            UnsupportedError: some state is not a tensor, or is sharded; or ``without`` names an unknown parameter.
        """
        if without is None:
            without = [name for name, tensor in self._parameters.items() if not self._optimizer.state.get(tensor)]
        elif unknown := set(without) - self._parameters.keys():
            raise UnsupportedError(f"the optimizer has no parameter {min(unknown)!r}")
        left_out = set(without)
        hashed = hashlib.blake2b(self._kind.encode(), digest_size=16)
        pieces: list[list[Part]] = []
        room = size_bytes = 0
        for name, key, tensor in self._entries(left_out):
            hashed.update(f"\0{name}\0{key}\0{tensor.dtype}\0{tuple(tensor.shape)}".encode())
            size_bytes += tensor.numel() * tensor.element_size()
            first = 0
            while first < tensor.numel():
                if room < tensor.element_size():
                    pieces.append([])
                    room = STATE_PIECE_BYTES
                last = min(tensor.numel(), first + room // tensor.element_size())
                pieces[-1].append(Part(name, key, first, last))
                room -= (last - first) * tensor.element_size()
                first = last
        return StatePlan(hashed.hexdigest(), tuple(sorted(left_out)), tuple(map(tuple, pieces)), size_bytes)

    def _entries(self, without: Collection[str]) -> Iterator[tuple[str, str, Tensor]]:
        for name, parameter in self._parameters.items():
            if name in without:
                continue
            for key, value in sorted(self._optimizer.state[parameter].items()):
                if value is None:  # as SGD's momentum_buffer before it is needed
                    continue
                if not isinstance(value, Tensor) or isinstance(value, DTensor):
                    raise UnsupportedError(f"{key!r} of {name!r} is a {type(value).__name__}, not a plain tensor")
                yield name, key, value

    def read(self, piece: tuple[Part, ...]) -> Snapshot:
        """The piece's bytes as they are now; nothing waits on the host."""
        sources = [self._flat(part)[part.first : part.last].view(torch.uint8) for part in piece]
        size = sum(source.numel() for source in sources)
        on_cuda = any(source.is_cuda for source in sources)
        values = torch.empty(size, dtype=torch.uint8, pin_memory=on_cuda)
        return self._snapshots.take(values, zip(_split(values, sources), sources, strict=True))

    def write(self, piece: tuple[Part, ...], content: Tensor) -> None:
        """Put a piece's bytes in their place.

        Raises:
            MessageError: there are too many or too few of them, or they hold NaN or infinite values; nothing is
                written then.
        """
        targets = [self._flat(part)[part.first : part.last] for part in piece]
        size = sum(target.numel() * target.element_size() for target in targets)
        if content.numel() != size:
            raise MessageError(f"a piece of optimizer state has {content.numel()} bytes, not {size}")
        as_bytes = [target.view(torch.uint8) for target in targets]
        # Cloned: a view in another dtype must begin at a multiple of its size.
        parts = [
            part.clone().view(target.dtype) for part, target in zip(_split(content, as_bytes), targets, strict=True)
        ]
        if not all(bool(torch.isfinite(part).all()) for part in parts):
            raise MessageError("a piece of optimizer state holds NaN or infinite values")
        for place, part in zip(piece, parts, strict=True):
            tensor = self._tensor(place)
            if tensor.is_contiguous():
                tensor.view(-1)[place.first : place.last].copy_(part)
            else:
                flat = tensor.reshape(-1)
                flat[place.first : place.last].copy_(part)
                tensor.copy_(flat.view(tensor.shape))

    def _tensor(self, part: Part) -> Tensor:
        tensor: Tensor = self._optimizer.state[self._parameters[part.name]][part.key]
        return tensor.detach()

    def _flat(self, part: Part) -> Tensor:
        return self._tensor(part).reshape(-1)


def optimizer_state(trainable: Mapping[str, Tensor], optimizer: Optimizer | None) -> tuple[OptimizerState | None, str]:
    """The state of this optimizer; None if it cannot be exchanged with other learners, and why not.

    Raises:
        UnsupportedError: the optimizer has the weights themselves, in a place that cannot be reached.
    """
    check_masters(trainable.values(), optimizer)
    if optimizer is None:
        return None, "its optimizer is not known"
    try:
        return OptimizerState(trainable, optimizer), ""
    except UnsupportedError as error:
        logger.info("the optimizer's state cannot be exchanged with other learners: %s", error)
        return None, str(error)


def has_learned(optimizer: Any) -> bool:
    """Whether this rank's part of the optimizer has state of its own, of whatever kind the optimizer is.

    State of zeros is none, nor are counters alone: some optimizers have them before their first step.
    """
    for entry in getattr(optimizer, "state", {}).values():
        for value in entry.values():
            part = value.to_local() if isinstance(value, DTensor) else value
            if not torch.is_tensor(part) or part.dim() == 0:
                continue
            if type(part) is not Tensor or bool(part.any()):  # what is quantized cannot be looked at
                return True
    return False


def piece_digest(content: Tensor) -> str:
    """BLAKE2b of the bytes: 32 hex digits."""
    return hashlib.blake2b(content.numpy().data, digest_size=16).hexdigest()


def _split(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    """Consecutive views of ``flat``, each as long as its tensor of ``like``."""
    return list(torch.split(flat, [tensor.numel() for tensor in like]))
