"""Is the global model of two learners better than one learner alone after the same number of steps?

For each seed: `examples/pretrain_clm.py` alone, then the same script as two learners of a run (`hf-diloco launch`),
same model, same steps, same held-out text. The one alone reads the whole training set, each learner its half.

    python benchmarks/global_vs_alone.py [--seeds 42 43 44] [--max_steps 800] [-- --outer-momentum 0.3 ...]

What stands behind `--` goes to `hf-diloco launch`; default: --outer-lr 1 --outer-momentum 0, as in the demo (a short
run from scratch, constant learning rate). Prints one line a seed: both eval losses, merges, mean participants, inner
steps really taken.
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
TRAINING = ["--lr_scheduler_type", "constant_with_warmup", "--disable_tqdm", "true"]
OUTER = ["--outer-lr", "1", "--outer-momentum", "0"]


def run(command: list[str], log: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_DILOCO_")}
    with log.open("w") as output:
        code = subprocess.run(command, env=environment, stdout=output, stderr=subprocess.STDOUT).returncode
    if code:
        raise SystemExit(f"{' '.join(command)}\nended with exit code {code}:\n{log.read_text()[-3000:]}")


def eval_loss(directory: Path) -> float:
    return float(json.loads((directory / "eval_results.json").read_text())["eval_loss"])


def main() -> None:
    words = sys.argv[1:]
    split = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 43, 44])
    parser.add_argument("--max_steps", type=int, default=800)
    options = parser.parse_args(words[:split])
    settings = words[split + 1 :] or OUTER
    print(f"{options.max_steps} steps, hf-diloco launch --num-learners 2 {' '.join(settings)}", flush=True)
    print("seed   alone  global  merges  participants  steps of the learners", flush=True)
    for seed in options.seeds:
        with tempfile.TemporaryDirectory() as name:
            path = Path(name)
            training = ["--max_steps", str(options.max_steps), *TRAINING, "--seed", str(seed)]
            run([sys.executable, str(SCRIPT), *training, "--output_dir", str(path / "alone")], path / "alone.log")
            launch = [sys.executable, "-m", "hf_diloco.cli.main", "launch", "--num-learners", "2", *settings]
            launch += ["--run-dir", str(path / "run"), str(SCRIPT), *training, "--output_dir", str(path / "out")]
            run(launch, path / "launch.log")
            status = json.loads((path / "run" / "status.json").read_text())
            steps = ", ".join(str(row["steps"]) for row in status["learners"])
            alone, together = eval_loss(path / "alone"), eval_loss(path / "out" / "learner-0")
            merges, participants = status["merges"], status["mean_participants"]
            print(f"{seed:4d}  {alone:.4f}  {together:.4f}  {merges:6d}  {participants:12.2f}  {steps}", flush=True)


if __name__ == "__main__":
    main()
