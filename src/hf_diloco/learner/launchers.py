"""Which programs start training scripts for others. Only the standard library is loaded here."""

from __future__ import annotations

import os
from collections.abc import Sequence

_PROGRAMS = ("accelerate", "accelerate-launch", "torchrun")
_MODULES = ("accelerate.commands.launch", "accelerate.commands.accelerate_cli", "torch.distributed.run")
_NUM_WORDS = 6  # `python -u -m module` or `python /venv/bin/accelerate launch`; after these come the script's own


def is_launcher(command: Sequence[str]) -> bool:
    """Whether this command line is that of ``accelerate launch`` or ``torchrun``."""
    return any(os.path.basename(word) in _PROGRAMS or word in _MODULES for word in command[:_NUM_WORDS])
