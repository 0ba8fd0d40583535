"""Each kind of fault once, done to real processes, and what must come of it; then the books, which must balance."""

from __future__ import annotations

import copy
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import wait_until

from hf_diloco.chaos import census
from hf_diloco.chaos.accounting import Books, keep_books, read_witness
from hf_diloco.chaos.clock import can_jump
from hf_diloco.chaos.experiment import TRAIN_SMALL
from hf_diloco.chaos.faults import Fault, Victim
from hf_diloco.chaos.inject import Happening, Injector
from hf_diloco.chaos.run import ChaosRun
from hf_diloco.syncer.checkpoint import checkpoint_paths

pytestmark = [pytest.mark.distributed, pytest.mark.alone]

LONG_SECONDS = 60.0  # a fault that the test ends itself, when it has seen what it waits for
SETTINGS = ["--num-fragments", "6", "--sync-every", "6", "--link-timeout-seconds", "5"]


class Scene:
    """A run under way, the faults done to it, and what to wait for."""

    def __init__(self, run: ChaosRun) -> None:
        self.run, self.injector = run, Injector(run)

    def until(self, condition: Callable[[], Any], what: str, seconds: float = 90.0) -> Any:
        def look() -> Any:
            self.run.tick()
            self.injector.tick()
            for life in self.run.lives:
                assert not life.exit_code or life.exit_code < 0, self.run.tail(life.learner_id)
            return condition()

        return wait_until(look, what, seconds)

    def do(self, kind: str, part: str, learner_id: int | None = None, seconds: float = 0.0, seed: int = 1) -> Happening:
        victim = Victim(part=part, learner_id=learner_id, rank=0 if part == "rank" else None)
        happening = self.injector.begin(Fault(kind=kind, victim=victim, at_seconds=0, seconds=seconds, seed=seed))
        assert not happening.missed, f"{happening.fault} hit nobody"
        return happening

    def until_over(self, happening: Happening) -> None:
        self.until(lambda: happening.ended_at is not None, f"the end of {happening.fault}")

    def until_merged(self, *learner_ids: int, count: int = 1) -> None:
        """Until each of these is in ``count`` rounds that are not on the tape yet."""
        start = len(self.run.rounds())
        for learner_id in learner_ids:
            self.until(
                lambda who=learner_id: sum(who in ids(line) for line in self.run.rounds()[start:]) >= count,
                f"merges of learner {learner_id}",
            )

    def until_line(self, start: int, kind: str, learner_id: int) -> dict[str, Any]:
        """The first line of this kind and learner on the tape from ``start`` on."""
        return self.until(
            lambda: next(
                (line for line in self.run.tape()[start:] if line["kind"] == kind and line["learner_id"] == learner_id),
                None,
            ),
            f"a {kind} of learner {learner_id}",
        )

    def incarnations(self, learner_id: int) -> list[str]:
        joins = (line for line in self.run.tape() if line["kind"] == "join" and line["learner_id"] == learner_id)
        return list(dict.fromkeys(line["incarnation"] for line in joins))

    def pid(self, part: str, learner_id: int) -> int | None:
        everybody = self.run.processes()
        if part == "gateway":
            gateway = census.gateway_of(everybody, learner_id)
            return gateway.pid if gateway else None
        return next((one.pid for one in census.of_learner(everybody, learner_id) if one.part == part), None)

    def books(self) -> Books:
        witnesses = {who: read_witness(self.run.witness(who)) for who in range(self.run.num_learners)}
        return keep_books(self.run.tape(), witnesses)


def ids(line: dict[str, Any]) -> set[int]:
    return {participant["learner_id"] for participant in line["participants"]}


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Callable[..., Scene]]:
    """Starts a run of two learners and waits until both are merged."""
    runs: list[ChaosRun] = []

    def start(*settings: str, clocks: bool = False) -> Scene:
        script = [str(TRAIN_SMALL), "--output_dir", str(tmp_path / "out"), "--max_steps", "4000"]
        run = ChaosRun(
            tmp_path / "run", [*script, "--step_seconds", "0.2"], 2,
            ["--expected-learners", "2", *SETTINGS, *settings], clocks=clocks,
        )  # fmt: skip
        run.__enter__()
        runs.append(run)
        run.start()
        begun = Scene(run)
        begun.until(lambda: any(ids(line) == {0, 1} for line in run.rounds()), "merges of both learners")
        return begun

    yield start
    for run in runs:
        run.__exit__(None, None, None)
        assert not run.processes()


def check_books(scene: Scene) -> None:
    """What was merged and what was not is what was trained, exactly."""
    books = scene.books()
    assert books.errors == []
    assert books.trained == pytest.approx(books.merged + books.overwritten + books.lost + books.held)
    assert books.merged > 0


def check_tampering(scene: Scene) -> None:
    """Changed in the least way, the tape of a real run no longer agrees with what its learners saw."""
    tape = scene.run.tape()
    witnesses = {who: read_witness(scene.run.witness(who)) for who in range(scene.run.num_learners)}
    number = next(number for number, line in enumerate(tape) if line["kind"] == "round")
    for change in ({"tokens": 1}, {"steps": 1}):
        tampered = copy.deepcopy(tape)
        participant = tampered[number]["participants"][0]
        for name, more in change.items():
            participant[name] += more
        assert keep_books(tampered, witnesses).errors, change
    assert keep_books(tape[:number] + tape[number + 1 :], witnesses).errors, "a merge less"
    again = {**tape[number], "version": [99, 99]}
    assert keep_books([*tape, again], witnesses).errors, "a merge more"


@pytest.mark.long
def test_networks_fail(scene: Callable[..., Scene]) -> None:
    """Learner 1's network; learner 0 is merged all the time, learner 1 comes back by itself."""
    here = scene()
    check_that_nobody_reaches_it(here.run, 1)
    for kind in ("cut", "one_way"):
        start = len(here.run.tape())
        here.do(kind, "learner", 1, seconds=LONG_SECONDS)
        here.until_line(start, "leave", 1)
        here.until_merged(0, count=3)
        here.injector.end_all()
        here.until_merged(1)
    before = num_joins(here)
    slow = here.do("slow", "learner", 1, seconds=5)
    here.until_merged(0)
    here.until_over(slow)
    here.until_merged(0, 1)
    assert num_joins(here) == before, "slow is not dead"
    for kind in ("reset", "drop"):
        start = len(here.run.tape())
        here.do(kind, "learner", 1)
        here.until_line(start, "join", 1)
        here.until_merged(0, 1)
    assert [len(here.incarnations(who)) for who in (0, 1)] == [1, 1], "no process was lost"
    check_books(here)


def check_that_nobody_reaches_it(run: ChaosRun, learner_id: int) -> None:
    """A learner in a network of its own can only call out, and only the syncer."""
    everybody = run.processes()
    courier = next(one for one in census.of_learner(everybody, learner_id) if one.part == "courier")
    outside = {port for one in everybody if one.part == "gateway" for port in census.holdings(one.pid).listening}
    own = census.holdings(courier.pid).listening - outside  # at a gateway's port there is, outside, the gateway
    assert own
    for port in own:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), 5)
    assert Path(f"/proc/{courier.pid}/net/route").read_text().count("\n") == 1, "there is a way out"


def num_joins(scene: Scene) -> int:
    return sum(line["kind"] == "join" for line in scene.run.tape())


def do_and_relink(scene: Scene, kind: str, part: str) -> None:
    """A fault to learner 1's courier or gateway: another one takes its place, and the learner is merged again."""
    start, before = len(scene.run.tape()), scene.pid(part, 1)
    scene.do(kind, part, 1, seconds=LONG_SECONDS if kind == "stop" else 0.0)
    scene.until_line(start, "join", 1)
    scene.until(lambda: scene.pid(part, 1) not in (None, before), f"another {part}")
    scene.until_merged(0, 1)
    scene.injector.end_all()


@pytest.mark.long
def test_processes_fail(scene: Callable[..., Scene]) -> None:
    """Courier, gateway, door: a new link at once. A learner: started again, and merged again."""
    here = scene()
    for part in ("courier", "gateway"):
        do_and_relink(here, "kill", part)
    start = len(here.run.tape())
    here.do("kill", "door")
    for learner_id in (0, 1):
        here.until_line(start, "join", learner_id)
    here.until_merged(0, 1)
    assert [len(here.incarnations(who)) for who in (0, 1)] == [1, 1], "no trainer was lost"
    here.do("kill", "learner", 1)
    here.until(lambda: len(here.incarnations(1)) == 2, "learner 1 to be started again and to join")
    here.until_merged(0, 1)
    check_books(here)
    check_tampering(here)
    codes = [life.exit_code for life in here.run.lives if life.exit_code is not None]
    assert codes == [-signal.SIGKILL]


@pytest.mark.long
def test_processes_hang(scene: Callable[..., Scene]) -> None:
    """What is stopped is replaced after the time-out, or comes back with all it had; one rank is a learner's end."""
    here = scene()
    for part in ("courier", "gateway"):
        do_and_relink(here, "stop", part)
    start = len(here.run.tape())
    here.do("stop", "learner", 1, seconds=LONG_SECONDS)
    here.until_line(start, "leave", 1)
    here.until_merged(0, count=3)
    here.injector.end_all()
    here.until_merged(1)
    assert [len(here.incarnations(who)) for who in (0, 1)] == [1, 1], "no trainer was lost"
    here.do("kill", "rank", 0)  # which, where a learner has one process, is its trainer
    here.until(lambda: len(here.incarnations(0)) == 2, "learner 0 to be started again and to join")
    here.until_merged(0, 1)
    check_books(here)


@pytest.mark.long
def test_ports_get_garbage_and_clocks_jump(scene: Callable[..., Scene]) -> None:
    here = scene(clocks=can_jump())
    syncer = here.run.process(None)
    for part, learner_id in (("door", None), ("gateway", 1), ("courier", 1)):
        here.until_over(here.do("garbage", part, learner_id, seconds=2))
        here.until_merged(0, 1)
    if can_jump():
        before = num_joins(here)
        for seed in (5, 1):  # forward, back
            here.until_over(here.do("clock_jump", "learner", 1, seconds=2, seed=seed))
            here.until_merged(0, 1)
        assert num_joins(here) == before, "links do not look at the wall clock"
    assert here.run.process(None) == syncer
    assert [len(here.incarnations(who)) for who in (0, 1)] == [1, 1], "no trainer was lost"
    check_books(here)


@pytest.mark.long
def test_the_syncer_fails(scene: Callable[..., Scene]) -> None:
    """It is killed, stopped, has no room on its disk, and finds its newest checkpoint broken; learners train on."""
    here = scene("--checkpoint-every-seconds", "2")
    here.do("kill", "syncer")
    here.until_merged(0, 1)
    here.until_over(here.do("stop", "syncer", seconds=8))  # longer than the time-out of links
    here.until_merged(0, 1)

    full = here.do("disk_full", "syncer", seconds=4)
    num_lines = len(here.run.tape())
    here.until_over(full)
    assert len(here.run.tape()) == num_lines
    here.until_merged(0, 1)
    assert "cannot be written" in here.run.log(None).read_text()

    here.until(lambda: len(checkpoint_paths(here.run.directory.checkpoints)) > 1, "two checkpoints")
    broken = here.do("broken_checkpoint", "syncer")
    here.until_merged(0, 1)
    assert f"{broken.detail} is broken" in here.run.log(None).read_text()
    num_kills = 2
    assert sum(line["kind"] == "start" for line in here.run.tape()) == 1 + num_kills
    assert [len(here.incarnations(who)) for who in (0, 1)] == [1, 1], "no trainer was lost"
    check_books(here)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_storm_of_two_minutes(tmp_path: Path) -> None:
    """`hf-diloco chaos`, seed and all: nothing lost but what went with killed processes, nothing left behind."""
    path = tmp_path / "chaos"
    command = [
        sys.executable,
        "-m",
        "hf_diloco.cli.main",
        "chaos",
        "--minutes",
        "2",
        "--every-seconds",
        "8",
    ]  # every kind once
    command += ["--seed", "183", "--no-compare", "--run-dir", str(path)]
    began_at = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    report = json.loads((path / "report.json").read_text())
    assert report["problems"] == [], done.stdout[-4000:]
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert len({(fault["kind"], fault["victim"].split()[0]) for fault in report["faults"]}) >= 15
    tokens = report["tokens"]
    parts = tokens["merged"] + tokens["overwritten"] + tokens["lost"] + tokens["held"]
    assert tokens["trained"] == pytest.approx(parts)
    assert report["gaps"]["max"] <= 12
    assert report["eval_loss"] < 4
    assert "Every token is accounted for" in done.stdout
    assert time.monotonic() - began_at > 120
