"""``hf-diloco guard``."""

from __future__ import annotations

import shutil
from typing import Annotated

import typer

from hf_diloco.cli.guard import Guard
from hf_diloco.errors import ConfigError


def guard(
    command: Annotated[list[str], typer.Argument(metavar="COMMAND...", help="The program and its arguments.")],
    grace_seconds: Annotated[
        float,
        typer.Option(metavar="SECONDS", min=0, help="From SIGTERM to SIGKILL for what is still there."),
    ] = 30.0,
    stopped_exit_code: Annotated[
        int,
        typer.Option(
            metavar="CODE",
            min=0,
            max=125,
            help="Takes the place of exit code 0 if the learner was told to stop: for schedulers that start again what "
            "has failed, and not what has ended well.",
        ),
    ] = 0,
) -> None:
    """Run one learner so that SIGTERM reaches it: in a container, under a service manager, in a batch job.

    `accelerate launch` does not pass SIGTERM on to the training script, and as the first process of a container it
    ignores it. `hf-diloco guard accelerate launch train.py` passes on SIGTERM, Ctrl-C and SIGHUP as SIGTERM, waits
    until the learner has drained and saved, and leaves no process behind. Exit code: that of COMMAND, or CODE.
    """
    if shutil.which(command[0]) is None:
        raise ConfigError(f"there is no program {command[0]!r}; give it as you would to the shell.")
    raise typer.Exit(Guard(command, grace_seconds, on_leash=False, stopped_exit_code=stopped_exit_code).run())
