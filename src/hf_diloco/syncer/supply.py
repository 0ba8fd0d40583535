"""The initial values, sent once, by the first learner; and what becomes of the running statistics among them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from hf_diloco.core import messages as ms
from hf_diloco.core.codec import decode
from hf_diloco.errors import MessageError
from hf_diloco.syncer.state import GlobalState

_NAMED = 3  # buffers, in a warning


class Supply:
    """Collects what a learner sends of the model: fragments, constants (frozen parameters, buffers), files."""

    def __init__(self) -> None:
        self.complete = False
        self.constants: dict[str, Tensor] = {}
        self.files: dict[str, bytes] = {}
        self.settled = False  # the constants are no longer those of earlier checkpoints
        self.running: set[str] = set()  # the running statistics among them that are as the run began
        self._statistics: dict[int, dict[str, Tensor]] = {}  # of each learner that has come to its end
        self._of_leavers: dict[int, dict[str, Tensor]] = {}  # of each that took leave before
        self._supplier: int | None = None
        self._fragments: set[int] = set()

    def restore(self, constants: dict[str, Tensor], files: dict[str, bytes], running: Iterable[str]) -> None:
        """The constants and files of a run that goes on."""
        self.constants, self.files, self.running, self.complete = constants, files, set(running), True

    def take(self, learner_id: int, message: ms.Message, payload: Tensor | None, state: GlobalState) -> bool:
        """Take in one message; True when it was the last one.

        Values go into ``state`` at once. A second supplier (the first one died) begins anew.

        Raises:
            MessageError: the payload is missing, of the wrong size, or not finite; or something was left out.
        """
        if self.complete:
            return False
        if learner_id != self._supplier:
            self._supplier, self._fragments = learner_id, set()
            self.constants, self.files, self.running = {}, {}, set()
        if payload is None:
            raise MessageError(f"{type(message).__name__} needs a payload")
        if isinstance(message, ms.SupplyFragment):
            self._take_fragment(message, payload, state)
        elif isinstance(message, ms.SupplyConstant):
            self.constants[message.name] = _tensor(message, payload)
            if message.is_running:
                self.running.add(message.name)
        elif isinstance(message, ms.SupplyFile):
            if message.name != message.name.strip("./\\") or "/" in message.name or "\\" in message.name:
                raise MessageError(f"a file must have a plain name, not {message.name[:80]!r}")
            self.files[message.name] = payload.numpy().tobytes()
        elif isinstance(message, ms.Supplied):
            missing = set(range(state.layout.num_fragments)) - self._fragments
            if missing:
                raise MessageError(f"the initial value of fragment {min(missing)} was not sent")
            self.complete = True
        return self.complete

    def take_statistic(self, learner_id: int, message: ms.Statistic, payload: Tensor | None) -> None:
        """Take in a buffer as it is at the end of one learner.

        Raises:
            MessageError: it is not one of the constants, or not finite.
        """
        if payload is None:
            raise MessageError("Statistic needs a payload")
        value, ours = _tensor(message, payload), self.constants.get(message.name)
        if ours is not None and ours.is_floating_point() and value.is_floating_point():
            value = value.to(ours.dtype)  # FSDP2 and DeepSpeed may hold buffers in another one
        if ours is None or (ours.dtype, ours.shape) != (value.dtype, value.shape):
            raise MessageError(f"{message.name[:80]!r} is no buffer of this model, or of another dtype or shape")
        if not bool(torch.isfinite(value).all()):
            raise MessageError(f"the buffer {message.name!r} holds NaN or infinite values")
        self._statistics.setdefault(learner_id, {})[message.name] = value

    def take_leave(self, learner_id: int) -> None:
        """What this learner has sent of a buffer is used only if nobody comes to the end with it."""
        if learner_id in self._statistics:
            self._of_leavers[learner_id] = self._statistics.pop(learner_id)

    def settle(self, tokens: Mapping[int, int]) -> str | None:
        """Make the final buffers: floating ones by average, weighted by the learners' tokens.

        The others (counters) are those of the first learner.

        Returns:
            A warning, if learners have trained, but none has sent what its running statistics are.
        """
        sent: set[str] = set()
        for learners in (self._statistics, self._of_leavers):
            for name in {name for values in learners.values() for name in values} - sent:
                held = {who: values[name] for who, values in sorted(learners.items()) if name in values}
                self.constants[name], self.settled = _average(held, tokens), True
                sent.add(name)
        self.running -= sent  # a syncer that goes on from here has nothing to warn of
        if not self.running or not any(tokens.values()):
            return None
        names = sorted(self.running)
        named = ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
        return (
            f"no learner has said what its running statistics are ({named}): the saved model has those that the run "
            "began with, which are of no use in eval mode. Learners say it at their end and when they leave on "
            "SIGTERM, not when they are killed. Forward passes in train mode make new ones."
        )

    def _take_fragment(self, message: ms.SupplyFragment, payload: Tensor, state: GlobalState) -> None:
        index = message.fragment_index
        if not 0 <= index < state.layout.num_fragments:
            raise MessageError(f"there is no fragment {index}")
        value = decode(payload, "fp32", (state.layout.fragments[index].num_parameters,))
        if not bool(torch.isfinite(value).all()):
            raise MessageError(f"the initial value of fragment {index} holds NaN or infinite values")
        state.set_initial(index, value)
        self._fragments.add(index)


def _tensor(message: ms.SupplyConstant | ms.Statistic, payload: Tensor) -> Tensor:
    dtype = getattr(torch, message.dtype, None)
    if not isinstance(dtype, torch.dtype) or any(size < 0 for size in message.shape):
        raise MessageError(f"constant {message.name!r} has unknown dtype {message.dtype!r} or shape {message.shape}")
    count = torch.Size(message.shape).numel()
    if payload.numel() != count * dtype.itemsize:
        raise MessageError(f"constant {message.name!r} has {payload.numel()} bytes, not {count * dtype.itemsize}")
    return payload.clone().view(dtype).view(message.shape) if count else torch.empty(message.shape, dtype=dtype)


def _average(held: Mapping[int, Tensor], tokens: Mapping[int, int]) -> Tensor:
    first = next(iter(held.values()))
    if not first.is_floating_point():
        return first
    weights = torch.tensor([max(tokens.get(who, 0), 1) for who in held], dtype=torch.float64)
    stacked = torch.stack([value.double() for value in held.values()])
    average: Tensor = torch.tensordot(weights / weights.sum(), stacked, dims=1)
    return average.to(first.dtype)
