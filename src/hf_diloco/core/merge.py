"""The merge: what learners' pseudogradients of one fragment become together.

Source: Decoupled DiLoCo (arXiv 2604.21428): token weights and radial-directional averaging (RDA). With
φ(x) = x / ‖x‖ and φ(0) = 0,

    RDA({Δ_m, w_m}) = (Σ w_m ‖Δ_m‖ / Σ w_m) · φ(Σ w_m φ(Δ_m) / Σ w_m)

The paper prints the first factor as a mean of vectors; the mean of the norms is meant. Everything is accumulated as
running means, update by update, so memory does not grow with the number of learners, and M equal updates merge to
the same as one. The order of arrival changes the result by rounding only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hf_diloco.core.fragments import Fragment

# Directions whose mean is shorter than this have cancelled: what is left of unit vectors is rounding (fp32: 6e-8 each).
_CANCELLED = 1e-5
# Values that are worked on at a time: the temporaries stay in the processor's cache.
_SLAB = 1 << 17


def pseudogradient(global_value: Tensor, local_value: Tensor) -> Tensor:
    """``global_value - local_value`` in fp32: what the outer optimizer takes for a gradient (Δ of the paper).

    Raises:
        ValueError: the shapes differ.
    """
    if global_value.shape != local_value.shape:
        raise ValueError(
            f"global value of shape {tuple(global_value.shape)}, local value of shape {tuple(local_value.shape)}"
        )
    return global_value.to(torch.float32) - local_value.to(torch.float32)


def token_weight(tokens: int, steps: int) -> float:
    """Weight of an update that ``steps`` inner steps made of ``tokens`` tokens: tokens · (tokens / steps).

    Both more work and more work per step count. 0.0 if ``steps`` is 0: nothing to merge.

    Raises:
        ValueError: one of them is negative.
    """
    if tokens < 0 or steps < 0:
        raise ValueError(f"tokens and steps must not be negative, got tokens={tokens}, steps={steps}")
    return tokens * tokens / steps if steps else 0.0


def weighted_average(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Σ w_m Δ_m / Σ w_m of one tensor position.

    Args:
        tensors: One tensor per learner, all of the same shape.
        weights: Their weights; they need not sum to 1.

    Returns:
        A new tensor of that shape; fp32, or fp64 if they are.

    Raises:
        ValueError: as :func:`radial_directional_average`.
    """
    return _merge(tensors, weights, directional=False)


def radial_directional_average(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """RDA of one tensor position (the equation above): mean norm times the direction of the mean direction.

    Unlike a plain average it does not shrink when learners moved in different directions. If the directions cancel,
    there is none to keep, and the plain weighted average is returned.

    Args:
        tensors: One tensor per learner, all of the same shape.
        weights: Their weights; they need not sum to 1.

    Returns:
        A new tensor of that shape; fp32, or fp64 if they are. Norms are taken in fp64.

    Raises:
        ValueError: not as many weights as tensors; different shapes; a weight is negative or not finite, or all are
            zero; a tensor holds NaN or infinity.
    """
    return _merge(tensors, weights, directional=True)


class MergeAccumulator:
    """Merges the updates of one fragment as they arrive, slice by slice.

    RDA for every slice, plain average for slices marked ``averaged`` and for all if ``merge`` is "average". Holds two
    fp32 vectors of the fragment's length (one where no RDA is done), however many updates are added.

    Args:
        fragment: Whose updates these are.
        merge: "rda" or "average".

    Raises:
        ValueError: ``merge`` is something else.
    """

    def __init__(self, fragment: Fragment, merge: str) -> None:
        if merge not in ("rda", "average"):
            raise ValueError(f"merge must be 'rda' or 'average', got {merge!r}")
        self.num_updates = 0  # with weight; others are not counted
        self.total_weight = 0.0
        self._fragment = fragment
        self._averages = [
            _RunningAverage(piece.num_parameters, directional=merge == "rda" and not piece.averaged)
            for piece in fragment.slices
        ]

    def add(self, pseudogradient_flat: Tensor, weight: float) -> None:
        """Take one learner's update in; with weight 0 it is checked and has no effect.

        Args:
            pseudogradient_flat: fp32, the fragment's flat vector. Neither kept nor changed.
            weight: See :func:`token_weight`.

        Raises:
            ValueError: wrong shape or dtype, NaN or infinity, or a weight that is negative or not finite. The
                accumulator is then as it was before.
        """
        num_parameters = self._fragment.num_parameters
        if pseudogradient_flat.shape != (num_parameters,) or pseudogradient_flat.dtype != torch.float32:
            raise ValueError(
                f"update of fragment {self._fragment.index} must be {num_parameters} values of torch.float32, "
                f"got shape {tuple(pseudogradient_flat.shape)} of {pseudogradient_flat.dtype}"
            )
        _check_weight(weight)
        pieces = self._pieces(pseudogradient_flat.detach())
        norms = [_norm(piece) for piece in pieces]
        for norm, where in zip(norms, self._fragment.slices, strict=True):
            if not math.isfinite(norm):
                raise ValueError(f"update of fragment {self._fragment.index} has NaN or infinity in {where.name!r}")
        if weight == 0.0:
            return
        self.num_updates += 1
        self.total_weight += weight
        for average, piece, norm in zip(self._averages, pieces, norms, strict=True):
            average.add(piece, norm, weight / self.total_weight)

    def result(self) -> Tensor:
        """The merged pseudogradient, a new flat fp32 vector. More updates may be added afterwards.

        Raises:
            ValueError: no update with weight has been added.
        """
        _check_total(self.total_weight)
        merged = torch.empty(self._fragment.num_parameters)
        for average, piece in zip(self._averages, self._pieces(merged), strict=True):
            average.write_to(piece)
        return merged

    def _pieces(self, flat: Tensor) -> list[Tensor]:
        return [flat[piece.offset : piece.offset + piece.num_parameters] for piece in self._fragment.slices]


class _RunningAverage:
    """Running means over the updates of one tensor or slice: of the values, the norms, and the directions."""

    def __init__(self, num_values: int, *, directional: bool, dtype: torch.dtype = torch.float32) -> None:
        self._num_updates = 0
        self._values = torch.zeros(num_values, dtype=dtype)
        self._norm = 0.0
        self._direction = torch.zeros(num_values, dtype=dtype) if directional else None

    def add(self, values: Tensor, norm: float, share: float) -> None:
        """Take in one update; ``share`` is its weight over the total weight so far, its own included."""
        self._num_updates += 1
        self._values.lerp_(values, share)  # exact for the first (share 1) and for equal values
        if self._direction is None:
            return
        self._norm += share * (norm - self._norm)
        for mean, slab in zip(_slabs(self._direction), _slabs(values), strict=True):
            mean.lerp_(_scaled(slab, 1 / norm if norm > 0 else 0.0), share)

    def write_to(self, out: Tensor) -> None:
        """Write the average into a flat vector."""
        length = 0.0 if self._direction is None else _norm(self._direction)
        if self._direction is None or self._num_updates == 1 or length < _CANCELLED:  # RDA of one update is the update
            out.copy_(self._values)
            return
        for slab, mean in zip(_slabs(out), _slabs(self._direction), strict=True):
            slab.copy_(_scaled(mean, self._norm / length))


def _merge(tensors: Sequence[Tensor], weights: Sequence[float], *, directional: bool) -> Tensor:
    if len(tensors) != len(weights):
        raise ValueError(f"{len(tensors)} tensors, but {len(weights)} weights")
    for weight in weights:
        _check_weight(weight)
    _check_total(sum(weights))
    shape = tensors[0].shape
    dtype = torch.promote_types(tensors[0].dtype, torch.float32)
    average = _RunningAverage(shape.numel(), directional=directional, dtype=dtype)
    total = 0.0
    for tensor, weight in zip(tensors, weights, strict=True):
        if tensor.shape != shape:
            raise ValueError(f"tensors of shape {tuple(shape)} and {tuple(tensor.shape)} cannot be merged")
        values = tensor.detach().reshape(-1).to(dtype)
        norm = _norm(values)
        if not math.isfinite(norm):
            raise ValueError("a tensor to be merged has NaN or infinity")
        if weight > 0.0:
            total += weight
            average.add(values, norm, weight / total)
    merged = torch.empty(shape.numel(), dtype=dtype)
    average.write_to(merged)
    return merged.reshape(shape)


def _check_weight(weight: float) -> None:
    if not (math.isfinite(weight) and weight >= 0.0):
        raise ValueError(f"a weight must be finite and not negative, got {weight}")


def _check_total(total_weight: float) -> None:
    if total_weight <= 0.0:
        raise ValueError("nothing to merge: the weights sum to zero")


def _slabs(values: Tensor) -> Iterator[Tensor]:
    return (values[start : start + _SLAB] for start in range(0, len(values), _SLAB))


def _scaled(slab: Tensor, factor: float) -> Tensor:
    """``slab * factor``, through fp64 where fp32 might not hold the factor (norms of huge or denormal values)."""
    if 1e-30 < factor < 1e30:
        return slab * factor
    return (slab.to(torch.float64) * factor).to(slab.dtype)


def _norm(values: Tensor) -> float:
    """Euclidean norm, summed in fp64; NaN or infinite if a value is."""
    return math.sqrt(sum(_sum_of_squares(slab) for slab in _slabs(values)))


def _sum_of_squares(slab: Tensor) -> float:
    wide = slab.to(torch.float64)
    return float(torch.dot(wide, wide))
