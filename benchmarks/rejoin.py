"""What is the optimizer state worth to a learner that comes back?

Two learners train a small Llama on bytes of Python sources; after some steps the second one is killed and comes back
at once, with nothing lost but its optimizer: with the state of its own checkpoint (20 steps old), with that of its
peer, with none and a warm-up of its learning rate, or with none at all. Syncer, learners and messages are those of a
real run, joined inside this process; the two take their steps in turn, so that the load of the machine does not
matter. Constant learning rate, AdamW with Trainer's betas.

    python benchmarks/rejoin.py [--seeds 0 1 2] [--warm-ups 20 50]

Prints for each way the held-out loss of the learner that came back, some steps later (of its own model, which merges
reach all the time), and that of the global model at the end: mean over the seeds, and the difference to a learner
that was never killed (standard error over the seeds).
"""

from __future__ import annotations

import argparse
import statistics
import sysconfig
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_diloco import DiLoCoPlugin, SyncerConfig
from hf_diloco.learner import warm_up
from hf_diloco.learner.learner import Learner
from hf_diloco.learner.parameters import ModelParameters
from hf_diloco.links.in_process import InProcessHub
from hf_diloco.syncer.run_directory import RunDirectory
from hf_diloco.syncer.service import Syncer
from hf_diloco.syncer.tape import read_tape

KILLED_AT, CHECKPOINT_AGE, LATER = 200, 20, (2, 5, 10, 20, 40, 80)
LENGTH, BATCH = 64, 8


def text() -> torch.Tensor:
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in paths)), dtype=torch.uint8).long()


def batch(data: torch.Tensor, generator: torch.Generator, size: int = BATCH) -> torch.Tensor:
    starts = torch.randint(0, len(data) - LENGTH, (size,), generator=generator).tolist()
    return torch.stack([data[start : start + LENGTH] for start in starts])


class Trainee:
    """One learner with its model, optimizer and data."""

    def __init__(self, hub: InProcessHub, learner_id: int, data: torch.Tensor, seed: int, *, gives: bool) -> None:
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=4, max_position_embeddings=LENGTH,
        )  # fmt: skip
        self.data, self.generator = data, torch.Generator().manual_seed(1000 * seed + learner_id)
        self.model = LlamaForCausalLM(config)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        plugin = DiLoCoPlugin(syncer="in-process:1", learner_id=learner_id)
        link = hub.connect(learner_id, incarnation=str(id(self)))
        optimizer = self.optimizer if gives else None
        self.learner = Learner(ModelParameters(self.model), plugin, total_steps=100_000, optimizer=optimizer, link=link)

    def join(self) -> threading.Thread:
        thread = threading.Thread(target=self.learner.join)
        thread.start()
        return thread

    def step(self) -> None:
        inputs = batch(self.data, self.generator)
        self.model(input_ids=inputs, labels=inputs).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.learner.step(tokens=inputs.numel())
        time.sleep(0.002)  # for the threads that ship and merge

    def loss(self, held_out: torch.Tensor) -> float:
        with torch.no_grad():
            return float(self.model(input_ids=held_out, labels=held_out).loss)


def one_run(data: torch.Tensor, seed: int, way: str, directory: Path) -> list[float]:
    """Held-out losses of the learner that came back, later and later; then that of the global model."""
    split = len(data) * 9 // 10
    held_out = batch(data[split:], torch.Generator().manual_seed(7), 64)
    hub, run_directory = InProcessHub(), RunDirectory(directory / f"{seed}-{way}")
    syncer = Syncer(SyncerConfig(expected_learners=2, num_fragments=8, sync_every=24), hub, run_directory)
    serving = threading.Thread(target=syncer.run)
    serving.start()
    first = Trainee(hub, 0, data[:split], seed, gives=way == "peer")
    second = Trainee(hub, 1, data[:split], seed, gives=False)
    for thread in (first.join(), second.join()):
        thread.join()
    state: dict[str, Any] = {}
    for step in range(KILLED_AT):
        if step == KILLED_AT - CHECKPOINT_AGE:
            torch.save(second.optimizer.state_dict(), directory / "optimizer.pt")
            state = torch.load(directory / "optimizer.pt")
        first.step()
        second.step()
    if way != "never killed":
        second = come_back(hub, first, second, seed, way, state)
        (line,) = (line for line in read_tape(run_directory.tape) if line["kind"] == "state")
        assert line["source"] == {"own": "own", "peer": "peer"}.get(way, "warm-up"), line
    losses = []
    for step in range(1, LATER[-1] + 1):
        first.step()
        second.step()
        if step in LATER:
            losses.append(second.loss(held_out))
    for trainee in (first, second):
        trainee.learner.leave("the measurement is over")
    syncer.stop()
    serving.join()
    second.model.load_state_dict(syncer.model()[0], strict=False)
    return [*losses, second.loss(held_out)]


def come_back(
    hub: InProcessHub, first: Trainee, killed: Trainee, seed: int, way: str, state: dict[str, Any]
) -> Trainee:
    killed.learner.close()
    again = Trainee(hub, 1, killed.data, seed, gives=True)
    again.generator = killed.generator
    if way == "own":
        again.optimizer.load_state_dict(state)
    # A warm-up over one step is none.
    warm_up.MOST_STEPS = int(way.split()[-1]) if way.startswith("warm-up") else 1
    joining = again.join()
    while joining.is_alive():
        first.step()
    return again


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--warm-ups", type=int, nargs="+", default=[20, 50])
    options = parser.parse_args()
    data = text()
    ways = ["never killed", "own", "peer", *(f"warm-up {steps}" for steps in options.warm_ups), "none"]
    print(f"killed after {KILLED_AT} steps; seeds {options.seeds}; held-out loss (difference to never killed)")
    print(f"{'':14s}" + "".join(f"{f'+{steps} steps':>24s}" for steps in LATER) + f"{'global, at the end':>24s}")
    unharmed: list[list[float]] = []
    for way in ways:
        with tempfile.TemporaryDirectory() as name:
            rows = [one_run(data, seed, way, Path(name)) for seed in options.seeds]
        unharmed = unharmed or rows
        cells = []
        for column in range(len(LATER) + 1):
            losses = [row[column] for row in rows]
            harm = [row[column] - other[column] for row, other in zip(rows, unharmed, strict=True)]
            error = statistics.stdev(harm) / len(harm) ** 0.5 if len(harm) > 1 else 0.0
            cells.append(f"{statistics.mean(losses):.4f} ({statistics.mean(harm):+.4f}±{error:.4f})")
        print(f"{way:14s}" + "".join(f"{cell:>24s}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
