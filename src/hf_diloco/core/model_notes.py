"""What the export must know of a model and sees neither in its values nor in its configuration.

A learner that supplies the initial values sends it along as one of the files; it is kept in checkpoints, but never
written beside an exported model.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass

from hf_diloco.errors import MessageError

NOTES_FILE = "hf-diloco.json"


@dataclass(frozen=True, kw_only=True)
class ModelNotes:
    """Notes of the learner that supplied the initial values."""

    base_model: str | None = None  # the model on the hub that training began from
    adapter_names: Mapping[str, str] | None = None  # of a PEFT model: name in the adapter's file -> name in memory

    def to_bytes(self) -> bytes:
        """The content of :data:`NOTES_FILE`."""
        return json.dumps(dataclasses.asdict(self)).encode()

    @classmethod
    def of(cls, files: Mapping[str, bytes]) -> ModelNotes:
        """The notes among these files; empty ones if there are none.

        Raises:
            MessageError: they are not what :meth:`to_bytes` writes.
        """
        if NOTES_FILE not in files:
            return cls()
        try:
            values = json.loads(files[NOTES_FILE])
        except ValueError as error:
            raise MessageError(f"{NOTES_FILE} is not JSON: {error}") from error
        expected = {item.name for item in dataclasses.fields(cls)}
        if not isinstance(values, dict) or values.keys() != expected:
            raise MessageError(f"{NOTES_FILE} holds {str(values)[:80]!r}, not an object of {sorted(expected)}")
        names, base = values["adapter_names"], values["base_model"]
        if not (base is None or isinstance(base, str)):
            raise MessageError(f"base_model in {NOTES_FILE} must be a text, got {str(base)[:80]!r}")
        if names is not None and not (isinstance(names, dict) and all(isinstance(to, str) for to in names.values())):
            raise MessageError(f"adapter_names in {NOTES_FILE} must be an object of names, got {str(names)[:80]!r}")
        return cls(base_model=base, adapter_names=names)
