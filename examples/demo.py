"""The whole thing in one command: `make demo`, or `python examples/demo.py`.

Trains a small Llama on the sources of Python's standard library with a syncer and two learners, and another one
alone for as many steps; then checks that what hf-diloco promises holds, and exits with 1 if something does not.
Under 5 minutes on 2 CPU cores.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hf_diloco.cli.local_run import shorter

EXAMPLES = Path(__file__).resolve().parent
SCRIPT = EXAMPLES / "pretrain_clm.py"
LEAST_MEAN_PARTICIPANTS = 1.8
LEAST_MERGED_SHARE = 0.95
# Constant learning rate: with a schedule that falls to 0, what two learners average out is annealed away at one learner
# too. Plain averaging (lr 1, no momentum): in so few merges from random weights, momentum does not pay off yet
# (benchmarks/global_vs_alone.py; docs/algorithm.md).
TRAINING = ["--lr_scheduler_type", "constant_with_warmup", "--disable_tqdm", "true"]
SETTINGS = ["--outer-lr", "1.0", "--outer-momentum", "0"]


class Checks:
    """What holds and what does not, one line each."""

    def __init__(self) -> None:
        self.num_failed = 0

    def __call__(self, holds: bool, what: str) -> None:
        """Print one of them, and count it if it does not hold."""
        self.num_failed += not holds
        print(f"  {'ok    ' if holds else 'FAILED'}  {what}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--run-dir", type=Path, help="default: runs/demo-<date-time>")
    parser.add_argument("--max-steps", type=int, default=800, help="steps of each learner")
    arguments = parser.parse_args()
    now = datetime.datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    run_dir = shorter(arguments.run_dir or Path("runs") / f"demo-{now}")
    started = time.monotonic()
    training = ["--max_steps", str(arguments.max_steps), *TRAINING]

    print("== One learner alone ==", flush=True)
    alone_dir = run_dir.with_name(run_dir.name + "-alone")
    if code := train_alone([*training, "--output_dir", str(alone_dir)], alone_dir):
        print(f"the run of one learner alone failed with exit code {code}; see {alone_dir / 'train.log'}")
        return 1

    print("\n== A syncer and two learners ==", flush=True)
    command = [
        sys.executable,
        "-m",
        "hf_diloco.cli.main",
        "launch",
        "--num-learners",
        "2",
        "--run-dir",
        str(run_dir),
        *SETTINGS,
    ]
    command += [str(shorter(SCRIPT)), *training, "--output_dir", str(run_dir / "learners")]
    print("$ hf-diloco " + " ".join(command[3:]), flush=True)
    code = subprocess.run(command, env=environment()).returncode

    print("\n== What came of it ==", flush=True)
    checks = Checks()
    checks(code == 0, f"hf-diloco launch ended with exit code {code}")
    if (run_dir / "model").is_dir():
        check_merging(run_dir, checks)
        check_losses(run_dir, alone_dir, checks)
        check_model(run_dir, checks)
    else:
        checks(False, f"there is a model in {run_dir / 'model'}")
    verdict = f"failed: {checks.num_failed} checks" if checks.num_failed else "went well"
    print(f"\nThe demo {verdict}, in {time.monotonic() - started:.0f} s: {run_dir}")
    return 1 if checks.num_failed else 0


def train_alone(words: list[str], output_dir: Path) -> int:
    """The same script without a syncer: it reads the whole training set, not a half; shows its losses as it goes."""
    output_dir.mkdir(parents=True)
    process = subprocess.Popen(
        [sys.executable, "-u", str(SCRIPT), *words],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    with process, (output_dir / "train.log").open("w") as log:
        for line in process.stdout:
            log.write(line)
            if line.startswith("{'"):
                print("  " + line.rstrip(), flush=True)
    return process.returncode


def environment() -> dict[str, str]:
    """Of the child processes: without the settings of some other run."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_DILOCO_")}
    return {**kept, "TOKENIZERS_PARALLELISM": "false"}


def check_merging(run_dir: Path, checks: Checks) -> None:
    """From the event tape: how many took part; from the syncer's last status: how much was merged."""
    tape = [json.loads(line) for line in (run_dir / "tape.jsonl").read_text().splitlines()]
    joined: set[int] = set()
    num_participants = []
    for line in tape:
        if line["kind"] == "join":
            joined.add(line["learner_id"])
        elif line["kind"] == "round" and len(joined) == 2:
            num_participants.append(len(line["participants"]))
    mean = sum(num_participants) / max(len(num_participants), 1)
    checks(
        mean >= LEAST_MEAN_PARTICIPANTS,
        f"{len(num_participants)} merges, mean participants {mean:.2f} of 2 (at least {LEAST_MEAN_PARTICIPANTS})",
    )
    for learner in json.loads((run_dir / "status.json").read_text())["learners"]:
        merged, trained = learner["tokens_merged"], learner["tokens_trained"]
        share = merged / max(trained, 1)
        checks(
            share >= LEAST_MERGED_SHARE,
            f"learner {learner['learner_id']}: tokens merged / trained {merged:,.0f} / {trained:,.0f} = {share:.3f} "
            f"(at least {LEAST_MERGED_SHARE})",
        )


def check_losses(run_dir: Path, alone_dir: Path, checks: Checks) -> None:
    """Both learners' losses go down, and the global model is better than one learner alone."""
    for learner_id in (0, 1):
        losses = list(logged_losses(run_dir / "logs" / f"learner-{learner_id}.log"))
        shown = f"{losses[0]:.3f} -> {losses[-1]:.3f}" if losses else "none logged"
        checks(len(losses) > 1 and losses[-1] < losses[0], f"learner {learner_id}: training loss {shown}")
    ours = eval_loss(run_dir / "learners" / "learner-0")
    alone = eval_loss(alone_dir)
    checks(ours < alone, f"eval loss of the global model {ours:.4f}, of one learner alone {alone:.4f}")


def logged_losses(log: Path) -> Iterator[float]:
    """The training losses that Trainer has printed."""
    for line in log.read_text(errors="replace").splitlines():
        if line.startswith("{'loss'"):
            yield float(json.loads(line.replace("'", '"'))["loss"])


def eval_loss(output_dir: Path) -> float:
    return float(json.loads((output_dir / "eval_results.json").read_text())["eval_loss"])


def check_model(run_dir: Path, checks: Checks) -> None:
    """What from_pretrained loads are the syncer's values, bit for bit."""
    import torch
    from transformers import AutoModelForCausalLM

    from hf_diloco.syncer.run_directory import RunDirectory
    from hf_diloco.syncer.saved_run import latest_run

    model: Any = AutoModelForCausalLM.from_pretrained(run_dir / "model")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        saved = latest_run(RunDirectory(run_dir, create=False))
    assert saved is not None
    loaded = dict(model.named_parameters())
    values = saved.tensors()
    same = loaded.keys() == values.keys() and all(torch.equal(loaded[name], values[name]) for name in values)
    checks(same, f"AutoModelForCausalLM.from_pretrained({str(run_dir / 'model')!r}) holds the syncer's values exactly")


if __name__ == "__main__":
    sys.exit(main())
