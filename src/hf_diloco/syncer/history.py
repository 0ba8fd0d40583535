"""What the event tape says of a run that goes on: who had joined, which values were made of which updates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hf_diloco.core.messages import Version


@dataclass(frozen=True)
class Made:
    """One published value, as the tape knows it."""

    digest: str
    participants: Sequence[Mapping[str, Any]]  # as in the tape's line: learner_id, update_id, tokens, ...


@dataclass
class History:
    """The tape's lines after a checkpoint, in their order, on top of what the checkpoint says.

    Args:
        held: version of each fragment in the checkpoint.
        merged: for each fragment, the last update of each learner that is in it.
        known_learners: who had joined, and not left for good.
        incarnation: of the syncer that wrote the checkpoint.
        outer_step: t.
        final: the checkpoint holds the final values.
        all_left: learners had joined, and all of them had taken leave.
    """

    held: Sequence[Version]
    merged: Sequence[Mapping[int, str]]
    known_learners: set[int]
    incarnation: int
    outer_step: int
    final: bool = False
    all_left: bool = False
    finished: bool = False  # the run came to its end, and its syncer with it

    def __post_init__(self) -> None:
        self.made: list[dict[Version, Made]] = [{} for _ in self.held]

    def read(self, lines: Iterable[Mapping[str, Any]]) -> History:
        """Take lines in, oldest first."""
        for line in lines:
            if line["kind"] == "start":
                self.incarnation, self.finished = line["incarnation"], False
            elif line["kind"] == "join":
                self.known_learners.add(line["learner_id"])
                self.all_left = False
            elif line["kind"] == "leave" and line["for_good"]:
                self.known_learners.discard(line["learner_id"])
                self.all_left = not self.known_learners
            elif line["kind"] == "round":
                self._read_round(line)
            elif line["kind"] == "recovered":
                self._read_recovered(line)
            elif line["kind"] == "finish":
                self.finished = not line["stopped"]
        return self

    def _read_round(self, line: Mapping[str, Any]) -> None:
        version = Version(*line["version"])
        self.made[line["fragment_index"]][version] = Made(line["digest"], line["participants"])
        self.outer_step = max(self.outer_step, version.outer_step)

    def _read_recovered(self, line: Mapping[str, Any]) -> None:
        """A syncer came back, and went on from these values: newer ones of before it are void."""
        for made, fragment in zip(self.made, line["fragments"], strict=True):
            adopted = Version(*fragment["adopted"])
            for version in [version for version in made if version > adopted]:
                del made[version]
            made[Version(line["incarnation"], adopted.outer_step)] = Made(fragment["digest"], [])
        self.outer_step = max(self.outer_step, line["outer_step"])

    def forget(self, outer_step: int) -> None:
        """Go back to the checkpoint itself: what was merged after it is void, and nobody is waited for."""
        self.made = [{} for _ in self.held]
        self.known_learners, self.outer_step = set(), outer_step
        self.final = self.all_left = self.finished = False

    @property
    def norms(self) -> list[list[float]]:
        """Of each fragment the norms per inner step of the updates that were merged."""
        return [
            [update["norm"] / update["steps"] for made in chain.values() for update in made.participants]
            for chain in self.made
        ]

    def digest(self, fragment_index: int, version: Version) -> str:
        """Of a value that the tape knows."""
        return self.made[fragment_index][version].digest

    def merged_in(self, fragment_index: int, version: Version) -> dict[int, str]:
        """The last update of each learner that is in this value: in the checkpoint's, or made between that and it."""
        merged = dict(self.merged[fragment_index])
        for other, made in sorted(self.made[fragment_index].items()):
            if self.held[fragment_index] < other <= version:
                merged.update(
                    {participant["learner_id"]: participant["update_id"] for participant in made.participants}
                )
        return merged

    def merges_up_to(self, versions: Sequence[Version]) -> list[Sequence[Mapping[str, Any]]]:
        """Participants of each merge since the checkpoint's counts were taken that is in these values."""
        return [
            made.participants
            for version, chain in zip(versions, self.made, strict=True)
            for other, made in chain.items()
            if other <= version and made.participants
        ]
