"""Is the global model of two learners better than one learner alone after the same number of steps?

For each seed: `examples/pretrain_clm.py` alone, then for each outer optimizer (learning rate/momentum) the same script
as two learners of a run (`hf-diloco launch`); same model, same steps, same held-out text. The one alone reads the whole
training set, each learner its half.

    python benchmarks/global_vs_alone.py [--seeds 42 43 44] [--max_steps 800] [--outer 1/0 0.7/0.5 0.7/0.7]
        [--lr_scheduler_type constant_with_warmup] [-- --wire-format int4 ...]

What stands behind `--` goes to `hf-diloco launch`. The default is what the demo does: a short run from random weights
at a constant learning rate, outer optimizer 1/0. Prints one line for each run: both eval losses, merges, mean
participants, inner steps really taken. Exit code 0 only if the global model is the better one in all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[1] / "examples" / "pretrain_clm.py"


def run(command: list[str], log: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_DILOCO_")}
    with log.open("w") as output:
        code = subprocess.run(command, env=environment, stdout=output, stderr=subprocess.STDOUT).returncode
    if code:
        raise SystemExit(f"{' '.join(command)}\nended with exit code {code}:\n{log.read_text()[-3000:]}")


def eval_loss(directory: Path) -> float:
    return float(json.loads((directory / "eval_results.json").read_text())["eval_loss"])


def alone(path: Path, training: list[str]) -> float:
    """Eval loss of one learner without a syncer."""
    run([sys.executable, str(SCRIPT), *training, "--output_dir", str(path / "alone")], path / "alone.log")
    return eval_loss(path / "alone")


def together(path: Path, training: list[str], settings: list[str]) -> tuple[float, str]:
    """Eval loss of the global model of two learners, and the rest of the line about their run."""
    launch = [sys.executable, "-m", "hf_diloco.cli.main", "launch", "--num-learners", "2", *settings]
    launch += ["--run-dir", str(path / "run"), str(SCRIPT), *training, "--output_dir", str(path / "out")]
    run(launch, path.with_suffix(".log"))
    status = json.loads((path / "run" / "status.json").read_text())
    steps = ", ".join(str(row["steps"]) for row in status["learners"])
    return eval_loss(path / "out" / "learner-0"), f"{status['merges']:6d}  {status['mean_participants']:12.2f}  {steps}"


def main() -> None:
    words = sys.argv[1:]
    split = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 43, 44])
    parser.add_argument("--max_steps", type=int, default=800)
    parser.add_argument("--outer", nargs="+", default=["1/0"], help="outer learning rate/momentum")
    parser.add_argument("--lr_scheduler_type", default="constant_with_warmup", help="of the learners")
    options = parser.parse_args(words[:split])
    training = ["--max_steps", str(options.max_steps), "--lr_scheduler_type", options.lr_scheduler_type]
    training += ["--disable_tqdm", "true"]
    print(f"{options.max_steps} steps, {options.lr_scheduler_type}", *words[split + 1 :], flush=True)
    print("seed  outer    alone  global  merges  participants  steps of the learners", flush=True)
    num_worse = 0
    for seed in options.seeds:
        with tempfile.TemporaryDirectory() as name:
            path, seeded = Path(name), [*training, "--seed", str(seed)]
            of_one = alone(path, seeded)
            for number, outer in enumerate(options.outer):
                rate, momentum = outer.split("/")
                settings = ["--outer-lr", rate, "--outer-momentum", momentum, *words[split + 1 :]]
                of_two, rest = together(path / f"run-{number}", seeded, settings)
                num_worse += of_two >= of_one
                print(f"{seed:4d}  {outer:7}  {of_one:.4f}  {of_two:.4f}  {rest}", flush=True)
    print(f"the global model is not the better one in {num_worse} runs" if num_worse else "the global model is better")
    sys.exit(1 if num_worse else 0)


if __name__ == "__main__":
    main()
