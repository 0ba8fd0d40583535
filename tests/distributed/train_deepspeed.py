"""A loop over a DeepSpeed engine, for a learner of several processes: accelerate does not take DeepSpeed to a CPU."""

from __future__ import annotations

import argparse
import logging
import os
import time

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.zero import GatheredParameters
from train_ranks import end_of_ranks
from train_tiny import dataset, model

from hf_diloco import DiLoCoPlugin
from hf_diloco.integrations.membership import Membership

BATCH_SIZE = 2


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, required=True)
    parser.add_argument("--result", required=True)
    parser.add_argument("--max_steps", type=int, default=40)
    parser.add_argument("--step_seconds", type=float, default=0.2)
    parser.add_argument("--data_seed", type=int, default=0)
    options = parser.parse_args()
    deepspeed.init_distributed("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    logging.basicConfig(level=logging.INFO, format=f"rank {rank} pid {os.getpid()} %(message)s")
    torch.set_num_threads(1)
    config = {
        "train_micro_batch_size_per_gpu": BATCH_SIZE,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": options.stage, "stage3_param_persistence_threshold": 100},
    }
    network = model(options.data_seed, 16)  # learners begin with different weights
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    engine = deepspeed.initialize(model=network, optimizer=optimizer, config=config)[0]
    member = Membership(
        engine,
        DiLoCoPlugin(),
        total_steps=options.max_steps,
        optimizer=engine.optimizer,
        is_training=lambda frame: True,
    )
    member.join()
    engine.train()
    rows = dataset(options.data_seed)
    goes_on, step = True, 0
    while goes_on:
        began = time.monotonic()
        first = (step * world_size + rank) * BATCH_SIZE
        batch = torch.tensor([row["input_ids"] for row in rows[first : first + BATCH_SIZE]])
        loss = engine(input_ids=batch, labels=batch).loss
        engine.backward(loss)
        engine.step()
        goes_on, step = member.step(loss=float(loss)), step + 1
        time.sleep(max(0.0, options.step_seconds - (time.monotonic() - began)))
    assert member.holds_global
    with GatheredParameters(list(network.parameters())):
        held = {name: parameter.detach().clone() for name, parameter in network.named_parameters()}
    torch.save(held, f"{options.result}.rank-{rank}.pt")
    member.end()
    end_of_ranks()


if __name__ == "__main__":
    main()
