"""What the syncer has put on the event tape for people to read."""

from __future__ import annotations

import json
from pathlib import Path


class Notices:
    """Follows a run's tape for warnings and for learners that were refused; refused updates are not among them.

    Args:
        tape: ``tape.jsonl`` of the run, which need not be there yet. What is on it already is not told.
    """

    def __init__(self, tape: Path) -> None:
        self._tape = tape
        self._seen_bytes = tape.stat().st_size if tape.exists() else 0

    def new(self) -> list[str]:
        """What has been added since the last call."""
        try:
            with self._tape.open("rb") as file:
                file.seek(self._seen_bytes)
                added = file.read()
        except OSError:  # not there yet
            return []
        whole = added[: added.rfind(b"\n") + 1]  # the syncer may be in the middle of a line
        self._seen_bytes += len(whole)
        lines = [json.loads(line) for line in whole.splitlines() if b'"warning"' in line or b'"refusal"' in line]
        return [text for line in lines if (text := _text(line))]


def _text(line: dict[str, object]) -> str | None:
    if line["kind"] == "warning":
        return f"Warning: {line['text']}"
    if line["kind"] == "refusal" and "update_id" not in line and "fragment_index" not in line:
        return f"Learner {line['learner_id']} is refused: {line['reason']}"
    return None
