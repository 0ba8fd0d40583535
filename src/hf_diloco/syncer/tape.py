"""The event tape: one JSON line for each thing that happened to the run."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hf_diloco.errors import DiLoCoError

logger = logging.getLogger(__name__)

_RETRY_SECONDS = 1.0
_SAY_EVERY_SECONDS = 30.0


class Tape:
    """``tape.jsonl``: the log of the run, what its merges can be checked against, and what a restart goes by.

    Every line has ``kind`` and ``seconds`` since the tape began. Kinds: ``start`` (of a syncer process: settings,
    incarnation, wall clock time), ``layout``, ``values`` (digests of the initial values), ``join``, ``leave``,
    ``round`` (one merge: participants, version and digest, timing, payload bytes of the merged updates and of the
    publication as one learner gets it), ``applied`` (a learner's digest of what it applied), ``state`` (what a learner
    that begins in mid-run has for its inner optimizer: ``source`` own, peer or warm-up), ``lease`` (of a shard),
    ``refusal`` (of a learner, an update, or by a learner: what was published does not fit what it holds),
    ``warning``, ``checkpoint``, ``recovered`` (the values that a restarted syncer goes on from), ``finish``.

    Args:
        path: of the file; it is made, or appended to. A last line that a crash cut off is removed.
        stopping: set when the run shall end, also if the disk is full.

    Raises:
        DiLoCoError: it cannot be opened.
    """

    def __init__(self, path: Path, stopping: threading.Event | None = None) -> None:
        self._path, self.stopping = path, stopping or threading.Event()
        try:
            self._file = path.open("ab", buffering=0)
            self.size_bytes = _cut_torn_line(path)
            self._file.truncate(self.size_bytes)
        except OSError as error:
            raise DiLoCoError(f"the event tape {path} cannot be written: {error}") from error
        self._start = time.monotonic() - _seconds_so_far(path)

    def write(self, kind: str, *, durable: bool = False, **fields: Any) -> None:
        """Append one line; ``durable`` lines are on disk when this returns.

        A full disk holds the syncer up here until there is room: what is merged must be known before anybody learns
        the result. Learners train on meanwhile.

        Raises:
            DiLoCoError: the disk is full or gone, and the run is to be stopped.
        """
        line = json.dumps({"kind": kind, "seconds": round(time.monotonic() - self._start, 4), **fields}) + "\n"
        said_at = -_SAY_EVERY_SECONDS
        while True:
            try:
                self._append(line.encode(), durable=durable)
                return
            except OSError as error:
                if self.stopping.is_set():
                    raise DiLoCoError(f"the event tape {self._path} cannot be written: {error}") from error
                if time.monotonic() - said_at >= _SAY_EVERY_SECONDS:
                    said_at = time.monotonic()
                    logger.error(
                        "[syncer] the event tape %s cannot be written: %s. Learners train on; merges wait until there "
                        "is room.", self._path, error,
                    )  # fmt: skip
                self.stopping.wait(_RETRY_SECONDS)

    def warn(self, text: str, learner_ids: Sequence[int] = ()) -> None:
        """Say in the log and on the tape what is wrong, with these learners; `hf-diloco launch` shows it."""
        logger.warning("[syncer] %s", text)
        self.write("warning", learner_ids=list(learner_ids), text=text)

    def _append(self, line: bytes, *, durable: bool) -> None:
        try:
            if self._file.write(line) != len(line):
                raise OSError("only a part of a line could be written")
            if durable:
                os.fdatasync(self._file.fileno())
        except OSError:
            self._file.truncate(self.size_bytes)  # half a line would make the next one unreadable
            raise
        self.size_bytes += len(line)

    def close(self) -> None:
        """No more lines. Idempotent."""
        self._file.close()


def read_tape(path: Path) -> list[dict[str, Any]]:
    """All whole lines of a tape; a last line that was cut off by a crash is left out."""
    return list(iterate_tape(path))


def iterate_tape(path: Path, first_byte: int = 0) -> Iterator[dict[str, Any]]:
    """The whole lines of a tape one by one, from this byte on, which must be the first of a line."""
    with path.open("rb") as file:
        file.seek(first_byte)
        for line in file:
            if line.endswith(b"\n") and line.strip():
                yield json.loads(line)


def _cut_torn_line(path: Path) -> int:
    """Size of the file up to the end of its last whole line."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        while size:
            begin = max(0, size - (1 << 16))
            file.seek(begin)
            newline = file.read(size - begin).rfind(b"\n")
            if newline >= 0:
                return begin + newline + 1
            size = begin
    return 0


def _seconds_so_far(path: Path) -> float:
    """Since the tape began, by the wall clock: nothing else lives on between two syncers."""
    for line in iterate_tape(path):
        return max(0.0, time.time() - float(line.get("time", time.time())) + float(line["seconds"]))
    return 0.0
