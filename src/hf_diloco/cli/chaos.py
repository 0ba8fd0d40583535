"""``hf-diloco chaos``."""

from __future__ import annotations

import datetime
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from hf_diloco.cli.guard import stop_signals
from hf_diloco.cli.settings import as_flags, with_settings
from hf_diloco.cli.table import Display
from hf_diloco.config import SyncerConfig
from hf_diloco.errors import ConfigError


@with_settings
def chaos(
    settings: dict[str, Any],
    script: Annotated[
        Path | None,
        typer.Argument(
            metavar="SCRIPT",
            exists=True,
            dir_okay=False,
            show_default=False,
            help="The training script. Default: a small Llama on the sources of Python's standard library.",
        ),
    ] = None,
    script_args: Annotated[
        list[str] | None, typer.Argument(metavar="[SCRIPT ARGS]...", help="Given to the script untouched.")
    ] = None,
    num_learners: Annotated[int, typer.Option(min=1, help="How many learners to start, one process each.")] = 3,
    minutes: Annotated[float, typer.Option(min=0.1, help="For how long faults are done; then the run may end.")] = 10.0,
    every_seconds: Annotated[float, typer.Option(min=0.1, help="Mean time between two faults (Poisson).")] = 20.0,
    seed: Annotated[int, typer.Option(help="Of the storm: the same seed, the same faults at the same times.")] = 0,
    kinds: Annotated[
        str | None,
        typer.Option(
            metavar="KIND[:VICTIM],...",
            show_default=False,
            help="Only these kinds of faults, e.g. kill,stop:gateway,cut. Default: all that can be done here.",
        ),
    ] = None,
    compare: Annotated[
        bool, typer.Option(help="Run the script once more without faults, to compare with. Doubles the time.")
    ] = True,
    step_seconds: Annotated[
        float, typer.Option(min=0.0, help="Least duration of an inner step of the default script.")
    ] = 0.5,
    run_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", show_default="runs/chaos-<date-time>", help="Where both runs and the report go."),
    ] = None,
    accelerate_config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            exists=True,
            dir_okay=False,
            help="How each learner is started: a file of `accelerate config`. Default: plain Python, one process.",
        ),
    ] = None,
) -> None:
    """Train on this machine while things fail: processes are killed and stopped, networks cut, ports fed garbage.

    A killed learner is started again, as a supervisor would. Afterwards you read how much was merged in spite of it,
    how long it took to notice, to come back and to go on, and whether every token is accounted for. Exit code 1 if
    one is not, or if anything was left behind.

    The run must be longer than the storm: give SCRIPT enough steps. If networks are to fail, each learner gets a
    network of its own in which it reaches nothing but the syncer, so what SCRIPT reads must be on this machine
    (HF_HUB_OFFLINE is set); that takes root, or a system that lets users make namespaces.
    """  # fmt: skip
    from hf_diloco.chaos.clock import can_jump
    from hf_diloco.chaos.experiment import Experiment
    from hf_diloco.chaos.faults import choose
    from hf_diloco.chaos.report import render

    settings = {"expected_learners": num_learners, "num_shards": num_learners, **settings}
    SyncerConfig(**settings)  # refuses what is out of range before anything is started
    chosen = choose(kinds.split(",") if kinds else [])
    path = (run_dir or Path("runs") / datetime.datetime.now().strftime("chaos-%Y-%m-%d_%H-%M-%S")).absolute()
    if path.exists() and any(path.iterdir()):
        raise ConfigError(f"{path} is not empty. Give another --run-dir.")
    console = Console(highlight=False)
    with Display(console) as display:
        if not kinds and not can_jump():
            chosen = tuple(pair for pair in chosen if pair[0] != "clock_jump")
            display.message("No clock jumps: there is no C compiler here (cc).", style="yellow")
        experiment = Experiment(
            script=[str(script), *(script_args or [])] if script else [],
            num_learners=num_learners,
            seconds=60 * minutes,
            every_seconds=every_seconds,
            seed=seed,
            kinds=chosen,
            settings=as_flags(settings),
            accelerate_config=accelerate_config,
            step_seconds=step_seconds,
        )
        display.message(f"Logs, tapes and report: {path}")
        for number in set(stop_signals()) - {signal.SIGINT}:
            signal.signal(number, lambda number, _frame: sys.exit(128 + number))  # on the way out all is ended
        report = experiment.run(path, compare=compare, say=display.message, show=display.update)
    console.print(render(report))
    if report["problems"]:
        raise typer.Exit(1)
