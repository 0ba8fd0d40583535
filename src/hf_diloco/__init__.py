"""Training that survives its hardware, for Transformers and Accelerate (Decoupled DiLoCo, arXiv 2604.21428).

Importing this package loads neither torch nor transformers; the names below are loaded when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from hf_diloco.config import DiLoCoPlugin, SyncerConfig
    from hf_diloco.errors import DiLoCoError
    from hf_diloco.integrations.accelerate import DiLoCo
    from hf_diloco.integrations.checkpoints import last_checkpoint
    from hf_diloco.integrations.transformers import DiLoCoCallback
    from hf_diloco.learner.data import shard_dataset

_HOMES = {
    "DiLoCo": "hf_diloco.integrations.accelerate",
    "DiLoCoCallback": "hf_diloco.integrations.transformers",
    "DiLoCoPlugin": "hf_diloco.config",
    "SyncerConfig": "hf_diloco.config",
    "last_checkpoint": "hf_diloco.integrations.checkpoints",
    "shard_dataset": "hf_diloco.learner.data",
    "DiLoCoError": "hf_diloco.errors",
}

__all__ = [
    "DiLoCo",
    "DiLoCoCallback",
    "DiLoCoError",
    "DiLoCoPlugin",
    "SyncerConfig",
    "__version__",
    "last_checkpoint",
    "shard_dataset",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'hf_diloco' has no attribute {name!r}")
