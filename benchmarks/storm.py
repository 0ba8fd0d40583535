"""How much is merged while everything fails: storms of 10 minutes over several seeds, against runs without faults.

    python benchmarks/storm.py [--seeds 1 2 3] [--minutes 10] [--outer-momentum 0.5] [--out runs/storms]

Three learners (a small Llama, each inner step at least half a second), one fault every 20 s on average, all kinds
equally often, the syncer included; stops and cuts last 10 to 30 s. A killed process is started again at once. The run
without faults ends when it has merged as many tokens as the storm's, so that their eval losses can be compared. Takes
about 22 minutes a seed. Each seed leaves `seed-N/report.json` and is not run again, so that it can be interrupted
(another momentum needs another `--out`).
Prints a line a seed, and means with 95 % confidence intervals. Exit code 1 if something was lost or left behind.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from hf_diloco.chaos.experiment import Experiment
from hf_diloco.chaos.report import confidence, render

NUM_LEARNERS = 3
EVERY_SECONDS = 20.0
USUAL_OUTER_MOMENTUM = 0.5  # 0.7, the default, overshoots with so few learners, and more so when some are away


def report_of(seed: int, minutes: float, outer_momentum: float, out: Path) -> dict[str, Any]:
    """From an earlier call, or by running it."""
    path = out / f"seed-{seed}"
    if not (path / "report.json").exists():
        shutil.rmtree(path, ignore_errors=True)  # of a run that was interrupted
        path.mkdir(parents=True)
        experiment = Experiment(
            num_learners=NUM_LEARNERS,
            seconds=60 * minutes,
            every_seconds=EVERY_SECONDS,
            seed=seed,
            settings=["--expected-learners", str(NUM_LEARNERS), "--outer-momentum", str(outer_momentum)],
        )
        report = experiment.run(path, say=lambda text: print(f"  {text}", flush=True))
        Console(width=110).print(render(report))
    return dict(json.loads((path / "report.json").read_text()))


def loss_ratio(report: dict[str, Any]) -> float:
    """Final eval loss against that of a run without faults that merged as many tokens."""
    return float(report["eval_loss"] / report["calm"]["eval_loss"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--outer-momentum", type=float, default=USUAL_OUTER_MOMENTUM)
    parser.add_argument("--out", type=Path, default=Path("runs/storms"))
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))  # on the way out all is ended
    reports = []
    for seed in options.seeds:
        print(f"seed {seed}", flush=True)
        reports.append(report_of(seed, options.minutes, options.outer_momentum, options.out.absolute()))
    print(
        "seed  faults  goodput  of what faults leave  longest gap  rejoin (longest)  eval loss ratio  tokens merged "
        "(without faults)  cores  problems"
    )
    for seed, report in zip(options.seeds, reports, strict=True):
        rejoin = report["rejoin"]["total"]["max"]
        print(
            f"{seed:4d}  {len(report['faults']):6d}  {report['goodput']:7.4f}  "
            f"{report['goodput_of_what_faults_leave']:20.4f}  {report['gaps']['max']:9.2f} s  "
            f"{'-' if rejoin is None else f'{rejoin:.1f} s':>16}  {loss_ratio(report):15.4f}  "
            f"{report['tokens']['merged']:13,.0f} ({report['calm']['merged']:14,.0f})  {report['cpu_share']:5.2f}  "
            f"{len(report['problems'])}"
        )
    for name, values in (
        ("goodput", [report["goodput"] for report in reports]),
        ("goodput of what the faults leave", [report["goodput_of_what_faults_leave"] for report in reports]),
        ("eval loss ratio", [loss_ratio(report) for report in reports]),
    ):
        mean, half = confidence(values)
        print(f"{name}: {mean:.4f} +- {half:.4f} (95 %, {len(values)} seeds)")
    returns = [value for report in reports for value in report["first_merge_after_syncer"] if value is not None]
    if returns:
        print(f"first merge after the syncer was back: longest of {len(returns)}: {max(returns):.2f} s")
    problems = [f"seed {seed}: {text}" for seed, report in zip(options.seeds, reports, strict=True)
                for text in report["problems"]]  # fmt: skip
    print("\n".join(problems) or "every token is accounted for; nothing was left behind")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
