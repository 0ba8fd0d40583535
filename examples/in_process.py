"""Three learners and a syncer in one process: the algorithm at work, no ports, no processes, in half a minute.

Each learner fits the same teacher on data of its own, at a speed of its own; the syncer merges what they learn.
What is shown is real: the very syncer and learners of a run over machines, joined by links inside the process.

    python examples/in_process.py
"""

from __future__ import annotations

import logging
import tempfile
import threading
import time
from pathlib import Path

import torch
from torch import nn

from hf_diloco import DiLoCoPlugin, SyncerConfig
from hf_diloco.learner.learner import Learner
from hf_diloco.learner.parameters import ModelParameters
from hf_diloco.links.in_process import InProcessHub
from hf_diloco.syncer.run_directory import RunDirectory
from hf_diloco.syncer.service import Syncer
from hf_diloco.syncer.tape import read_tape

TOTAL_STEPS = 300
STEP_SECONDS = (0.01, 0.015, 0.02)  # the third learner is half as fast as the first


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))


def evaluate(model: nn.Module, teacher: nn.Module) -> float:
    inputs = torch.randn(512, 16, generator=torch.Generator().manual_seed(999))
    with torch.no_grad():
        return nn.functional.mse_loss(model(inputs), teacher(inputs)).item()


def train(learner_id: int, hub: InProcessHub, teacher: nn.Module, losses: dict[int, float]) -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    plugin = DiLoCoPlugin(syncer="in-process:1", learner_id=learner_id)
    learner = Learner(ModelParameters(model), plugin, total_steps=TOTAL_STEPS, link=hub.connect(learner_id))
    learner.join()
    generator = torch.Generator().manual_seed(learner_id)
    going = True
    while going:
        inputs = torch.randn(16, 16, generator=generator)
        loss = nn.functional.mse_loss(model(inputs), teacher(inputs))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(STEP_SECONDS[learner_id])
        going = learner.step(tokens=len(inputs), loss=loss.item())
    learner.finish()  # from here on the model holds the global parameters
    losses[learner_id] = evaluate(model, teacher)


def main() -> None:
    logging.basicConfig(level=logging.WARNING)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    teacher = make_model()
    start = evaluate(make_model(), teacher)
    with tempfile.TemporaryDirectory() as path:
        directory = RunDirectory(Path(path) / "run")
        hub = InProcessHub()
        config = SyncerConfig(num_fragments=4, sync_every=12, expected_learners=len(STEP_SECONDS))
        syncer = Syncer(config, hub, directory)
        losses: dict[int, float] = {}
        threads = [threading.Thread(target=syncer.run, name="syncer")]
        threads += [
            threading.Thread(target=train, args=(learner_id, hub, teacher, losses), name=f"learner {learner_id}")
            for learner_id in range(len(STEP_SECONDS))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        rounds = [line for line in read_tape(directory.tape) if line["kind"] == "round"]
        participants = sum(len(line["participants"]) for line in rounds) / len(rounds)
        print(f"eval loss before: {start:.4f}")
        for learner_id, loss in sorted(losses.items()):
            print(f"eval loss of the global model, seen by learner {learner_id}: {loss:.4f}")
        print(f"{len(rounds)} merges with {participants:.2f} of {len(STEP_SECONDS)} learners on average")
        for row in syncer.status()["learners"]:
            share = row["tokens_merged"] / row["tokens_trained"]
            print(f"learner {row['learner_id']}: {row['steps']} steps, {share:.1%} of its samples merged")


if __name__ == "__main__":
    main()
