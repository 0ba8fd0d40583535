"""A run as its checkpoints keep it, and what its tape adds to the newest one."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

import hf_diloco
from hf_diloco.core.messages import Version
from hf_diloco.errors import ConfigError, DiLoCoError
from hf_diloco.syncer.checkpoint import (
    Checkpoint,
    checkpoints_by_step,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from hf_diloco.syncer.history import History
from hf_diloco.syncer.roster import Terms
from hf_diloco.syncer.run_directory import RunDirectory
from hf_diloco.syncer.state import GlobalState, SavedFragment, published_tensors
from hf_diloco.syncer.supply import Supply
from hf_diloco.syncer.tape import iterate_tape

_LINK_FROM_BYTES = 64 << 20  # smaller constants are written anew: each checkpoint then has its own copy of the bytes


@dataclass(frozen=True)
class Facts:
    """What a checkpoint keeps besides tensors; taken at one moment, with the tape's size of that moment."""

    incarnation: int
    outer_step: int
    started: bool
    known_learners: list[int]
    accounts: list[dict[str, Any]]
    num_merges: int
    num_participants: int
    tape_bytes: int
    learner_checkpoints: dict[str, str]  # of a checkpoint of the whole run: learner id -> path on its machine
    final: bool = False  # these are the values that the run ends with
    shard_passes: list[int] = field(default_factory=list)  # times that each shard was read to its end
    running_statistics: list[str] = field(default_factory=list)  # constants that are, as the run began
    norms: list[list[float]] = field(default_factory=list)  # of each fragment's last updates, per inner step


def save_run(
    directory: Path, terms: Terms, state: GlobalState, supply: Supply, facts: Facts, *, earlier: Path | None = None
) -> Path:
    """Write a checkpoint of a run, while it goes on: each fragment is copied by itself, for as long as that takes.

    Args:
        directory: of the run's checkpoints.
        terms: of the run.
        state: its fragments.
        supply: its constants and files.
        facts: the rest.
        earlier: a checkpoint of this run that has the constants already.

    Raises:
        DiLoCoError: as :func:`~hf_diloco.syncer.checkpoint.save_checkpoint`.
    """
    described: list[dict[str, Any]] = []
    meta: dict[str, Any] = {
        "library_version": hf_diloco.__version__, "terms": terms.to_dict(), "fingerprint": terms.layout.fingerprint,
        "facts": vars(facts), "fragments": described,
    }  # fmt: skip
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in supply.constants.values())
    linked = earlier if num_bytes >= _LINK_FROM_BYTES and not supply.settled else None

    def groups() -> Iterator[tuple[str, Mapping[str, Tensor]]]:
        if linked is None:
            yield "constants", supply.constants
        for index in range(state.layout.num_fragments):
            saved = state.save_fragment(index)
            described.append({"version": saved.version, "digest": saved.digest, "merged": dict(saved.merged)})
            yield _group(index), saved.tensors

    unchanged = {"constants": linked} if linked is not None else {}
    return save_checkpoint(directory, facts.outer_step, groups(), meta, supply.files, unchanged=unchanged)


@dataclass(frozen=True)
class SavedRun:
    """One checkpoint of a run, read."""

    checkpoint: Checkpoint
    terms: Terms
    facts: Facts

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> SavedRun:
        """Make sense of a checkpoint.

        Raises:
            DiLoCoError: another release wrote it.
        """
        version = checkpoint.meta.get("library_version")
        if version != hf_diloco.__version__:
            raise DiLoCoError(
                f"the checkpoint {checkpoint.path} was written by hf-diloco {version}, this is "
                f"{hf_diloco.__version__}. Install that version to go on with this run, or choose another --run-dir."
            )
        return cls(checkpoint, Terms.from_dict(checkpoint.meta["terms"]), Facts(**checkpoint.meta["facts"]))

    def fragment(self, fragment_index: int) -> SavedFragment:
        """One fragment, read from disk."""
        described = self.checkpoint.meta["fragments"][fragment_index]
        merged = {int(learner_id): update_id for learner_id, update_id in described["merged"].items()}
        tensors = self.checkpoint.load(_group(fragment_index))
        return SavedFragment(Version(*described["version"]), described["digest"], merged, tensors)

    @property
    def constants(self) -> dict[str, Tensor]:
        """Frozen parameters and persistent buffers by name."""
        return self.checkpoint.load("constants")

    def tensors(self) -> dict[str, Tensor]:
        """The published parameters by name."""
        layout = self.terms.layout
        return published_tensors(
            layout, [self.fragment(index).tensors["published"] for index in range(layout.num_fragments)]
        )

    def history(self, tape: Path, *, go_back: bool = False) -> History:
        """What happened since, by the tape; with ``go_back`` all of it is void."""
        facts, described = self.facts, self.checkpoint.meta["fragments"]
        history = History(
            held=[Version(*fragment["version"]) for fragment in described],
            merged=[{int(who): update for who, update in fragment["merged"].items()} for fragment in described],
            known_learners=set(facts.known_learners),
            incarnation=facts.incarnation,
            outer_step=facts.outer_step,
            final=facts.final,
            all_left=facts.started and not facts.known_learners,
        )
        if tape.exists():
            history.read(iterate_tape(tape, facts.tape_bytes))
        if go_back:
            history.forget(facts.outer_step)
        return history


def joint_run(directory: RunDirectory, outer_step: int) -> SavedRun:
    """The checkpoint of the whole run at this outer step.

    Raises:
        ConfigError: there is none.
        DiLoCoError: it is broken.
    """
    paths = checkpoints_by_step(directory.joint)
    if outer_step not in paths:
        there = f"there are: {', '.join(map(str, paths))}" if paths else "there is none (see --save-every)"
        raise ConfigError(f"{directory.path} holds no checkpoint of the whole run at step {outer_step}; {there}.")
    return SavedRun.from_checkpoint(load_checkpoint(paths[outer_step]))


def put_newer_aside(directory: RunDirectory, outer_step: int) -> None:
    """Newer checkpoints than what the run goes back to are of what is void now.

    They would win at the next restart; those of the whole run would be taken for the run's, and kept for its own.
    """
    for kind in (directory.checkpoints, directory.joint):
        for step, path in checkpoints_by_step(kind).items():
            if step > outer_step:
                aside = directory.path / "gone-back" / kind.name / f"{path.name}-{time.time_ns()}"
                aside.parent.mkdir(parents=True, exist_ok=True)
                path.rename(aside)


def latest_run(directory: RunDirectory) -> SavedRun | None:
    """The newest whole checkpoint of a run; None if there is none.

    Raises:
        DiLoCoError: all are broken, or another release wrote them.
    """
    found = latest_checkpoint(directory.checkpoints)
    return None if found is None else SavedRun.from_checkpoint(found)


def last_incarnation(tape: Path) -> int:
    """Of the syncers that wrote a tape; 0 if none did. For runs that have no checkpoint yet."""
    if not tape.exists():
        return 0
    return max((line["incarnation"] for line in iterate_tape(tape) if line["kind"] == "start"), default=0)


def _group(fragment_index: int) -> str:
    return f"fragment-{fragment_index:04d}"
