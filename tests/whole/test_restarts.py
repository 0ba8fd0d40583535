"""The syncer dies in mid-run and a new one goes on from its run directory; learners train on and need no restart."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process_world import SECONDS, World, make_model, parameters, train

from hf_diloco import SyncerConfig
from hf_diloco.core.messages import Version
from hf_diloco.errors import LearnerRefusedError
from hf_diloco.links.in_process import Weather
from hf_diloco.syncer.run_directory import RunDirectory
from hf_diloco.syncer.saved_run import latest_run, put_newer_aside
from hf_diloco.syncer.service import Syncer
from hf_diloco.syncer.tape import read_tape

pytestmark = pytest.mark.fast


class DyingSyncer(Syncer):
    """One whose process ends between two events: nothing is written, nobody is told, links just end."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.dies = threading.Event()

    def _on_link_event(self, event: Any) -> None:
        if self.dies.is_set():
            raise SystemExit
        super()._on_link_event(event)

    def _write_status(self) -> None:
        if self.dies.is_set():
            raise SystemExit
        super()._write_status()


class RestartWorld(World):
    """A world whose syncer can be killed and started again; between the two, learners are alone."""

    def __init__(self, path: Path, *, seed: int | None = None, weather: Weather | None = None, **settings: Any) -> None:
        super().__init__(path, seed=seed, weather=weather, syncer_class=DyingSyncer, **settings)
        self.settings = settings

    def kill_syncer(self) -> None:
        assert isinstance(self.syncer, DyingSyncer)
        self.syncer.dies.set()
        self.syncer_thread.join(SECONDS)
        assert not self.syncer_thread.is_alive()
        for thread in threading.enumerate():  # a process that dies takes its threads along
            if thread.name == "hf-diloco checkpoint":
                thread.join(SECONDS)

    def restart_syncer(self) -> None:
        self.syncer = DyingSyncer(SyncerConfig(**self.settings), self.hub, self.directory)
        self.syncer_thread = self.start(self.syncer.run)


def wait_for_merges(world: World, count: int) -> None:
    deadline = threading.Event()
    for _ in range(int(SECONDS / 0.005)):
        if len([line for line in read_tape(world.directory.tape) if line["kind"] == "round"]) >= count:
            return
        deadline.wait(0.005)
    raise AssertionError(f"there were no {count} merges")


def check_tape(world: World) -> None:
    """Versions only grow, nothing is merged twice into what the run went on from, and the digests agree."""
    made: dict[int, dict[tuple[int, int], tuple[str, list[str]]]] = {}
    for line in read_tape(world.directory.tape):
        if line["kind"] == "values":
            made = {index: {(1, 0): (digest, [])} for index, digest in enumerate(line["digests"])}
        elif line["kind"] == "round":
            chain = made[line["fragment_index"]]
            version = tuple(line["version"])
            assert version > max(chain), line
            chain[version] = (line["digest"], [who["update_id"] for who in line["participants"]])
        elif line["kind"] == "recovered":
            for index, fragment in enumerate(line["fragments"]):
                chain = made[index]
                adopted = tuple(fragment["adopted"])
                assert fragment["digest"] == chain[adopted][0], line
                for version in [version for version in chain if version > adopted]:
                    del chain[version]
                chain[line["incarnation"], adopted[1]] = (fragment["digest"], [])
    for chain in made.values():
        merged = [update_id for _, updates in chain.values() for update_id in updates]
        assert len(merged) == len(set(merged)), "an update was merged twice"


def test_a_syncer_that_is_stopped_before_its_learners_are_back_leaves_all_as_it_was(tmp_path: Path) -> None:
    """What they have merged since the checkpoint is not lost by it."""
    world = RestartWorld(
        tmp_path, expected_learners=1, num_fragments=2, sync_every=4, checkpoint_every_seconds=1000.0, outer_lr=1.0,
        outer_momentum=0.0, wire_format="fp32",
    )  # fmt: skip
    world.start(train, world, 0, steps=1000, pace_seconds=0.004)
    wait_for_merges(world, 10)
    world.kill_syncer()
    world.hub.cut(0)
    before = latest_run(world.directory)
    world.restart_syncer()
    world.syncer.stop()
    world.syncer_thread.join(SECONDS)
    assert not world.syncer.has_model
    after = latest_run(world.directory)
    assert before is not None
    assert after is not None
    assert after.checkpoint.path == before.checkpoint.path
    world.hub.heal(0)
    world.restart_syncer()
    world.join()
    check_tape(world)
    assert sum(line["num_handed_back"] for line in world.tape("recovered")) == 2
    account = world.accounts()[0]
    assert account["tokens_merged"] == account["tokens_trained"] > 0


@pytest.mark.parametrize("on_arrival", ["carry", "overwrite"])
@pytest.mark.parametrize("seed", range(3))
def test_a_killed_syncer_goes_on(tmp_path: Path, on_arrival: str, seed: int) -> None:
    world = RestartWorld(
        tmp_path, seed=seed, expected_learners=2, num_fragments=3, sync_every=3, on_arrival=on_arrival,
        checkpoint_every_seconds=0.05 if seed else 1000.0,
    )  # fmt: skip
    for learner_id in (0, 1):
        world.start(train, world, learner_id, steps=200)
    for kill in range(3):
        wait_for_merges(world, 15 * (kill + 1) + seed)
        world.kill_syncer()
        world.restart_syncer()
    world.join()
    check_tape(world)
    recovered = world.tape("recovered")
    assert [line["incarnation"] for line in recovered] == [2, 3, 4]
    assert torch.equal(parameters(world.models[0]), parameters(world.models[1]))
    values, _, _ = world.syncer.model()
    assert all(torch.equal(values[name], value) for name, value in world.models[0].named_parameters())
    if not seed:  # with the one checkpoint of the beginning, all that was merged comes back from the learners
        assert all(line["num_handed_back"] > 0 for line in recovered)
    if on_arrival == "carry":
        for row in world.accounts().values():
            assert row["tokens_merged"] + row["tokens_overwritten"] == pytest.approx(row["tokens_trained"], abs=1), row


@pytest.mark.parametrize("checkpoint_every_seconds", [0.05, 1000.0])
def test_a_syncer_that_was_restarted_still_knows_what_is_absurd(
    tmp_path: Path, checkpoint_every_seconds: float
) -> None:
    """From its checkpoint, or from what the tape says of the merges after that."""
    world = RestartWorld(
        tmp_path, expected_learners=2, num_fragments=2, sync_every=4, checkpoint_every_seconds=checkpoint_every_seconds
    )
    restarted, poisoned = threading.Event(), threading.Event()

    def poison() -> None:
        if restarted.is_set() and not poisoned.is_set():
            poisoned.set()
            with torch.no_grad():
                for parameter in world.models[1].parameters():
                    parameter.mul_(1e6)

    def largest_norm() -> float:
        return max(update["norm"] for line in world.tape("round") for update in line["participants"])

    world.start(train, world, 0, steps=10_000, ends=False)
    world.start(train, world, 1, steps=10_000, ends=False, at=dict.fromkeys(range(1, 10_000), poison))
    wait_for_merges(world, 30)
    world.kill_syncer()
    world.restart_syncer()
    restarted.set()
    while not world.tape("refusal") and largest_norm() < 1e3:
        threading.Event().wait(0.005)
    world.syncer.stop()
    world.join()
    assert "times the usual" in world.tape("refusal")[0]["reason"]
    assert largest_norm() < 1e3


def test_what_nobody_had_applied_is_merged_again(tmp_path: Path) -> None:
    """The syncer dies after a merge is on the tape, before anybody has it: its updates are still in the learners."""
    world = RestartWorld(tmp_path, expected_learners=1, num_fragments=2, sync_every=4, checkpoint_every_seconds=1000.0)
    send = world.hub.send
    lost = threading.Event()

    def die_before_publishing(learner_ids: list[int], message: Any, payload: Any = None) -> None:
        is_merge = type(message).__name__ == "Publication" and message.version.outer_step >= 8
        if is_merge and not lost.is_set():
            lost.set()
            world.syncer.dies.set()  # type: ignore[attr-defined]
            raise SystemExit
        send(learner_ids, message, payload)

    world.hub.send = die_before_publishing  # type: ignore[method-assign]
    world.start(train, world, 0, steps=60)
    assert lost.wait(SECONDS)
    world.kill_syncer()
    void = world.tape("round")[-1]
    world.restart_syncer()
    world.join()
    (recovered,) = world.tape("recovered")
    assert recovered["fragments"][void["fragment_index"]]["adopted"] < void["version"]
    check_tape(world)
    row = world.accounts()[0]
    assert row["tokens_merged"] == row["tokens_trained"] > 0


def test_a_value_newer_than_what_was_recovered_is_given_up(tmp_path: Path) -> None:
    """A learner that was cut off all the time comes back too late: it gets the run's values, with its own progress."""
    world = RestartWorld(tmp_path, expected_learners=2, num_fragments=2, sync_every=4, checkpoint_every_seconds=1000.0)
    for learner_id in (0, 1):
        world.start(train, world, learner_id, steps=1500, pace_seconds=0.004)
    wait_for_merges(world, 10)
    world.hub.cut(0)  # learner 1 alone has what is merged from now on
    count = len(world.tape("round"))
    wait_for_merges(world, count + 6)
    world.kill_syncer()
    world.hub.cut(1)
    world.hub.heal(0)
    world.restart_syncer()
    for _ in range(int(SECONDS / 0.05)):
        if world.tape("recovered"):
            break
        threading.Event().wait(0.05)
    count = len(world.tape("round"))
    wait_for_merges(world, count + 6)
    world.hub.heal(1)
    count = len(world.tape("round"))
    for _ in range(int(SECONDS / 0.05)):
        if any(len(line["participants"]) == 2 for line in world.tape("round")[count:]):
            break
        threading.Event().wait(0.05)
    else:
        raise AssertionError("the learner that came late was not merged again")
    world.join()
    check_tape(world)
    # Each did far more than 4 H steps while it could not be merged, the first also while the syncer waited for another.
    assert [row["tokens_overwritten"] for row in world.accounts().values()] == [0, 0]


def test_a_run_that_has_ended_is_not_begun_again(tmp_path: Path) -> None:
    world = World(tmp_path, num_fragments=2, sync_every=4)
    world.start(train, world, 0)
    world.join()
    assert Syncer(SyncerConfig(num_fragments=2), world.hub, world.directory).has_ended


def test_a_run_that_has_ended_hands_its_values_out_if_it_is_started_again_for_that(tmp_path: Path) -> None:
    world = World(tmp_path, num_fragments=2, sync_every=4)
    world.start(train, world, 0)
    world.join()
    num_merges = len(world.tape("round"))
    config = SyncerConfig(num_fragments=2, sync_every=4, linger_seconds=SECONDS)
    world.syncer = Syncer(config, world.hub, world.directory)
    served = world.start(world.syncer.run)
    late = world.learner(1, model=make_model(width=8))
    assert late.join()
    assert not late.step(tokens=8), "there is nothing to train for"
    assert late.finish()
    assert torch.equal(parameters(world.models[1]), parameters(world.models[0]))
    assert served.is_alive(), "others may come"
    world.syncer.stop()
    world.join()
    assert len(world.tape("round")) == num_merges
    assert world.tape("finish")[-1]["stopped"] is False
    assert world.syncer.status()["state"] == "finished"


def test_a_stopped_run_goes_on_with_new_processes(tmp_path: Path) -> None:
    world = RestartWorld(tmp_path, num_fragments=2, sync_every=4)
    first = world.learner(0, steps=60)
    first.join()
    for _ in range(20):
        threading.Event().wait(0.003)
        first.step(tokens=1)
    wait_for_merges(world, 2)
    first.close()
    world.syncer.stop()
    world.syncer_thread.join(SECONDS)
    step = latest_run(world.directory).facts.outer_step
    world.restart_syncer()
    second = world.learner(0, model=make_model(), steps=60)
    second.join()
    assert second.global_step >= step > 0
    assert all(local.version >= Version(2, 0) for local in second._exchange.fragments)
    second.close()
    world.syncer.stop()
    world.join()


def test_a_syncer_that_lost_its_checkpoints_refuses_learners_in_training(tmp_path: Path) -> None:
    world = RestartWorld(tmp_path, num_fragments=2, sync_every=4)
    learner = world.learner(0, steps=10_000)
    learner.join()
    world.kill_syncer()
    shutil.rmtree(world.directory.checkpoints)
    world.restart_syncer()

    def train_on() -> None:
        for _ in range(int(SECONDS / 0.005)):
            threading.Event().wait(0.005)
            learner.step(tokens=1)

    with pytest.raises(LearnerRefusedError, match="no checkpoint to go on from"):
        train_on()
    learner.close()
    world.syncer.stop()
    world.join()


def test_what_is_newer_than_what_is_gone_back_to_is_put_aside(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    for kind in (directory.checkpoints, directory.joint):
        for step in (20, 40, 60):
            (kind / f"step-{step:08d}").mkdir(parents=True)
    put_newer_aside(directory, 40)
    for kind in (directory.checkpoints, directory.joint):
        assert sorted(path.name for path in kind.iterdir()) == ["step-00000020", "step-00000040"]
        (aside,) = (tmp_path / "gone-back" / kind.name).iterdir()
        assert aside.name.startswith("step-00000060-")
