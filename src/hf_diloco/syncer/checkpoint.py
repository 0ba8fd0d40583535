"""Checkpoints that are whole or not there: written aside, flushed, moved into place, and checked when read.

A checkpoint is a directory ``step-00000123``::

    fragment-0000.safetensors ...  one file for each group of tensors
    constants.safetensors
    files/config.json ...  files that belong beside the weights
    checkpoint.json        outer step, facts, and size and SHA-256 of every other file; written last
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from hf_diloco.errors import DiLoCoError, DiLoCoWarning

logger = logging.getLogger(__name__)

_INDEX = "checkpoint.json"
_FORMAT = 1
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,200}")


@dataclass(frozen=True)
class Checkpoint:
    """What :func:`save_checkpoint` was given."""

    path: Path
    outer_step: int
    meta: dict[str, Any]
    files: dict[str, bytes]

    def load(self, group: str) -> dict[str, Tensor]:
        """One group of tensors.

        Raises:
            DiLoCoError: there is no such group, or it cannot be read.
        """
        path = self.path / f"{group}.safetensors"
        try:
            return load_file(path)
        except (OSError, SafetensorError) as error:
            raise DiLoCoError(f"{path} cannot be read: {error}") from error


def save_checkpoint(
    directory: Path,
    outer_step: int,
    groups: Iterable[tuple[str, Mapping[str, Tensor]]],
    meta: Mapping[str, Any],
    files: Mapping[str, bytes],
    *,
    unchanged: Mapping[str, Path] | None = None,
) -> Path:
    """Write one checkpoint. When this returns it is on disk; when it raises, the earlier ones are as they were.

    Args:
        directory: where the checkpoints of the run are.
        outer_step: names the checkpoint; one of the same step is replaced.
        groups: name and tensors by name; taken one after the other, so that no more than one need be in memory.
        meta: facts, anything that JSON can hold; read after the last group.
        files: plain file name -> content.
        unchanged: groups that an earlier checkpoint has already, and its path: they cost neither time nor room.

    Raises:
        DiLoCoError: the disk is full or cannot be written, or a name is not a plain file name.
    """
    for name in files:
        check_plain_name(name)
    target = directory / f"step-{outer_step:08d}"
    aside = directory / f".{target.name}.{os.getpid()}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _tidy(directory)
        (aside / "files").mkdir(parents=True)
        sums = {}
        for group, earlier in (unchanged or {}).items():
            name = f"{group}.safetensors"
            try:
                os.link(earlier / name, aside / name)
            except OSError:  # not every file system has hard links
                shutil.copyfile(earlier / name, aside / name)
            sums[name] = json.loads((earlier / _INDEX).read_text(encoding="utf-8"))["files"][name]
        for group, values in groups:
            check_plain_name(group)
            _save_tensors(aside / f"{group}.safetensors", values)
        for name, content in files.items():
            (aside / "files" / name).write_bytes(content)
        for path in sorted(aside.rglob("*")):
            if path.is_file() and (name := str(path.relative_to(aside))) not in sums:
                sums[name] = _checksum(path)
        index = {"format": _FORMAT, "outer_step": outer_step, "meta": dict(meta), "files": sums}
        (aside / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        replace_directory(aside, target)
    except BaseException as error:
        shutil.rmtree(aside, ignore_errors=True)
        if not isinstance(error, OSError | SafetensorError):
            raise
        raise DiLoCoError(
            f"the checkpoint {target} could not be written: {error}. Earlier checkpoints are as they were. "
            "Make room on the disk, or look at its permissions."
        ) from error
    return target


def load_checkpoint(path: Path) -> Checkpoint:
    """Read one checkpoint, and check every file of it.

    Raises:
        DiLoCoError: it is not there, or a file of it is missing, cut off or changed; the message names the file.
    """
    index_path = path / _INDEX
    try:
        index = json.loads(index_path.read_text(encoding="utf-8"))
        kind, outer_step, sums = index["format"], int(index["outer_step"]), dict(index["files"])
        meta = dict(index["meta"])
    except FileNotFoundError:
        raise DiLoCoError(f"{path} is not a whole checkpoint: {_INDEX} is missing.") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DiLoCoError(f"{index_path} is broken ({type(error).__name__}: {error}).") from error
    if kind != _FORMAT:
        raise DiLoCoError(f"{index_path} has format {kind!r}; this release reads format {_FORMAT}.")
    files: dict[str, bytes] = {}
    for name, expected in sums.items():
        file = path / name
        try:
            if (found := _checksum(file)) != expected:
                raise DiLoCoError(f"{file} is broken: {found} instead of {expected} was read.")
            if name.startswith("files/"):
                files[name.removeprefix("files/")] = file.read_bytes()
        except OSError as error:
            raise DiLoCoError(f"{file} cannot be read: {error}") from error
    return Checkpoint(path=path, outer_step=outer_step, meta=meta, files=files)


def latest_checkpoint(directory: Path) -> Checkpoint | None:
    """The newest whole checkpoint; None when there is none at all.

    A broken one is passed over with a :class:`DiLoCoWarning` that names the broken file.

    Raises:
        DiLoCoError: there are some, and each is broken.
    """
    last_error: DiLoCoError | None = None
    paths = checkpoint_paths(directory)
    for path in reversed(paths):
        try:
            return load_checkpoint(path)
        except DiLoCoError as error:
            last_error = error
            if path != paths[0]:
                warnings.warn(f"{error} Falling back to the checkpoint before it.", DiLoCoWarning, stacklevel=2)
    if last_error is not None:
        raise DiLoCoError(
            f"{directory} holds no whole checkpoint. The last one tried: {last_error} Bring one back from a copy, "
            f"or go back to a checkpoint of the whole run (in {directory.parent / 'joint'}, if it was begun "
            "with --save-every: hf-diloco syncer --go-back-to), or begin a new run in another --run-dir."
        )
    return None


def checkpoint_paths(directory: Path) -> list[Path]:
    """The checkpoints in ``directory``, oldest first."""
    return list(checkpoints_by_step(directory).values())


def checkpoints_by_step(directory: Path) -> dict[int, Path]:
    """The checkpoints in ``directory`` by the outer step in their names, oldest first."""
    paths = {int(path.name.removeprefix("step-")): path for path in directory.glob("step-" + "[0-9]" * 8 + "*")}
    return dict(sorted(paths.items()))


def prune_checkpoints(directory: Path, keep: int) -> None:
    """Delete all but the newest ``keep`` checkpoints; what cannot be deleted stays, with a warning in the log."""
    for path in checkpoint_paths(directory)[:-keep]:
        doomed = path.with_name(f".{path.name}.old.{os.getpid()}")  # hidden first: never half of one in sight
        try:
            path.rename(doomed)
            shutil.rmtree(doomed)
        except OSError as error:
            logger.warning("the old checkpoint %s cannot be deleted: %s", path, error)


def check_plain_name(name: str) -> None:
    """Names come from learners: nothing that could lead out of a directory.

    Raises:
        DiLoCoError: ``name`` is not a plain file name.
    """
    if not _PLAIN_NAME.fullmatch(name):
        raise DiLoCoError(f"{name[:80]!r} is not a plain file name (letters, digits and _ . + - only)")


def replace_directory(aside: Path, target: Path) -> None:
    """Flush ``aside`` to disk and move it to ``target``, in place of what was there.

    A process that dies in here leaves the old directory, the new one, or (for the blink between two moves) both
    under hidden names.

    Raises:
        OSError: the disk said no; ``target`` is then as it was.
    """
    for path in [*aside.rglob("*"), aside]:
        _fsync(path)
    old = target.with_name(f".{target.name}.old.{os.getpid()}")
    if target.exists():
        target.rename(old)
    try:
        aside.rename(target)
    except OSError:
        if old.exists():
            old.rename(target)
        raise
    _fsync(target.parent)
    if old.exists():
        shutil.rmtree(old)


def _tidy(directory: Path) -> None:
    """Clear away what a process left that was killed in the middle of :func:`save_checkpoint`."""
    for leftover in directory.glob(".step-*"):
        target = directory / leftover.name[1:].partition(".")[0]
        if ".old." in leftover.name and not target.exists():
            leftover.rename(target)
        else:
            shutil.rmtree(leftover)


def _save_tensors(path: Path, values: Mapping[str, Tensor]) -> None:
    addresses: set[int] = set()
    whole = {}
    for name, value in values.items():
        value = value.detach().contiguous()
        if value.data_ptr() in addresses:
            value = torch.clone(value)  # safetensors takes views that lie side by side, but nothing twice
        if value.numel():
            addresses.add(value.data_ptr())
        whole[name] = value
    save_file(whole, path, metadata={"format": "pt"})


def _checksum(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while piece := file.read(1 << 20):
            digest.update(piece)
        return {"sha256": digest.hexdigest(), "size_bytes": file.tell()}


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
