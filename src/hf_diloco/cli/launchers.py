"""How ``hf-diloco launch`` has ``accelerate launch`` start each learner: its processes, and the GPUs for them."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hf_diloco.errors import ConfigError

_ONE_PROCESS = ("NO", "MULTI_CPU")  # kinds of which accelerate starts one process, whatever num_processes says


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """One learner's.

    Args:
        config_file: of ``accelerate config``; None: all is said on the command line.
        num_processes: of the learner.
        overrides: they are not the file's own number.
        one_process_kind: the file's ``distributed_type`` is one of which accelerate starts one process only.
        gpus: for these processes, as CUDA_VISIBLE_DEVICES names them; empty: they run on the CPU.
    """

    config_file: Path | None
    num_processes: int
    overrides: bool
    one_process_kind: bool
    gpus: tuple[str, ...]

    @property
    def words(self) -> list[str]:
        """Arguments of ``accelerate launch`` before the script."""
        if self.config_file is not None:
            return self._essential_words()
        return [*self._essential_words(), "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]

    def _essential_words(self) -> list[str]:
        words = ["--main_process_port", "0"]  # any free one: each learner is a world of its own
        if self.config_file is not None:
            words += ["--config_file", str(self.config_file)]
        if self.config_file is None or self.overrides:
            words += ["--num_processes", str(self.num_processes)]
        if self.num_processes > 1 and self.one_process_kind:
            words.append("--multi_gpu")  # several processes, also on the CPU
        elif self.config_file is None and not self.gpus:
            words.append("--cpu")
        return words

    @property
    def environment(self) -> dict[str, str]:
        """What its processes need beyond the words."""
        if self.gpus:
            return {"CUDA_VISIBLE_DEVICES": ",".join(self.gpus)}
        return {"ACCELERATE_USE_CPU": "true"} if self.num_processes > 1 else {}  # --cpu would start one process only

    @property
    def by_hand(self) -> str:
        """The command line that people would give instead, without the script."""
        return f"accelerate launch {shlex.join(self._essential_words())}"


def plan_launchers(
    num_learners: int, config_files: Sequence[Path], nproc_per_learner: int | None, gpus: Sequence[str]
) -> list[Launcher]:
    """How each learner is started. Each process gets a GPU: one learner after the other, then from the start again.

    Args:
        num_learners: how many.
        config_files: the n-th is learner n's, the last also that of those after it; empty: there are none.
        nproc_per_learner: processes of each; None: as many as its file says, or 1.
        gpus: names of this machine's.

    Raises:
        ConfigError: a file cannot be read or used, or a learner has more processes than there are GPUs.
    """
    if len(config_files) > num_learners:
        raise ConfigError(
            f"--accelerate-config is given {len(config_files)} times for {num_learners} learners; give at most one "
            "file for each."
        )
    launchers: list[Launcher] = []
    num_given = 0
    for learner_id in range(num_learners):
        config_file = config_files[min(learner_id, len(config_files) - 1)] if config_files else None
        config = _read(config_file) if config_file is not None else {"distributed_type": "NO"}
        one_process_kind = config["distributed_type"] in _ONE_PROCESS
        num_processes = nproc_per_learner or config.get("num_processes", 1 if one_process_kind else None)
        if not isinstance(num_processes, int) or num_processes < 1:
            raise ConfigError(f"{config_file} has no usable num_processes ({num_processes}). Give --nproc-per-learner.")
        on_cpu = not gpus or bool(config.get("use_cpu"))
        if not on_cpu and num_processes > len(gpus):
            raise ConfigError(
                f"learner {learner_id} has {num_processes} processes and needs as many GPUs; this machine has "
                f"{len(gpus)}. Give --nproc-per-learner {len(gpus)} or less."
            )
        launchers.append(
            Launcher(
                config_file=config_file,
                num_processes=num_processes,
                overrides=nproc_per_learner is not None,
                one_process_kind=one_process_kind,
                gpus=() if on_cpu else tuple(gpus[(num_given + i) % len(gpus)] for i in range(num_processes)),
            )
        )
        num_given += 0 if on_cpu else num_processes
    return launchers


def _read(config_file: Path) -> Mapping[str, Any]:
    try:
        config = yaml.safe_load(config_file.read_text(encoding="utf-8"))  # JSON is YAML too
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--accelerate-config {config_file} cannot be read: {error}") from error
    if not isinstance(config, dict) or "distributed_type" not in config:
        raise ConfigError(f"--accelerate-config {config_file} is no file of `accelerate config`: no distributed_type.")
    if config.get("num_machines", 1) not in (1, None):
        raise ConfigError(
            f"--accelerate-config {config_file} has num_machines: {config['num_machines']}; launch starts learners on "
            "this machine alone. Start the syncer with `hf-diloco syncer`, and such a learner on its machines."
        )
    return config
