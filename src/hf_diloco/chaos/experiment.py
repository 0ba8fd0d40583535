"""A storm on a script, the same script without faults, and the report on both."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_diloco.chaos.accounting import keep_books
from hf_diloco.chaos.faults import NETWORK_KINDS, STORM, Fault, storm
from hf_diloco.chaos.report import judge
from hf_diloco.chaos.run import ChaosRun
from hf_diloco.chaos.storm import Record, Storm

_TAIL_SECONDS = 60.0  # the small script trains on after the storm, so that all may come back
TRAIN_SMALL = Path(__file__).with_name("train_small.py")


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """What is to be run.

    Args:
        script: the training script and its arguments; empty: the small one of this package, as long as is needed.
        num_learners: how many learners.
        seconds: how long the time of faults lasts.
        every_seconds: mean time between two faults.
        seed: of the storm.
        kinds: of faults, with their victims' part.
        settings: flags for the syncer.
        accelerate_config: start learners through ``accelerate launch`` with this file.
        step_seconds: pace of the small script.
    """

    script: Sequence[str] = ()
    num_learners: int = 3
    seconds: float = 600.0
    every_seconds: float = 20.0
    seed: int = 0
    kinds: Sequence[tuple[str, str]] = STORM
    settings: Sequence[str] = ()
    accelerate_config: Path | None = None
    step_seconds: float = 0.5

    def faults(self) -> list[Fault]:
        """The storm."""
        return storm(
            self.seed,
            seconds=self.seconds,
            every_seconds=self.every_seconds,
            num_learners=self.num_learners,
            kinds=self.kinds,
        )

    def run(
        self,
        path: Path,
        *,
        compare: bool = True,
        say: Callable[[str], None] = lambda _text: None,
        show: Callable[[dict[str, Any]], None] = lambda _status: None,
    ) -> dict[str, Any]:
        """The storm in ``path/storm``, the same without faults in ``path/calm``; the report, which is also in
        ``path/report.json``.

        Without faults the small script ends when as many tokens are merged as in the whole storm, so that the eval
        losses can be compared; a script of the user's is run as it is.

        Args:
            path: a directory.
            compare: with the run without faults.
            say: told what happens, a line each.
            show: given the syncer's status, several times a second.

        Raises:
            DiLoCoError: a run could not be started.
        """
        faults = self.faults()
        say(f"The storm: {len(faults)} faults in {self.seconds:.0f} s, seed {self.seed}")
        stormy = self._drive(path / "storm", faults, self._max_steps, say, show)
        calm = None
        if compare:
            max_steps = 0 if self.script else steps_without_faults(stormy)  # of the small script
            say("The same without faults" + (f", for {max_steps} steps: as many merged tokens" if max_steps else ""))
            calm = self._drive(path / "calm", [], max_steps, say, show)
        report = {"seed": self.seed, "every_seconds": self.every_seconds, **judge(stormy, calm)}
        (path / "report.json").write_text(json.dumps(report, indent=2) + "\n")
        return report

    def _drive(
        self,
        path: Path,
        faults: Sequence[Fault],
        max_steps: int,
        say: Callable[[str], None],
        show: Callable[[dict[str, Any]], None],
    ) -> Record:
        run = ChaosRun(
            path,
            self.script or self._small(path, max_steps),
            self.num_learners,
            self.settings,
            islands=any(kind in NETWORK_KINDS for kind, _ in self.kinds),
            clocks=any(kind == "clock_jump" for kind, _ in self.kinds),
            accelerate_config=self.accelerate_config,
        )
        with run:
            return Storm(run, faults, self.seconds, say=say, show=show).drive()

    @property
    def _max_steps(self) -> int:
        return math.ceil((self.seconds + _TAIL_SECONDS) / self.step_seconds)

    def _small(self, path: Path, max_steps: int) -> list[str]:
        return [
            str(TRAIN_SMALL), "--output_dir", str(path / "out"), "--max_steps", str(max_steps),
            "--step_seconds", str(self.step_seconds), "--seed", str(self.seed),
        ]  # fmt: skip


def steps_without_faults(storm: Record) -> int:
    """Outer steps in which learners that lack nothing merge as many tokens as were merged in this storm."""
    steps = [line["tokens"] for lines in storm.witnesses.values() for line in lines if line["kind"] == "step"]
    merged = keep_books(storm.tape, storm.witnesses).merged
    return max(round(merged / (sum(steps) / len(steps)) / storm.num_learners), 1) if steps else 1
