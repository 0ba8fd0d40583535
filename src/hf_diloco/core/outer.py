"""The outer optimizer: how a merged pseudogradient moves the global value of a fragment.

Source: DiLoCo (arXiv 2311.08105), Decoupled DiLoCo (arXiv 2604.21428): SGD with Nesterov momentum on Θ, with the
merged Δ in place of a gradient:

    b ← μ b + Δ          (b = Δ at the first step)
    Θ ← Θ - lr (Δ + μ b)      with Nesterov momentum, Θ ← Θ - lr b without
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class OuterOptimizer:
    """``torch.optim.SGD`` over named global values, which it updates in place.

    Args:
        values: The global values by name, fp32. They may lie in shared memory; they are never replaced.
        lr: Outer learning rate. 1 with ``momentum`` 0 sets the global value to the merged local one.
        momentum: μ above; 0 turns momentum off, and ``nesterov`` with it.
        nesterov: Look ahead by one step of the momentum.

    Raises:
        ValueError: a value is not fp32, or torch refuses ``lr`` or ``momentum``.
    """

    def __init__(self, values: Mapping[str, Tensor], lr: float, momentum: float, nesterov: bool = True) -> None:
        for name, value in values.items():
            if value.dtype != torch.float32:
                raise ValueError(f"the global value of {name!r} must be torch.float32, got {value.dtype}")
        self._values = dict(values)
        self._sgd = torch.optim.SGD(
            list(self._values.values()), lr=lr, momentum=momentum, nesterov=nesterov and momentum != 0
        )

    @torch.no_grad()
    def step(self, pseudogradients: Mapping[str, Tensor]) -> None:
        """Move every value by one outer step.

        Args:
            pseudogradients: The merged Δ of each value, same names, shapes and dtype. Not changed.

        Raises:
            ValueError: a name is missing or unknown, or a shape or dtype differs; no value has moved then.
        """
        self._check(pseudogradients, "pseudogradient")
        for name, value in self._values.items():
            value.grad = pseudogradients[name].detach()
        try:
            self._sgd.step()
        finally:
            for value in self._values.values():
                value.grad = None

    def state_dict(self) -> dict[str, Tensor]:
        """The momentum of each value by name; empty before the first step and without momentum. Not copies."""
        buffers = {name: self._sgd.state[value].get("momentum_buffer") for name, value in self._values.items()}
        return {name: buffer for name, buffer in buffers.items() if buffer is not None}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a copy of what :meth:`state_dict` returned; empty: from no momentum.

        Raises:
            ValueError: a name is missing or unknown, or a shape or dtype differs.
        """
        if state:
            self._check(state, "momentum")
        for name, value in self._values.items():
            buffer = state[name].detach().clone().to(value.device) if state else None
            self._sgd.state[value] = {"momentum_buffer": buffer}

    def _check(self, tensors: Mapping[str, Tensor], what: str) -> None:
        if differing := sorted(tensors.keys() ^ self._values.keys()):
            missing = differing[0] in self._values
            raise ValueError(f"{'no' if missing else 'unknown'} {what} {'for ' if missing else ''}{differing[0]!r}")
        for name, value in self._values.items():
            got = tensors[name]
            if got.shape != value.shape or got.dtype != value.dtype:
                raise ValueError(
                    f"{what} of {name!r} must be {tuple(value.shape)} of {value.dtype}, "
                    f"got {tuple(got.shape)} of {got.dtype}"
                )
