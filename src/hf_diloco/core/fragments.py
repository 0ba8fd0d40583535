"""Which parameters are synced together: the balanced split of named tensors into fragments.

Source: Decoupled DiLoCo (arXiv 2604.21428), appendix C: tensors biggest first into the lightest of P bins. Beyond
the paper, a tensor is cut between rows where it would make one fragment much larger than the others (the embedding
of a 150k-token vocabulary), so that the traffic of every outer step is about the same.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from hf_diloco.errors import ConfigError, NoTrainableParametersError

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class FragmentSlice:
    """Rows ``first_row`` to ``last_row`` (exclusive) of one tensor; a 0-dim tensor is one row."""

    name: str
    first_row: int
    last_row: int
    shape: Shape  # of the slice
    offset: int  # of its first value in the fragment's flat vector
    averaged: bool  # merged by plain average (embeddings) instead of RDA

    @property
    def num_parameters(self) -> int:
        """Number of values in the slice."""
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class Fragment:
    """Slices that are synced as a unit; its flat vector is their concatenation, each raveled row by row."""

    index: int
    slices: tuple[FragmentSlice, ...]  # by name, then by row

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors it has rows of, each once."""
        return tuple(dict.fromkeys(piece.name for piece in self.slices))

    @cached_property
    def num_parameters(self) -> int:
        """Length of its flat vector."""
        return sum(piece.num_parameters for piece in self.slices)


@dataclass(frozen=True, kw_only=True)
class FragmentLayout:
    """How the trainable tensors of a model are split into fragments; equal at all who take part in a run."""

    fragments: tuple[Fragment, ...]
    shapes: Mapping[str, Shape]  # of the whole tensors, by name
    averaged: frozenset[str]

    @classmethod
    def build(
        cls, shapes: Mapping[str, Sequence[int]], num_fragments: int, averaged: Collection[str] = ()
    ) -> FragmentLayout:
        """Split tensors into ``num_fragments`` fragments of about equal size.

        Tensors go biggest first into the lightest fragment. A tensor is cut by rows if it is larger than
        ``total / num_fragments`` or if the fragment would outgrow 1.1 times the mean; then as many rows as fill the
        fragment to the mean go there, and the rest goes back into the queue. So no fragment is larger than 1.1 times
        the mean if no row is larger than a tenth of the mean; with longer rows it is as even as they allow (a greedy
        split: finding the best one is NP-hard). The result depends on the arguments only, not on their order.

        Args:
            shapes: Shape of each trainable tensor by name; tied tensors once. Tensors without values get no slice.
            num_fragments: P of the paper; at most :func:`most_fragments`.
            averaged: Names of the tensors that are merged by plain average (embeddings).

        Raises:
            ConfigError: ``num_fragments`` is out of range, a shape is negative, or ``averaged`` has an unknown name.
            NoTrainableParametersError: there is no value to train.
        """
        whole = {name: tuple(int(size) for size in shapes[name]) for name in sorted(shapes)}
        _check(whole, num_fragments, averaged)
        bins = _split(whole, num_fragments)
        fragments = tuple(_fragment(index, pieces, whole, averaged) for index, pieces in enumerate(bins))
        return cls(fragments=fragments, shapes=whole, averaged=frozenset(averaged))

    @property
    def num_fragments(self) -> int:
        """P of the paper."""
        return len(self.fragments)

    @cached_property
    def num_parameters(self) -> int:
        """Number of values in all fragments together."""
        return sum(fragment.num_parameters for fragment in self.fragments)

    @cached_property
    def fingerprint(self) -> str:
        """32 hex digits; equal for two layouts if and only if every slice, shape and merge rule is equal."""
        slices = [
            [(piece.name, piece.first_row, piece.last_row, piece.averaged) for piece in fragment.slices]
            for fragment in self.fragments
        ]
        described = json.dumps([sorted(self.shapes.items()), sorted(self.averaged), slices])
        return hashlib.blake2b(described.encode(), digest_size=16).hexdigest()


def most_fragments(shapes: Mapping[str, Sequence[int]]) -> int:
    """The largest ``num_fragments`` that :meth:`FragmentLayout.build` accepts: the number of rows of all tensors."""
    return sum(_num_rows(shape) for shape in shapes.values() if math.prod(shape))


def first_difference(
    ours: Mapping[str, Sequence[int]],
    theirs: Mapping[str, Sequence[int]],
    our_averaged: Collection[str] = (),
    their_averaged: Collection[str] = (),
) -> str | None:
    """Why a learner's tensors cannot be merged into this run, as a sentence; None if they can.

    Args:
        ours: Shapes of the run's trainable tensors by name.
        theirs: Shapes of the learner's.
        our_averaged: Names of the tensors that the run merges by plain average.
        their_averaged: Names of those that the learner would.

    Returns:
        The first difference, tensors taken by name.
    """
    for name in sorted(ours.keys() | theirs.keys()):
        if name not in theirs:
            return f"the run trains {name!r} of shape {_shown(ours[name])}, the learner does not"
        if name not in ours:
            return f"the learner trains {name!r} of shape {_shown(theirs[name])}, the run does not"
        if tuple(ours[name]) != tuple(theirs[name]):
            return f"{name!r} has shape {_shown(ours[name])} in the run and {_shown(theirs[name])} at the learner"
        if (name in our_averaged) != (name in their_averaged):
            rules = ("plain average", "RDA") if name in our_averaged else ("RDA", "plain average")
            return f"{name!r} is merged by {rules[0]} in the run and by {rules[1]} at the learner"
    return None


def _shown(shape: Sequence[int]) -> str:
    return str(tuple(shape))


def _check(shapes: Mapping[str, Shape], num_fragments: int, averaged: Collection[str]) -> None:
    for name, shape in shapes.items():
        if any(size < 0 for size in shape):
            raise ConfigError(f"tensor {name!r} has shape {shape}; sizes must not be negative")
    if unknown := sorted(set(averaged) - shapes.keys()):
        raise ConfigError(f"averaged names {unknown[0]!r}, which is none of the {len(shapes)} trainable tensors")
    most = most_fragments(shapes)
    if most == 0:
        raise NoTrainableParametersError(
            "there is nothing to sync: the model has no parameter with requires_grad=True. "
            "Unfreeze some of them, or attach an adapter, before training starts."
        )
    if num_fragments < 1:
        raise ConfigError(f"num_fragments must be at least 1, got {num_fragments}")
    if num_fragments > most:
        raise ConfigError(
            f"num_fragments={num_fragments}, but the trainable tensors can be split into {most} pieces at most "
            f"(one a row); set num_fragments to {most} or less"
        )


# ------------------------------------------------------------------------------------------------ the greedy split


@dataclass(frozen=True, order=True)
class _Piece:
    """Rows of one tensor that are still together; the order of the fields is the order of placing."""

    rank: tuple[int, ...]
    name: str
    first_row: int
    num_rows: int
    row_size: int

    @property
    def num_parameters(self) -> int:
        return self.num_rows * self.row_size

    def cut(self, num_rows: int, by_row: bool) -> tuple[_Piece, _Piece]:
        """The first ``num_rows`` rows, and the others."""
        rest = (self.first_row + num_rows, self.num_rows - num_rows)
        head = _piece(self.name, self.first_row, num_rows, self.row_size, by_row)
        return head, _piece(self.name, *rest, self.row_size, by_row)


def _piece(name: str, first_row: int, num_rows: int, row_size: int, by_row: bool) -> _Piece:
    size = num_rows * row_size
    return _Piece((-row_size, -size) if by_row else (-size,), name, first_row, num_rows, row_size)


def _num_rows(shape: Sequence[int]) -> int:
    return shape[0] if len(shape) else 1


def _split(shapes: Mapping[str, Shape], num_bins: int) -> list[list[_Piece]]:
    """Pieces of each bin.

    Where rows are long, an even split may need the tensors with the longest rows placed first: that order is tried
    when the usual one, by size, leaves a bin above the bound.
    """
    total = sum(math.prod(shape) for shape in shapes.values())
    by_size = _fill(shapes, num_bins, total, by_row=False)
    if not _too_large(_largest(by_size), num_bins, total):
        return by_size
    by_row = _fill(shapes, num_bins, total, by_row=True)
    return min(by_size, by_row, key=_largest)


def _fill(shapes: Mapping[str, Shape], num_bins: int, total: int, *, by_row: bool) -> list[list[_Piece]]:
    """Place pieces in their order into the lightest bin, cutting those that do not fit; no bin stays empty."""
    queue = [
        _piece(name, 0, _num_rows(shape), math.prod(shape[1:]), by_row)
        for name, shape in shapes.items()
        if math.prod(shape)
    ]
    heapq.heapify(queue)
    rows_left, bins_empty = sum(piece.num_rows for piece in queue), num_bins
    lightest = [(0, index) for index in range(num_bins)]  # a heap already
    bins: list[list[_Piece]] = [[] for _ in range(num_bins)]
    while queue:
        piece = heapq.heappop(queue)
        load, index = lightest[0]
        bins_empty -= not bins[index]
        fits = piece.num_parameters * num_bins <= total and not _too_large(load + piece.num_parameters, num_bins, total)
        num_rows = piece.num_rows if fits else max(1, (total // num_bins - load) // piece.row_size)
        num_rows = min(num_rows, piece.num_rows, rows_left - bins_empty)  # leave a row for each empty bin
        if num_rows < piece.num_rows:
            piece, rest = piece.cut(num_rows, by_row)
            heapq.heappush(queue, rest)
        bins[index].append(piece)
        rows_left -= num_rows
        heapq.heapreplace(lightest, (load + piece.num_parameters, index))
    return bins


def _largest(bins: list[list[_Piece]]) -> int:
    return max(sum(piece.num_parameters for piece in pieces) for pieces in bins)


def _too_large(load: int, num_bins: int, total: int) -> bool:
    """Above 1.1 times the mean; in integers, since float rounding must not decide where a tensor is cut."""
    return 10 * load * num_bins > 11 * total


def _fragment(index: int, pieces: list[_Piece], shapes: Mapping[str, Shape], averaged: Collection[str]) -> Fragment:
    """The bin's pieces by name and row, neighbouring ones joined."""
    joined: list[tuple[str, int, int]] = []
    for piece in sorted(pieces, key=lambda piece: (piece.name, piece.first_row)):
        first_row = piece.first_row
        if joined and joined[-1][0] == piece.name and joined[-1][2] == first_row:
            first_row = joined.pop()[1]
        joined.append((piece.name, first_row, piece.first_row + piece.num_rows))
    slices, offset = [], 0
    for name, first, last in joined:
        shape = (last - first, *shapes[name][1:]) if shapes[name] else ()
        slices.append(
            FragmentSlice(
                name=name, first_row=first, last_row=last, shape=shape, offset=offset, averaged=name in averaged
            )
        )
        offset += slices[-1].num_parameters
    return Fragment(index=index, slices=tuple(slices))
