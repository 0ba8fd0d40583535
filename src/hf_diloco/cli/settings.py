"""One flag for each field of SyncerConfig, with the field's own help."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

from hf_diloco.config import SyncerConfig

_PANEL = "Settings of the run (told to each learner that joins)"


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """``command`` with a flag for each setting; it gets those that were given as its argument ``settings``."""
    hints = typing.get_type_hints(SyncerConfig)
    own = [item for item in inspect.signature(command, eval_str=True).parameters.values() if item.name != "settings"]
    flags = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[
                hints[field.name] | None,
                typer.Option(
                    help=field.metadata["help"],
                    show_default=False if field.default is None else str(field.default),
                    rich_help_panel=_PANEL,
                ),
            ],
        )
        for field in dataclasses.fields(SyncerConfig)
    ]

    @functools.wraps(command)
    def wrapped(**given: Any) -> None:
        values = {flag.name: given.pop(flag.name) for flag in flags}
        command(**given, settings={name: value for name, value in values.items() if value is not None})

    parameters = [item.replace(kind=inspect.Parameter.KEYWORD_ONLY) for item in own] + flags
    wrapped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {item.name: item.annotation for item in parameters}
    return wrapped


def as_flags(settings: Mapping[str, Any]) -> list[str]:
    """The command line that gives these settings again."""
    return [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]
