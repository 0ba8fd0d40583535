"""Which of a learner's own Trainer checkpoints it can go on from."""

from __future__ import annotations

import json
from pathlib import Path

from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

_LAST_FILE = "trainer_state.json"  # Trainer writes it when all others are there


def last_checkpoint(output_dir: str) -> str | None:
    """The newest Trainer checkpoint in ``output_dir`` that was written to its end; None if there is none.

    A learner that is killed while it saves leaves half a checkpoint behind, which Trainer would fail to load. For
    ``trainer.train(resume_from_checkpoint=last_checkpoint(trainer.args.output_dir))``: the directory is that of the
    Trainer with the callback in it, which is this learner's own.
    """
    found: list[tuple[int, Path]] = []
    for path in Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        step = path.name.rpartition("-")[2]
        if step.isdigit() and _is_whole(path):
            found.append((int(step), path))
    return str(max(found)[1]) if found else None


def _is_whole(checkpoint: Path) -> bool:
    try:
        TrainerState.load_from_json(str(checkpoint / _LAST_FILE))
    except (OSError, json.JSONDecodeError, TypeError):
        return False
    return True
