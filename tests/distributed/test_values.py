"""What learners hold is, bit for bit, what the syncer published; and one learner alone is plain training."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import Run, start_script, wait_until

from hf_diloco.learner.data import data_seed
from hf_diloco.syncer.run_directory import RunDirectory
from hf_diloco.syncer.saved_run import latest_run

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize(
    ("wire_format", "on_arrival"),
    [
        ("int4", "carry"),
        pytest.param("fp32", "overwrite", marks=pytest.mark.long),
        pytest.param("fp32", "carry", marks=pytest.mark.long),
        pytest.param("bf16", "carry", marks=pytest.mark.long),
        pytest.param("int8", "overwrite", marks=pytest.mark.long),
    ],
)
def test_digests_agree_at_every_version(start_run: Any, wire_format: str, on_arrival: str) -> None:
    """Also at a learner that was stopped and missed versions, and at one that was killed and came back."""
    settings = {"wire_format": wire_format, "on_arrival": on_arrival, "num_fragments": 4, "sync_every": 4}
    run = start_run(expected_learners=2, **settings)
    pace = {"step_seconds": 0.1, "max_steps": 4000}  # it goes on until all has happened
    for learner_id in (0, 1):
        run.start_learner(learner_id, **pace)
    run.wait_for_rounds(10, lambda line: len(line["participants"]) == 2, "merges of both learners")

    run.learners[1].signal(signal.SIGSTOP)
    count = len(run.rounds())
    run.wait_for_rounds(count + 16, lambda line: True, "merges that the stopped learner misses")
    run.learners[1].signal(signal.SIGCONT)
    wait_until(lambda: has_missed_a_version(run.tape()), "it to go on from a version after those that it missed")
    count = len(run.rounds())
    wait_until(lambda: any(1 in incarnations(line) for line in run.rounds()[count:]), "it to be merged again")

    run.learners.pop(1).kill()
    (first_life,) = {incarnations(line)[1] for line in run.rounds() if 1 in incarnations(line)}
    run.start_learner(1, **pace)
    run.wait_for_rounds(
        8,
        lambda line: 1 in incarnations(line) and first_life not in incarnations(line).values(),
        "merges of the one that came back",
    )
    for learner in run.learners.values():
        learner.signal(signal.SIGTERM)
    for learner in run.learners.values():
        assert learner.wait() == 0, learner.tail()
    run.syncer.signal(signal.SIGTERM)
    run.syncer.wait()
    check_digests(run)


def incarnations(line: dict[str, Any]) -> dict[int, str]:
    """Of each learner in a round, which of its lives that was."""
    return {who["learner_id"]: who["update_id"].partition("/")[0] for who in line["participants"]}


def has_missed_a_version(tape: list[dict[str, Any]]) -> bool:
    """Learner 1, of which this is the first life, went on from a version after having missed one."""
    made: dict[int, list[list[int]]] = {}
    applied: dict[int, list[list[int]]] = {}
    for line in tape:
        if line["kind"] == "round":
            made.setdefault(line["fragment_index"], []).append(line["version"])
        elif line["kind"] == "applied" and line["learner_id"] == 1:
            applied.setdefault(line["fragment_index"], []).append(line["version"])
    return any(
        version not in taken and min(taken) < version < max(taken)
        for index, taken in applied.items()
        for version in made.get(index, [])
    )


def check_digests(run: Run) -> None:
    """Each learner hashed what it held when it had applied a version (fp32 with overwrite: what its model held)."""
    tape = run.tape()
    (initial,) = (line["digests"] for line in tape if line["kind"] == "values")
    published = {(index, (1, 0)): digest for index, digest in enumerate(initial)}
    for line in tape:
        if line["kind"] == "round":
            published[line["fragment_index"], tuple(line["version"])] = line["digest"]
    applied = [line for line in tape if line["kind"] == "applied"]
    for line in applied:
        assert line["digest"] == published[line["fragment_index"], tuple(line["version"])], line
    for learner_id in (0, 1):
        versions = {
            (line["fragment_index"], tuple(line["version"])) for line in applied if line["learner_id"] == learner_id
        }
        assert len(versions) >= 16, "too few publications reached this learner for the test to mean much"
    assert not [line for line in tape if line["kind"] == "refusal"]


def trained_alone(start_run: Any, tmp_path: Path, on_arrival: str) -> tuple[Run, float]:
    """How far one learner alone, over real links, ends from plain training, as a share of the way that went."""
    options = {"max_steps": 120, "hidden_size": 32, "learning_rate": 1e-3}
    plain = start_script(tmp_path, "plain", {}, order_seed=data_seed(1, 0), data_seed=0, **options)
    run = start_run(
        num_fragments=6, sync_every=24, outer_lr=1.0, outer_momentum=0.0, wire_format="fp32", on_arrival=on_arrival
    )
    learner = run.start_learner(0, **options)
    assert plain.wait() == 0, plain.tail()
    assert learner.wait() == 0, learner.tail()
    assert run.syncer.wait() == 0, run.syncer.tail()
    start = flat(torch.load(tmp_path / "plain.start.pt"))
    assert torch.equal(start, flat(torch.load(run.path / "learner-0.start.pt")))
    ours, theirs = flat(torch.load(run.path / "learner-0.pt")), flat(torch.load(tmp_path / "plain.pt"))
    return run, float((ours - theirs).norm() / (theirs - start).norm())


def flat(values: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([values[name].flatten().double() for name in sorted(values)])


def test_one_learner_alone_is_plain_training(start_run: Any, tmp_path: Path) -> None:
    run, distance = trained_alone(start_run, tmp_path, "carry")
    merges = [line["fragment_index"] for line in run.rounds()]
    assert min(merges.count(index) for index in range(6)) >= 3
    assert distance <= 1e-4
    saved = latest_run(RunDirectory(run.directory, create=False)).tensors()
    held = torch.load(run.path / "learner-0.pt")
    assert all(torch.equal(saved[name], held[name]) for name in saved)


@pytest.mark.long
def test_with_overwrite_it_is_not(start_run: Any, tmp_path: Path) -> None:
    """The control: the steps that overwriting loses are seen by the same comparison."""
    _, distance = trained_alone(start_run, tmp_path, "overwrite")
    assert distance > 1e-2
