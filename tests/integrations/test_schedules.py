"""Learning rates follow the global step."""

import contextlib

import pytest
import torch
from accelerate.utils.deepspeed import DeepSpeedSchedulerWrapper
from torch import nn
from trainers import NUM_SAMPLES, Recorder, make_trainer, plugin

from hf_diloco.errors import DiLoCoWarning
from hf_diloco.integrations.schedules import follow, num_steps
from hf_diloco.integrations.transformers import DiLoCoCallback

pytestmark = pytest.mark.fast

SCHEDULES = [
    ("linear", {}),
    ("cosine", {}),
    ("warmup_stable_decay", {"num_decay_steps": 6}),
    ("cosine_with_restarts", {"num_cycles": 3}),
    ("polynomial", {}),
    ("inverse_sqrt", {}),
]


def schedule(kind, options):
    return {"lr_scheduler_type": kind, "lr_scheduler_kwargs": options, "warmup_steps": 4, "max_steps": 24}


@pytest.mark.parametrize(("kind", "options"), SCHEDULES)
def test_the_learning_rate_is_that_of_the_global_step(tmp_path, scripted, kind, options):
    whole = Recorder()
    make_trainer(tmp_path, whole, **schedule(kind, options)).train()
    rates = [whole.first_rate, *whole.rates]  # by number of steps done
    scripted.starts_at, scripted.jumps = 7, {3: 13, 5: 14}
    late = Recorder()
    make_trainer(tmp_path, DiLoCoCallback(plugin()), late, **schedule(kind, options)).train()
    assert late.first_rate == rates[7]
    assert late.rates == [rates[step] for step in (8, 9, 13, 14, *range(15, 25))]
    assert len(set(late.rates)) > 5


@pytest.mark.parametrize(("run_steps", "options", "is_warned"), [
    (40, {}, True),
    (11, {}, True),
    (19, {"num_train_epochs": 2}, True),  # of 20
    (99, {"num_train_epochs": 10}, False),  # of 100
    (10, {}, False),
    (40, {"lr_scheduler_type": "constant"}, False),
    (40, {"max_steps": 40}, False),
])  # fmt: skip
def test_epochs_of_another_length_than_the_runs_are_warned_of(tmp_path, scripted, run_steps, options, is_warned):
    scripted.run_steps, scripted.ends_at = run_steps, 2
    options = {"max_steps": -1, "num_train_epochs": 1, "lr_scheduler_type": "cosine", **options}
    trainer = make_trainer(tmp_path, DiLoCoCallback(plugin()), **options)
    own = NUM_SAMPLES // 4 * options["num_train_epochs"]
    message = rf"come to {own} steps, the run has {run_steps}\..*Set max_steps={run_steps} .*--total-steps"
    with pytest.warns(DiLoCoWarning, match=message) if is_warned else contextlib.nullcontext():
        trainer.train()


@pytest.mark.parametrize("make", [
    lambda opt: torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=24),
    lambda opt: torch.optim.lr_scheduler.ChainedScheduler([
        torch.optim.lr_scheduler.ConstantLR(opt, 0.1, 10), torch.optim.lr_scheduler.ExponentialLR(opt, 0.9),
    ]),
    lambda opt: torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=1e-2, total_steps=25),
    lambda opt: torch.optim.lr_scheduler.SequentialLR(
        opt,
        [torch.optim.lr_scheduler.LinearLR(opt, 0.1, total_iters=4), torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)],
        milestones=[4],
    ),
])  # fmt: skip
def test_schedulers_of_torch_follow_step_by_step(make):
    def rates(steps):
        optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=1e-3)
        scheduler = make(optimizer)
        for step in steps:
            follow(scheduler, step)
        return optimizer.param_groups[0]["lr"]

    assert rates([7, 13, 13, 14]) == pytest.approx(rates(range(15)), rel=1e-12)


@pytest.mark.long  # where DeepSpeed is
@pytest.mark.parametrize(("kind", "options"), [
    ("WarmupLR", {"warmup_max_lr": 1e-2, "warmup_num_steps": 5}),
    ("WarmupDecayLR", {"total_num_steps": 24, "warmup_max_lr": 1e-2, "warmup_num_steps": 5}),
    ("WarmupCosineLR", {"total_num_steps": 24, "warmup_num_steps": 5}),
    ("LRRangeTest", {"lr_range_test_step_size": 4}),
    ("OneCycle", {"cycle_min_lr": 1e-3, "cycle_max_lr": 1e-2, "cycle_first_step_size": 6}),
])  # fmt: skip
def test_schedulers_of_deepspeed(kind, options):
    """Their engine steps them after each update, and what a learner has done may be ahead of it."""
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: pip install -e '.[dev-long]'")
    from deepspeed.runtime import lr_schedules

    def start():
        optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=1e-3)
        scheduler = getattr(lr_schedules, kind)(optimizer, **options)
        return DeepSpeedSchedulerWrapper(scheduler, optimizer), scheduler, optimizer.param_groups[0]

    wrapper, scheduler, group = start()
    rates = [group["lr"]]  # by number of steps done
    for _ in range(24):
        scheduler.step()
        rates.append(group["lr"])
    assert len(set(rates)) > 4

    wrapper, scheduler, group = start()
    follow(wrapper, 0)
    assert group["lr"] == rates[0]
    for before, after in [(0, 7), (8, 8), (9, 13), (14, 15), (16, 24)]:
        if before:
            scheduler.step()
            assert num_steps(wrapper) == before
        follow(wrapper, after)
        assert (num_steps(wrapper), group["lr"]) == (after, rates[after])


@pytest.mark.parametrize("kind", ["reduce_lr_on_plateau", "greedy"])
def test_a_schedule_that_cannot_jump_is_warned_about_once(tmp_path, scripted, kind):
    scripted.starts_at, scripted.jumps = 3, {1: 5}
    trainer = make_trainer(
        tmp_path, DiLoCoCallback(plugin()), lr_scheduler_type=kind, eval_strategy="steps", eval_steps=1
    )
    with pytest.warns(DiLoCoWarning, match="follows this learner's own metrics"):
        trainer.train()
    trainer.train()  # a second warning would be an error
