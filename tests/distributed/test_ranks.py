"""Learners of several processes: what they hold, and what happens when one of the processes is told to stop or dies."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import train_ranks
from processes import Process, Run, wait_until
from safetensors.torch import load_file

from hf_diloco import last_checkpoint
from hf_diloco.learner.data import data_seed
from hf_diloco.syncer.run_directory import RunDirectory
from hf_diloco.syncer.saved_run import latest_run

pytestmark = [pytest.mark.distributed, pytest.mark.long, pytest.mark.timeout(600)]

SCRIPT = Path(train_ranks.__file__)
ONE_PROCESS = ("plain", "compile")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
SECONDS = 240.0  # the first time, DeepSpeed compiles


def start(path: Path, name: str, environment: dict[str, str], kind: str, **options: Any) -> Process:
    flags = [text for key, value in options.items() for text in (f"--{key}", str(value))]
    launcher = [sys.executable] if kind in ONE_PROCESS else TORCHRUN
    command = [*launcher, str(SCRIPT), "--kind", kind, "--result", str(path / name), "--output_dir", str(path / "out")]
    return Process([*command, *flags], path / f"{name}.log", environment)


def start_learner(run: Run, learner_id: int, kind: str, life: int = 1, **options: Any) -> Process:
    environment = run.learner_environment(learner_id)
    process = start(run.path, f"{kind}-{learner_id}-{life}", environment, kind, data_seed=learner_id, **options)
    run.learners[learner_id] = process
    run._all.append(process)
    return process


def skip_without_deepspeed(kind: str) -> None:
    if kind.startswith("zero"):
        pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: pip install -e '.[dev-long]'")


def diary(run: Run, kind: str, learner_id: int, rank: int, life: int = 1) -> list[dict[str, Any]]:
    lines = (run.path / f"{kind}-{learner_id}-{life}.rank-{rank}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def check_ranks_agree(run: Run, kind: str, learner_id: int, life: int = 1) -> None:
    """The same parameters and the same learning rate at every step."""
    first, second = (diary(run, kind, learner_id, rank, life) for rank in (0, 1))
    assert len(first) > 1
    assert first == second


def check_saved(run: Run, kind: str, learner_id: int) -> None:
    """What ``trainer.save_model()`` wrote after training is the run's model, as the syncer wrote it."""
    directory = run.path / f"{kind}-{learner_id}-1-saved"
    (file,) = (run.directory / "model").glob("*.safetensors")
    theirs, ours = load_file(file), load_file(directory / file.name)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs), kind


def participants(line: dict[str, Any]) -> dict[int, str]:
    return {who["learner_id"]: who["update_id"].partition("/")[0] for who in line["participants"]}


def ranks_of(learner: Process) -> dict[int, psutil.Process]:
    """The processes that train, by rank."""
    found = {}
    for process in psutil.Process(learner.pid).children(recursive=True):
        if process.cmdline()[1:2] == ["-u"] or str(SCRIPT) in process.cmdline()[:3]:
            found[int(process.environ()["RANK"])] = process
    return found


def test_three_kinds_of_learners_in_one_run(start_run: Any) -> None:
    run = start_run(expected_learners=3, num_fragments=4, sync_every=8, finish_wait_seconds=120)
    kinds = {0: "plain", 1: "ddp", 2: "fsdp2"}
    for learner_id, kind in kinds.items():
        start_learner(run, learner_id, kind, max_steps=60, step_seconds=0.3)
    for learner in run.learners.values():
        assert learner.wait(SECONDS) == 0, learner.tail()
    assert run.syncer.wait(SECONDS) == 0, run.syncer.tail()
    together = [line for line in run.rounds() if len(participants(line)) == 3]
    assert len(together) >= 6
    for learner_id in (1, 2):
        check_ranks_agree(run, kinds[learner_id], learner_id)
    saved = latest_run(RunDirectory(run.directory, create=False)).tensors()
    for learner_id, kind in kinds.items():
        held = torch.load(run.path / f"{kind}-{learner_id}-1.pt")
        assert all(torch.equal(saved[name], held[name]) for name in saved), kind
        check_saved(run, kind, learner_id)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT's
@pytest.mark.parametrize("kind", [kind for kind in train_ranks.KINDS if kind != "plain"])
def test_alone_it_is_plain_training(start_run: Any, tmp_path: Path, kind: str) -> None:
    skip_without_deepspeed(kind)
    options = {"max_steps": 60, "hidden_size": 32, "batch_size": 2}
    plain = start(tmp_path, "plain", {}, kind, order_seed=data_seed(1, 0), **options)
    run = start_run(num_fragments=6, sync_every=12, outer_lr=1.0, outer_momentum=0.0, wire_format="fp32")
    learner = start_learner(run, 0, kind, **options)
    assert plain.wait(SECONDS) == 0, plain.tail()
    assert learner.wait(SECONDS) == 0, learner.tail()
    assert run.syncer.wait(SECONDS) == 0, run.syncer.tail()
    check_saved(run, kind, 0)
    if kind not in ONE_PROCESS:
        check_ranks_agree(run, kind, 0)
    theirs, ours = flat(torch.load(tmp_path / "plain.pt")), flat(torch.load(run.path / f"{kind}-0-1.pt"))
    network = train_ranks.network_of(kind, 32)
    moved = theirs - flat({name: value.detach() for name, value in network.named_parameters()})
    assert float((ours - theirs).norm() / moved.norm()) <= 1e-4
    merges = [line["fragment_index"] for line in run.rounds()]
    assert min(merges.count(index) for index in range(6)) >= 3
    account = run.status()["learners"][0]
    num_ranks = 1 if kind in ONE_PROCESS else 2
    assert account["tokens_merged"] == account["tokens_trained"] == 60 * num_ranks * 2 * 32


def flat(values: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([values[name].flatten().double() for name in sorted(values)])


@pytest.mark.parametrize(("kind", "victims"), [("ddp", (1, 0)), ("fsdp2", (0,)), ("zero3", (1,))])
def test_ranks_that_die(start_run: Any, kind: str, victims: tuple[int, ...]) -> None:
    """A rank that is killed takes its learner down; the run goes on, and the learner comes back."""
    skip_without_deepspeed(kind)
    run = start_run(expected_learners=2, num_fragments=4, sync_every=4, link_timeout_seconds=5)
    start_learner(run, 0, "plain", max_steps=100_000, step_seconds=0.3)
    for life, victim in enumerate(victims, start=1):
        learner = start_learner(run, 1, kind, life, max_steps=100_000, step_seconds=0.3)
        joins = wait_until(lambda life=life: joined(run, 1, life), "the learner to join", SECONDS)
        wait_until(lambda who=joins[-1]: who in merged(run), "merges of the learner")
        ranks_of(learner)[victim].kill()
        assert learner.wait(60) != 0, learner.tail()
        count = len(run.rounds())
        wait_until(lambda count=count: len(run.rounds()) >= count + 4, "merges without it")
        check_ranks_agree_so_far(run, kind, life)
    last = len(victims) + 1
    start_learner(run, 1, kind, last, max_steps=100_000, step_seconds=0.3)
    joins = wait_until(lambda: joined(run, 1, last), "the learner to come back once more", SECONDS)
    wait_until(lambda: joins[-1] in merged(run), "it to be merged again")
    assert run.learners[0].running()

    run.learners[1].signal(signal.SIGTERM)  # torchrun passes it on to all ranks
    run.learners[1].wait(60)
    assert run.learners[1].tail(20_000).count("exits") == 2, run.learners[1].tail()
    assert {line["for_good"] for line in run.tape() if line["kind"] == "leave" and line["learner_id"] == 1} == {False}


def joined(run: Run, learner_id: int, count: int) -> list[str]:
    lines = [line for line in run.tape() if line["kind"] == "join" and line["learner_id"] == learner_id]
    incarnations = list(dict.fromkeys(line["incarnation"] for line in lines))
    return incarnations if len(incarnations) >= count else []


def merged(run: Run) -> set[str]:
    return {incarnation for line in run.rounds() for incarnation in participants(line).values()}


def check_ranks_agree_so_far(run: Run, kind: str, life: int) -> None:
    first, second = (diary(run, kind, 1, rank, life) for rank in (0, 1))
    num_steps = min(len(first), len(second))
    assert num_steps > 1
    assert first[:num_steps] == second[:num_steps]


def moments(run: Run, kind: str, life: int, rank: int) -> list[dict[str, Any]]:
    lines = (run.path / f"{kind}-1-{life}.rank-{rank}.moments").read_text().splitlines()
    return [json.loads(line) for line in lines]


def check_resumed(run: Run, kind: str, life: int) -> None:
    """It began with what its last life had in its last whole checkpoint, on both ranks, and needed no warm-up."""
    states = [line for line in run.tape() if line["kind"] == "state"]
    assert [(line["source"], line["reason"]) for line in states] == [("own", "")] * (life - 1)
    assert "is warmed up" not in run.learners[1].tail(1 << 20)
    for rank in (0, 1):
        begins = moments(run, kind, life, rank)[0]
        assert begins["begins"]
        saved = [line for line in moments(run, kind, life - 1, rank) if line["step"] == begins["step"]]
        assert [line["digest"] for line in saved if not line["begins"]] == [begins["digest"]] != [None]
        assert diary(run, kind, 1, rank, life)[1]["step"] == begins["step"] + 1 > 1


@pytest.mark.timeout(600)  # three starts of two processes each; DeepSpeed also compiles a part of itself
@pytest.mark.parametrize("kind", ["fsdp2", "zero3"])
def test_sharded_learners_go_on_from_their_own_checkpoints(start_run: Any, kind: str) -> None:
    """Killed after a checkpoint; an FSDP2 learner is also preempted. The other one is slow: it does not end the run."""
    skip_without_deepspeed(kind)
    run = start_run(expected_learners=2, num_fragments=4, sync_every=4, finish_wait_seconds=1)
    start_learner(run, 0, "plain", max_steps=300, step_seconds=1.0)
    options = {"max_steps": 300, "step_seconds": 0.1, "resume": 1}
    directory, life = run.path / "out" / "learner-1", 1
    learner = start_learner(run, 1, kind, life, save_steps=5, **options)
    joins = wait_until(lambda: joined(run, 1, 1), "the learner to join", SECONDS)
    wait_until(lambda: joins[0] in merged(run) and last_checkpoint(str(directory)), "a checkpoint and a merge", SECONDS)
    for rank in ranks_of(learner).values():
        rank.kill()
    assert learner.wait(60) != 0, learner.tail()
    for life in (2, 3) if kind == "fsdp2" else (2,):
        learner = start_learner(run, 1, kind, life, **options)
        joins = wait_until(lambda life=life: run._alive() and joined(run, 1, life), "it to come back", SECONDS)
        wait_until(lambda who=joins[-1]: run._alive() and who in merged(run), "it to be merged again", SECONDS)
        check_resumed(run, kind, life)
        if kind == "fsdp2" and life == 2:
            ranks_of(learner)[0].terminate()
            assert learner.wait(60) == 0, learner.tail()
            assert learner.tail(20_000).count("exits") == 2, learner.tail()
            check_ranks_agree(run, kind, 1, life)
            last_step = diary(run, kind, 1, 0, life)[-1]["step"]
            assert last_checkpoint(str(directory)) == str(directory / f"checkpoint-{last_step}")
    for process in (*run.learners.values(), run.syncer):
        assert process.wait(SECONDS) == 0, process.tail()
    check_ranks_agree(run, kind, 1, life)
    account = run.status()["learners"][1]
    assert account["tokens_merged"] > 0


# Of a checkpoint that the processes of a learner save together.
CHECKPOINT = {
    "ddp": {"model.safetensors", "optimizer.pt"},
    "fsdp2": {"pytorch_model_fsdp.bin", "optimizer.bin"},
    "zero3": {"latest", "zero_to_fp32.py"},
}


@pytest.mark.parametrize("kind", list(CHECKPOINT))
def test_sigterm_to_one_rank(start_run: Any, kind: str) -> None:
    """All ranks drain at the same step, save together, and end with 0."""
    skip_without_deepspeed(kind)
    run = start_run(num_fragments=4, sync_every=4)
    learner = start_learner(run, 0, kind, max_steps=100_000, step_seconds=0.2)
    wait_until(lambda: len(run.rounds()) >= 4, "merges", SECONDS)
    ranks_of(learner)[1].terminate()  # rank 0, which has the link, knows of it by the others only
    assert learner.wait(60) == 0, learner.tail()
    check_ranks_agree(run, kind, 0)
    (checkpoint,) = (run.path / "out" / "learner-0").glob("checkpoint-*")
    files = {path.name for path in checkpoint.iterdir()}
    assert {*CHECKPOINT[kind], "trainer_state.json", "rng_state_0.pth", "rng_state_1.pth"} <= files, files
    assert f"checkpoint-{diary(run, kind, 0, 0)[-1]['step']}" == checkpoint.name
    (leave,) = [line for line in run.tape() if line["kind"] == "leave"]
    assert "told to stop" in leave["reason"]
    account = run.status()["learners"][0]
    assert account["tokens_merged"] == account["tokens_trained"] > 0
