"""``hf-diloco``: the commands, and how their errors look."""

from __future__ import annotations

import sys
from typing import Annotated, NoReturn

import typer
from rich.console import Console

import hf_diloco
from hf_diloco.cli.chaos import chaos
from hf_diloco.cli.export import export
from hf_diloco.cli.guarded import guard
from hf_diloco.cli.launch import launch
from hf_diloco.cli.syncer import syncer
from hf_diloco.errors import ConfigError, DiLoCoError

app = typer.Typer(
    name="hf-diloco",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
# One argument after the script's name belongs to the script, even if it is called --help.
app.command(no_args_is_help=True, context_settings={"allow_interspersed_args": False})(launch)
app.command(no_args_is_help=True)(syncer)
app.command(no_args_is_help=True)(export)
app.command(context_settings={"allow_interspersed_args": False})(chaos)
app.command(no_args_is_help=True, context_settings={"allow_interspersed_args": False})(guard)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hf-diloco {hf_diloco.__version__}")
        raise typer.Exit


@app.callback()
def _about(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Training that survives its hardware: Decoupled DiLoCo for Transformers and Accelerate.

    Learners train without waiting for each other; a syncer on a CPU merges what they have learned, one fragment of
    the model at a time. Exit codes: 0 done, 1 the run failed, 2 wrong use.
    """


def main() -> None:
    """Run the command that ``sys.argv`` names."""
    try:
        app()
    except ConfigError as error:
        _fail(error, 2)
    except DiLoCoError as error:
        _fail(error, 1)


def _fail(error: DiLoCoError, code: int) -> NoReturn:
    Console(stderr=True).print(f"Error: {error}", style="bold red", markup=False, highlight=False, soft_wrap=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
