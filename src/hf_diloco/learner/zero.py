"""Tensors of a DeepSpeed ZeRO model: low-precision weights and fp32 masters, both spread over the ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hf_diloco.errors import UnsupportedError
from hf_diloco.learner.gathering import Gathering
from hf_diloco.learner.stored import LOW_PRECISION, Rows, Stored, all_rows, rows_of


def is_zero(tensor: Tensor) -> bool:
    """Whether DeepSpeed keeps the tensor, or its fp32 master, in pieces: stage 3, or stages 1 and 2."""
    return hasattr(tensor, "ds_id") or hasattr(tensor, "_hp_mapping")


class ZeroTensor(Stored):
    """A parameter of a DeepSpeed engine, ZeRO stage 1, 2 or 3.

    It is read and written through DeepSpeed's public functions, which gather one tensor whole on each rank, in
    DeepSpeed's own groups. The value is that of the fp32 master. What is changed has to be written twice: a master
    alone leaves old weights for the next forward pass, weights alone are lost at the next step of the optimizer.

    Raises:
        UnsupportedError: each rank has its own values (experts), or there is no optimizer to hold fp32 masters.
    """

    def __init__(self, name: str, tensor: Any, gathering: Gathering) -> None:
        self.tensor = tensor
        self._is_stage_3 = hasattr(tensor, "ds_id")
        self.shape = tuple(tensor.ds_shape if self._is_stage_3 else tensor.shape)
        self.held = all_rows(self.shape)
        self.shipped = {0: self.held}
        self._is_read_here = gathering.rank == 0
        if getattr(tensor, "allreduce", True) is False:
            raise UnsupportedError(
                f"{name!r} is an expert of DeepSpeed-MoE, which is not the same on all ranks; train it without expert "
                "parallelism (ep_size=1), or with FSDP2."
            )
        if self._is_stage_3 and tensor.requires_grad and not hasattr(tensor, "_z3_optimizer"):
            raise UnsupportedError(
                f"{name!r} is partitioned by DeepSpeed, but no engine trains it yet. Start with the model that "
                "deepspeed.initialize or accelerator.prepare gives back."
            )

    @property
    def keeps_small_updates(self) -> bool:
        """The fp32 master does."""
        return True

    def rows(self, rows: Rows) -> Tensor:
        """Of a copy of the master."""
        return rows_of(self._master(), rows)

    @contextmanager
    def changing(self, rows: Rows) -> Iterator[Tensor]:
        """Rows of a copy of the master; afterwards the copy is written to the master and to the weights."""
        master = self._master()
        yield rows_of(master, rows)
        if self._is_stage_3:
            self._set_stage_3(master)
        else:
            from deepspeed.utils import safe_set_full_fp32_param

            safe_set_full_fp32_param(self.tensor, master)
            self.tensor.copy_(master)

    def equals(self, rows: Rows, values: Tensor) -> bool:
        """Of the weights (stages 1 and 2: they are whole), or of this rank's part of the master."""
        if not self._is_stage_3:
            live = rows_of(self.tensor.detach(), rows)
            return torch.equal(live, values.to(live.device).to(live.dtype))
        from deepspeed import comm
        from deepspeed.utils import safe_get_local_fp32_param

        local = safe_get_local_fp32_param(self.tensor).reshape(-1)
        first_here = local.numel() * comm.get_rank(self.tensor.ds_process_group)  # in the whole tensor, raveled
        first = rows.first * math.prod(self.shape[1:])
        here = Rows(first_here, first_here + local.numel()).overlap(first, first + values.numel())
        wanted = values.reshape(-1)[here.first - first : here.last - first] if here.num_rows else values.new_empty(0)
        return torch.equal(local[here.first - first_here :][: here.num_rows], wanted.to(local.device))

    def whole(self) -> Tensor | None:
        """The copy on rank 0, gathered by DeepSpeed."""
        from deepspeed.runtime.zero import GatheredParameters

        with GatheredParameters([self.tensor]):
            return self.tensor.detach().to("cpu", copy=True).contiguous() if self._is_read_here else None

    def _master(self) -> Tensor:
        from deepspeed.utils import safe_get_full_fp32_param

        master: Tensor = safe_get_full_fp32_param(self.tensor)
        return master.float()

    def _set_stage_3(self, master: Tensor) -> None:
        from deepspeed import comm
        from deepspeed.runtime.zero import GatheredParameters
        from deepspeed.utils import safe_get_local_fp32_param, safe_set_local_fp32_param

        # Not safe_set_full_fp32_param: it fails where the ranks do not share the values evenly.
        size = safe_get_local_fp32_param(self.tensor).numel()  # the same on all ranks, the last ones padded
        group = self.tensor.ds_process_group
        padded = nn.functional.pad(master.reshape(-1), (0, size * comm.get_world_size(group) - master.numel()))
        safe_set_local_fp32_param(self.tensor, padded.narrow(0, size * comm.get_rank(group), size))
        with GatheredParameters([self.tensor], modifier_rank=0):
            if comm.get_rank(group) == 0:
                self.tensor.copy_(master)


def check_engine(engine: Any) -> None:
    """Refuse an engine whose weights cannot be reached.

    Raises:
        UnsupportedError: it runs a pipeline, or keeps fp32 masters without ZeRO.
    """
    if type(engine).__name__ == "PipelineEngine":
        raise UnsupportedError("DeepSpeed's pipeline parallelism is not supported; use ZeRO, or FSDP2.")
    check_masters(engine.module.parameters(), engine)


def check_masters(weights: Iterable[Tensor], keeper: object) -> None:
    """Refuse weights that are copies of fp32 masters which DeepSpeed keeps to itself: a write would be lost.

    Args:
        weights: of the model.
        keeper: engine or optimizer that trains them.

    Raises:
        UnsupportedError: they are (bf16 or fp16 without ZeRO).
    """
    if not type(keeper).__module__.startswith("deepspeed."):
        return
    if any(weight.requires_grad and weight.dtype in LOW_PRECISION and not is_zero(weight) for weight in weights):
        raise UnsupportedError(
            "DeepSpeed keeps the fp32 weights of this model in a place that cannot be reached; set "
            "zero_optimization.stage to 1, 2 or 3 in its configuration."
        )
