"""A short warm-up of the inner learning rate, for an optimizer that begins in the middle of a run without state."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from hf_diloco.learner.optimizer_steps import around_steps

MOST_STEPS = 20  # what no warm-up costs is over after about ten (benchmarks/rejoin.py)

_END = "_hf_diloco_end_warm_up"  # attribute of an optimizer, so that who comes next finds it


def warm_up_steps(optimizer: Optimizer) -> int:
    """How many steps: as many as the second moments average over, 1 / (1 - beta2), but not more than 20.

    Until then the estimate of the gradients' size is a guess from few samples, and steps come out too large.
    """
    betas = [group["betas"][1] for group in optimizer.param_groups if "betas" in group]
    return min([MOST_STEPS, *(round(1 / (1 - min(float(beta), 0.9999))) for beta in betas)])


def warm_up(optimizer: Optimizer) -> int:
    """Multiply the learning rate of the next n steps by 1/n, 2/n, ..., whatever the schedule sets it to; returns n.

    Only while the step is made: what schedulers and loggers see is the schedule's own rate. It goes on if the learner
    that began it ends and another one takes the optimizer. A second one replaces it.
    """
    num_steps, num_done = warm_up_steps(optimizer), 0
    rates: list[Any] = []

    def before() -> None:
        rates[:] = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * (num_done + 1) / num_steps

    def after() -> None:
        nonlocal num_done
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        num_done += 1
        if num_done >= num_steps:
            end()

    getattr(optimizer, _END, lambda: None)()
    end = around_steps(optimizer, before=before, after=after)
    setattr(optimizer, _END, end)
    return num_steps
