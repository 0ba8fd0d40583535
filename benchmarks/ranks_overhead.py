"""What agreement costs the ranks of one learner at a step boundary with nothing to do, as a share of a DDP step.

Each rank trains a Llama of about 5 M parameters with DistributedDataParallel (gloo, CPU, one thread) and agrees after
each step, as a learner does whose syncer has nothing for it. Timed on rank 0: the whole step, and the agreement in it
(waiting for the last header, reading it, sending the next one).

    torchrun --standalone --nproc_per_node 2 benchmarks/ranks_overhead.py [--steps 100]

Prints mean and 95th percentile of both, and their ratio.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

from hf_diloco.learner.operations import Plan
from hf_diloco.learner.ranks import ranks_of_this_learner

WARM_UP_STEPS = 5


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(int(len(values) * share), len(values) - 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="steps that are measured")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=2048, hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=4, max_position_embeddings=128,
        )
    )  # fmt: skip
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-4)
    ranks = ranks_of_this_learner()
    assert ranks.size > 1, "start it through torchrun"
    rows = torch.randint(0, 2048, (4, 64), generator=torch.Generator().manual_seed(ranks.rank))
    steps, boundaries = [], []
    for _ in range(WARM_UP_STEPS + options.steps):
        started = time.perf_counter()
        wrapped(input_ids=rows, labels=rows).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        trained = time.perf_counter()
        ranks.agree(Plan(steps=int(ranks.rank == 0), tokens=rows.numel()))
        ended = time.perf_counter()
        steps.append(ended - started)
        boundaries.append(ended - trained)
    if ranks.rank == 0:
        steps, boundaries = steps[WARM_UP_STEPS:], boundaries[WARM_UP_STEPS:]
        step, boundary = sum(steps) / len(steps), sum(boundaries) / len(boundaries)
        print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters, {ranks.size} ranks")
        print(f"step:      mean {step * 1e3:8.3f} ms   95th percentile {percentile(steps, 0.95) * 1e3:8.3f} ms")
        print(
            f"agreement: mean {boundary * 1e3:8.3f} ms   95th percentile {percentile(boundaries, 0.95) * 1e3:8.3f} ms"
        )
        print(f"share      mean {boundary / step:8.3%}")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
