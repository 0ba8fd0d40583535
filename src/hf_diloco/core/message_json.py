"""Messages as JSON-able values, and back.

Every field is checked on the way back, since the sender may be anybody who holds the token.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from typing import Any

from hf_diloco.core.messages import Message, RoundId, Version
from hf_diloco.errors import MessageError

_KINDS: dict[str, type] = {kind.__name__: kind for kind in typing.get_args(Message)}
_HINTS: dict[str, dict[str, Any]] = {name: typing.get_type_hints(kind) for name, kind in _KINDS.items()}


def to_wire(message: Message) -> dict[str, Any]:
    """The message as JSON-able values; ``{"kind": class name, field: value, ...}``."""
    fields = {field.name: getattr(message, field.name) for field in dataclasses.fields(message)}
    return {"kind": type(message).__name__, **fields}


def from_wire(values: Any) -> Message:
    """The message that :func:`to_wire` described.

    Raises:
        MessageError: the kind is unknown, a field is missing, unknown or of the wrong type, a number is not finite.
    """
    if not isinstance(values, dict) or values.get("kind") not in _KINDS:
        kind = values.get("kind") if isinstance(values, dict) else type(values).__name__
        raise MessageError(f"unknown message {str(kind)[:40]!r}; are both sides the same version of hf-diloco?")
    kind = values["kind"]
    given = {name: value for name, value in values.items() if name != "kind"}
    hints = _HINTS[kind]
    if unknown := given.keys() - hints.keys():
        raise MessageError(f"{kind} has no field {sorted(unknown)[0]!r}")
    try:
        checked = {name: _check(value, hints[name], f"{kind}.{name}") for name, value in given.items()}
        return _KINDS[kind](**checked)  # type: ignore[no-any-return]
    except TypeError as error:  # a field without default is missing
        raise MessageError(f"{kind}: {error}") from None


def _check(value: Any, hint: Any, where: str) -> Any:
    """``value`` if it fits the annotation; JSON's lists become the tuples (or named tuples) that it asks for."""
    origin = typing.get_origin(hint)
    if origin is types.UnionType or origin is typing.Union:
        if value is None and type(None) in typing.get_args(hint):
            return None
        (hint,) = (option for option in typing.get_args(hint) if option is not type(None))
        return _check(value, hint, where)
    if origin is tuple:
        items = typing.get_args(hint)
        if isinstance(value, list | tuple):
            if items[-1] is Ellipsis:
                return tuple(_check(item, items[0], where) for item in value)
            if len(value) == len(items):
                return tuple(_check(item, kind, where) for item, kind in zip(value, items, strict=True))
    elif hint in (Version, RoundId):
        if isinstance(value, list | tuple) and len(value) == 2:
            return hint(*(_check(item, int, where) for item in value))
    elif hint is float:
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
    elif hint is int:
        if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**62:
            return value
    elif isinstance(value, hint):
        return value
    raise MessageError(f"{where} must be {getattr(hint, '__name__', hint)}, got {str(value)[:40]!r}")
