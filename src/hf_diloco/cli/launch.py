"""``hf-diloco launch``."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from hf_diloco.cli.launchers import plan_launchers
from hf_diloco.cli.local_run import LocalRun
from hf_diloco.cli.processes import names_of_gpus
from hf_diloco.cli.settings import as_flags, with_settings
from hf_diloco.cli.table import Display
from hf_diloco.config import SyncerConfig
from hf_diloco.errors import ConfigError
from hf_diloco.syncer.run_directory import RunDirectory

_RESTARTS = 10  # what --restart means


@with_settings
def launch(
    script: Annotated[Path, typer.Argument(metavar="SCRIPT", exists=True, dir_okay=False, help="The training script.")],
    num_learners: Annotated[int, typer.Option(min=1, help="How many learners to start.")],
    settings: dict[str, Any],
    script_args: Annotated[
        list[str] | None, typer.Argument(metavar="[SCRIPT ARGS]...", help="Given to the script untouched.")
    ] = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", show_default="runs/<date-time>", help="Where the run's files and logs go."),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on with the run in DIR, with the settings it began with. Learners get its parameters; optimizer "
            "and data position come from their own checkpoints if the script resumes from them.",
        ),
    ] = False,
    accelerate_config: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            exists=True,
            dir_okay=False,
            show_default=False,
            help="How each learner is started: a file of `accelerate config` (examples/configs/). Given several times, "
            "the first is for learner 0, the second for learner 1, and so on; the last also for those after it. "
            "Default: one process each, on a GPU or on the CPU.",
        ),
    ] = None,
    nproc_per_learner: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            show_default=False,
            help="Processes of each learner: one a GPU, or N on the CPU. Default: as many as FILE says, or 1. GPUs are "
            "given to one learner after the other; if they do not last, learners share them.",
        ),
    ] = None,
    restart: Annotated[
        bool,
        typer.Option("--restart", help=f"Start what dies again. Short for --max-restarts {_RESTARTS}."),
    ] = False,
    max_restarts: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=0,
            show_default="0",
            help="How often in a row each learner is started again that ended with another exit code than 0, before it "
            "is given up; the waits between grow from 1 s to 1 min. A life of 5 minutes starts the count anew. The "
            "syncer is started again in any case if it was killed.",
        ),
    ] = None,
    grace_seconds: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            min=0,
            help="How long learners that are told to stop have for draining (a third of it) and saving, before they "
            "are killed.",
        ),
    ] = 30.0,
) -> None:
    """Train on this machine: a syncer, and learners that each go through `accelerate launch`.

    Everything after SCRIPT belongs to the script. Exit code 0: the run came to its end and every learner ended with
    0. Ctrl-C or SIGTERM: the learners ship what they have, take leave and save, then the syncer writes the model it
    has; the exit code is 1, since the run is not done, and no process is left behind. Ctrl-C once more: at once.
    """  # fmt: skip
    if resume and run_dir is None:
        raise ConfigError("--resume goes on with an earlier run: give its --run-dir.")
    if not resume:
        settings = {"expected_learners": num_learners, "num_shards": num_learners, **settings}
        _check(SyncerConfig(**settings), num_learners)
    launchers = plan_launchers(num_learners, accelerate_config or [], nproc_per_learner, names_of_gpus())
    directory = RunDirectory(run_dir or Path("runs") / datetime.datetime.now().strftime("%Y-%m-%d_%H-%M-%S"))
    with directory:  # refuses one that is in use before anything in it is touched
        if resume:
            settings = _settings_to_resume(directory, settings)
        elif any(directory.checkpoints.iterdir()):
            raise ConfigError(
                f"the run directory {directory.path} already holds an earlier run; choose another --run-dir, or go on "
                "with it: --resume."
            )
        directory.status.unlink(missing_ok=True)
        directory.address.unlink(missing_ok=True)  # learners are told the new one: no need for the port it had
    config = SyncerConfig(**settings)
    if max_restarts is None:
        max_restarts = _RESTARTS if restart else 0
    run = LocalRun(
        directory,
        launchers,
        [str(script), *(script_args or [])],
        grace_seconds=grace_seconds,
        max_restarts=max_restarts,
    )
    with Display(Console(highlight=False)) as display:
        good = run.run(display, as_flags(settings), config.num_shards or num_learners)
    if not good:
        raise typer.Exit(1)


def _check(config: SyncerConfig, num_learners: int) -> None:
    if config.expected_learners > num_learners:
        raise ConfigError(
            f"--expected-learners {config.expected_learners} is above --num-learners {num_learners}: nobody would "
            "train before more are started by hand. Leave it away, or start the syncer alone: hf-diloco syncer."
        )


def _settings_to_resume(directory: RunDirectory, given: dict[str, Any]) -> dict[str, Any]:
    if not directory.has_run:
        raise ConfigError(f"--resume: {directory.path} holds no run to go on with. Leave --resume away to begin one.")
    settings = directory.settings_of_run(given)
    return {name: value for name, value in settings.items() if value is not None}
