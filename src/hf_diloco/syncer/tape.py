"""The event tape: one JSON line for each thing that happened to the run."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from hf_diloco.errors import DiLoCoError


class Tape:
    """``tape.jsonl``: the log of the run, and what its merges can be checked against.

    Every line has ``kind`` and ``seconds`` since the tape was opened. Kinds: ``start`` (settings, wall clock time),
    ``layout``, ``values`` (digests of the initial values), ``join``, ``leave``, ``round`` (one merge), ``applied``
    (a learner's digest of what it applied), ``refusal``, ``warning``, ``checkpoint``, ``finish``.

    Args:
        path: of the file; it is made, or appended to.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._start = time.monotonic()
        try:
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise DiLoCoError(f"the event tape {path} cannot be written: {error}") from error

    def write(self, kind: str, *, durable: bool = False, **fields: Any) -> None:
        """Append one line; ``durable`` lines are on disk when this returns.

        Raises:
            DiLoCoError: the disk is full or gone.
        """
        line = json.dumps({"kind": kind, "seconds": round(time.monotonic() - self._start, 4), **fields})
        try:
            self._file.write(line + "\n")
            self._file.flush()
            if durable:
                os.fdatasync(self._file.fileno())
        except OSError as error:
            raise DiLoCoError(f"the event tape {self._path} cannot be written: {error}") from error

    def close(self) -> None:
        """No more lines. Idempotent."""
        self._file.close()


def read_tape(path: Path) -> list[dict[str, Any]]:
    """All whole lines of a tape; a last line that was cut off by a crash is left out."""
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1] if line]
