"""The global parameters: true values, published values, outer optimizer, one fragment at a time."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_diloco.config import SyncerConfig
from hf_diloco.core.codec import decode, digest, encode
from hf_diloco.core.fragments import FragmentLayout
from hf_diloco.core.merge import MergeAccumulator
from hf_diloco.core.messages import Version
from hf_diloco.core.outer import OuterOptimizer

_NO_CHANGE = torch.empty(0, dtype=torch.uint8)


@dataclass(frozen=True)
class SavedFragment:
    """One fragment as a checkpoint keeps it."""

    version: Version
    digest: str  # of the published value
    merged: Mapping[int, str]  # id of the last update of each learner that is in it
    tensors: Mapping[str, Tensor]  # value, published and, if there is any, momentum; flat fp32


def published_tensors(layout: FragmentLayout, published: Sequence[Tensor]) -> dict[str, Tensor]:
    """The published values of all fragments by parameter name, in their shapes."""
    tensors = {name: torch.empty(tuple(shape)) for name, shape in layout.shapes.items()}
    for fragment, flat in zip(layout.fragments, published, strict=True):
        for part in fragment.slices:
            piece = flat[part.offset : part.offset + part.num_parameters]
            target = tensors[part.name]
            rows = target.view(1) if target.dim() == 0 else target[part.first_row : part.last_row]
            rows.copy_(piece.view(rows.shape))
    return tensors


class GlobalState:
    """Theta, Theta-hat and outer momentum of every fragment, as flat fp32 tensors on the CPU.

    The published value (Theta-hat) is what learners hold. A merge moves the true value (Theta) by one outer step and
    the published one by the decoded difference to it, so that what rounding loses goes into the next publication.

    Args:
        layout: how the parameters are split.
        config: outer optimizer, merge rule, wire format, what happens on arrival.
        incarnation: of this syncer process.
    """

    def __init__(self, layout: FragmentLayout, config: SyncerConfig, incarnation: int = 1) -> None:
        self.layout = layout
        self._config = config
        sizes = [fragment.num_parameters for fragment in layout.fragments]
        self.values = [torch.zeros(size) for size in sizes]
        self.published = [torch.zeros(size) for size in sizes]
        self.digests = [""] * len(sizes)
        self.versions = [Version(incarnation, 0)] * len(sizes)
        self.merged: list[dict[int, str]] = [{} for _ in sizes]  # of each learner the last update that is in it
        self.lock = threading.Lock()  # held while a fragment changes: what save_fragment copies is whole
        self._previous: list[Tensor | None] = [None] * len(sizes)  # published before; only for `overwrite`
        self._differences: list[Tensor | None] = [None] * len(sizes)  # encoded: from the previous to the published
        self._outer = [
            OuterOptimizer({"value": value}, lr=config.outer_lr, momentum=config.outer_momentum)
            for value in self.values
        ]

    def set_initial(self, fragment_index: int, value: Tensor) -> None:
        """Begin with this value, flat fp32."""
        self.values[fragment_index].copy_(value)
        self.published[fragment_index].copy_(value)
        self.digests[fragment_index] = digest(value)

    def new_accumulator(self, fragment_index: int) -> MergeAccumulator:
        """An empty sum for one round of this fragment."""
        return MergeAccumulator(self.layout.fragments[fragment_index], self._config.merge)

    def pseudogradient(self, fragment_index: int, shipped: Tensor, *, stale_anchor: bool) -> Tensor:
        """What a learner's shipped difference (anchor - value) means for the merge.

        Under `carry` it is the pseudogradient. Under `overwrite` the pseudogradient is taken from the current
        published value (paper App. D.2), which is one version ahead of the anchor if that is stale.
        """
        previous = self._previous[fragment_index]
        if self._config.on_arrival == "carry" or not stale_anchor or previous is None:
            return shipped
        return shipped.add_(self.published[fragment_index]).sub_(previous)

    def merge(self, fragment_index: int, merged: Tensor, version: Version, updates: Mapping[int, str]) -> None:
        """Take the outer step with the merged pseudogradient; make and remember the publication.

        Args:
            fragment_index: of the fragment.
            merged: the pseudogradient, flat fp32.
            version: of the new value.
            updates: learner id -> id of its update that is part of it.
        """
        value, published = self.values[fragment_index], self.published[fragment_index]
        self._outer[fragment_index].step({"value": merged})
        difference = encode(value - published, self._config.wire_format)
        if self._config.on_arrival == "overwrite":
            self._previous[fragment_index] = published.clone()
        published.add_(decode(difference, self._config.wire_format, published.shape))
        self._differences[fragment_index] = difference
        self.digests[fragment_index] = digest(published)
        self.versions[fragment_index] = version
        self.merged[fragment_index].update(updates)

    def payload(self, fragment_index: int, *, full: bool) -> tuple[Tensor, str]:
        """What to send, and its wire format: the last difference (empty: no change), or the full value in fp32."""
        difference = self._differences[fragment_index]
        if full or difference is None:
            return self.published[fragment_index].view(torch.uint8), "fp32"
        return difference, self._config.wire_format

    def settle(self) -> None:
        """Theta := Theta-hat, so that the final values are exactly what every learner holds."""
        for value, published in zip(self.values, self.published, strict=True):
            value.copy_(published)

    def tensors(self) -> dict[str, Tensor]:
        """The published values by parameter name, in their shapes."""
        return published_tensors(self.layout, self.published)

    # ------------------------------------------------------------------------------------------------- kept, given back

    def save_fragment(self, fragment_index: int) -> SavedFragment:
        """A copy of one fragment, whole in itself; from any thread."""
        with self.lock:
            tensors = {
                "value": self.values[fragment_index].clone(),
                "published": self.published[fragment_index].clone(),
            }
            momentum = self._outer[fragment_index].state_dict().get("value")
            if momentum is not None:
                tensors["momentum"] = momentum.clone()
            version, merged = self.versions[fragment_index], dict(self.merged[fragment_index])
            return SavedFragment(version, self.digests[fragment_index], merged, tensors)

    def load_fragment(self, fragment_index: int, saved: SavedFragment) -> None:
        """Go on from what :meth:`save_fragment` returned."""
        self.values[fragment_index].copy_(saved.tensors["value"])
        self.published[fragment_index].copy_(saved.tensors["published"])
        momentum = saved.tensors.get("momentum")
        self._outer[fragment_index].load_state_dict({} if momentum is None else {"value": momentum})
        self.digests[fragment_index] = saved.digest
        self.versions[fragment_index], self.merged[fragment_index] = saved.version, dict(saved.merged)

    def adopt(self, fragment_index: int, value: Tensor, version: Version, merged: Mapping[int, str]) -> None:
        """Go on from a published value that a learner handed back: Theta := Theta-hat, the momentum stays."""
        self.set_initial(fragment_index, value)
        self.versions[fragment_index], self.merged[fragment_index] = version, dict(merged)

    def stamp(self, incarnation: int) -> None:
        """Give every fragment a version of this syncer incarnation; who holds the value need not be sent it again."""
        self.versions = [Version(incarnation, version.outer_step) for version in self.versions]
        self._differences = [_NO_CHANGE] * len(self.versions)
        if self._config.on_arrival == "overwrite":
            self._previous = [published.clone() for published in self.published]
