"""SIGKILL of the syncer at random instants: how soon the next one merges, and whether anything is lost or merged twice.

    python benchmarks/syncer_kills.py [--kills 30] [--seed 0] [--out runs/syncer-kills]

Two learners (a small Llama, at least 0.2 s a step) train all the time; the syncer is started again on its run
directory each time, 1 to 6 s after its last merge of before. Checked from the tape and from what the learners
themselves wrote down: versions never go back as a learner sees them, every update is merged at most once, no merge is
void that a learner had applied which told the next syncer so, every token is accounted for. Exit code 1 if not.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from hf_diloco.chaos.accounting import keep_books, read_witness
from hf_diloco.chaos.experiment import TRAIN_SMALL
from hf_diloco.chaos.measure import summary
from hf_diloco.chaos.run import ChaosRun

MOST_SECONDS = 10.0
PATIENCE_SECONDS = 120.0


def wait(run: ChaosRun, condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            sys.exit(f"waited {PATIENCE_SECONDS:.0f} s in vain for {what}; the end of its log:\n{run.tail(None)}")
        run.tick()
        time.sleep(0.02)


def kill(run: ChaosRun, generator: random.Random) -> float:
    """Kill the syncer at a random instant; seconds from the next one's address being there to its first merge."""
    instant = time.monotonic() + generator.uniform(1, 6)
    wait(run, lambda: time.monotonic() >= instant, "the instant")
    syncer = run.process(None)
    assert syncer is not None
    num_starts = sum(line["kind"] == "start" for line in run.tape())
    syncer.signal(signal.SIGKILL)
    wait(run, lambda: sum(line["kind"] == "start" for line in run.tape()) > num_starts, "the next syncer")
    up_at, num_rounds = time.monotonic(), len(run.rounds())
    wait(run, lambda: len(run.rounds()) > num_rounds, "its first merge")
    return time.monotonic() - up_at


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/syncer-kills"))
    options = parser.parse_args()
    out, generator = options.out.absolute(), random.Random(options.seed)
    shutil.rmtree(out, ignore_errors=True)
    script = [str(TRAIN_SMALL), "--output_dir", str(out / "out"), "--max_steps", "100000", "--step_seconds", "0.2"]
    with ChaosRun(out, script, 2, ["--expected-learners", "2", "--checkpoint-every-seconds", "5"]) as run:
        run.start()
        wait(run, lambda: len(run.rounds()) > 10, "merges")
        seconds = []
        for number in range(options.kills):
            seconds.append(kill(run, generator))
            print(f"kill {number + 1}: first merge {seconds[-1]:.2f} s after the new syncer was up", flush=True)
        learners = [process for who in (0, 1) if (process := run.process(who))]
        for process in learners:
            process.signal(signal.SIGSTOP)  # so that the books are closed at one moment
        books = keep_books(run.tape(), {who: read_witness(run.witness(who)) for who in (0, 1)})
        deaths = [life for life in run.lives if life.learner_id is not None and life.ended_at is not None]
    numbers = summary(seconds)
    print(
        f"{numbers['count']} kills: first merge after median {numbers['median']:.2f} s, longest {numbers['max']:.2f} s"
    )
    print(f"tokens trained {books.trained:,}, merged {books.merged:,.0f}, merged and void {books.voided:,.0f}, "
          f"overwritten {books.overwritten:,.0f}, not merged yet {books.lost + books.held:,.0f}")  # fmt: skip
    problems = [*books.errors, *(f"learner {life.learner_id} ended" for life in deaths)]
    if max(seconds) > MOST_SECONDS:
        problems.append(f"the first merge took {max(seconds):.1f} s, at most {MOST_SECONDS:.0f} are allowed")
    print("\n".join(problems) or "nothing was lost, nothing was merged twice, no version went back")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
