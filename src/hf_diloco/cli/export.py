"""``hf-diloco export``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hf_diloco.errors import ConfigError, DiLoCoError
from hf_diloco.syncer.run_directory import RunDirectory

_MODEL_SUFFIXES = (".json", ".jinja", ".md", ".model", ".safetensors", ".txt")


def export(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Run directory of the syncer.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Directory to write the model to.")],
    checkpoint: Annotated[
        int | None,
        typer.Option(metavar="STEP", min=0, help="Outer step of the checkpoint. Default: the newest whole one."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace OUT if it is there and not empty.")] = False,
) -> None:
    """Write the global model of a run as `from_pretrained` loads it (of a PEFT run: the adapter), in fp32."""
    directory = RunDirectory(run_dir, create=False)
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out} is a file; give a directory.")
    _refuse_to_lose(directory, out, force)

    from hf_diloco.syncer.checkpoint import checkpoints_by_step, load_checkpoint
    from hf_diloco.syncer.export import export_model
    from hf_diloco.syncer.model_card import run_facts
    from hf_diloco.syncer.roster import Account
    from hf_diloco.syncer.saved_run import SavedRun, latest_run

    if checkpoint is None:
        found = latest_run(directory)
    else:
        steps = checkpoints_by_step(directory.checkpoints)
        if steps and checkpoint not in steps:
            there = ", ".join(map(str, steps))
            raise ConfigError(f"there is no checkpoint of step {checkpoint} in {directory.path}; there are: {there}.")
        found = SavedRun.from_checkpoint(load_checkpoint(steps[checkpoint])) if steps else None
    if found is None and not directory.has_run:
        raise ConfigError(f"{directory.path} is no run directory: it has no event tape ({directory.tape.name}).")
    if found is None:
        raise DiLoCoError(
            f"the run directory {directory.path} holds no checkpoint yet: the syncer writes the first one when a "
            "learner has joined."
        )
    outer_step = found.facts.outer_step
    facts = run_facts(
        found.terms.config, [Account(**values) for values in found.facts.accounts], outer_step=outer_step,
        num_merges=found.facts.num_merges, num_participants=found.facts.num_participants,
    )  # fmt: skip
    export_model(found.tensors(), found.constants, found.checkpoint.files, out, facts)
    typer.echo(f"The model of outer step {outer_step} is in {out}")


def _refuse_to_lose(directory: RunDirectory, out: Path, force: bool) -> None:
    """``export`` replaces OUT: nothing but an exported model may be lost by that."""
    target = out.resolve()
    own = target == directory.model.resolve()
    if not own and (target == directory.path or target in directory.path.parents or directory.path in target.parents):
        raise ConfigError(f"{out} is, holds or lies in the run directory {directory.path}; give another directory.")
    if not out.is_dir() or not any(out.iterdir()):
        return
    if not force:
        raise ConfigError(f"{out} is not empty. Give another directory, or --force to replace a model in it.")
    foreign = [path.name for path in out.iterdir() if path.is_dir() or path.suffix not in _MODEL_SUFFIXES]
    if foreign or not (out / "README.md").exists() or "hf-diloco" not in (out / "README.md").read_text():
        what = f"holds {sorted(foreign)[0]}" if foreign else "was not written by hf-diloco"
        raise ConfigError(f"{out} {what}: --force replaces exported models only. Give another directory.")
