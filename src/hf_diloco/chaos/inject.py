"""Does faults to a run, and undoes them."""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from hf_diloco.chaos import census, clock
from hf_diloco.chaos.faults import Fault
from hf_diloco.chaos.proxy import DOWN, Weather
from hf_diloco.chaos.run import ChaosRun
from hf_diloco.syncer.checkpoint import checkpoint_paths

_SLOW = Weather(bytes_per_second=50_000.0, delay_seconds=0.2, jitter_seconds=0.3)
_DROPPED_BYTES = 3000
_MOST_SECONDS_OFF = 86_400


@dataclass
class Happening:
    """A fault that was done; times are of the monotonic clock."""

    fault: Fault
    began_at: float
    ended_at: float | None  # when it was undone, or, if there is nothing to undo, when it was done
    detail: str  # what exactly was hit
    missed: bool = False  # there was nobody to hit


class Injector:
    """Does faults to one run.

    Args:
        run: its processes are the victims.
    """

    def __init__(self, run: ChaosRun) -> None:
        self.happened: list[Happening] = []
        self._run = run
        self._undo: dict[int, Callable[[], None]] = {}  # by place in `happened`
        self._stopped: dict[int, list[census.Process]] = {}
        self._full: dict[int, tuple[census.Process, tuple[int, int]]] = {}  # and its limit of before

    def begin(self, fault: Fault) -> Happening:
        """Do it. It is undone by :meth:`tick` when its time is over, or by :meth:`end_all`."""
        number = len(self.happened)
        began_at = time.monotonic()
        detail, undo = self._do(fault, number)
        happening = Happening(fault, began_at, None if undo else time.monotonic(), detail or "nobody there")
        happening.missed = not detail
        self.happened.append(happening)
        if undo:
            self._undo[number] = undo
        return happening

    def tick(self) -> list[Happening]:
        """Undo what has lasted long enough; returns that."""
        now = time.monotonic()
        over = [
            number
            for number in self._undo
            if now >= self.happened[number].began_at + self.happened[number].fault.seconds
        ]
        return [self._end(number) for number in over]

    def end_all(self) -> None:
        """Undo all that is still going on."""
        for number in list(self._undo):
            self._end(number)

    def active(self) -> list[Happening]:
        """What is going on."""
        return [self.happened[number] for number in self._undo]

    def _end(self, number: int) -> Happening:
        self._undo.pop(number)()
        happening = self.happened[number]
        happening.ended_at = time.monotonic()
        return happening

    # ----------------------------------------------------------------------------------------------- one kind at a time

    def _do(self, fault: Fault, number: int) -> tuple[str, Callable[[], None] | None]:
        """What was hit (empty: nobody was there), and how to undo it."""
        return getattr(self, f"_{fault.kind}")(fault, number)  # type: ignore[no-any-return]

    def victims(self, fault: Fault) -> list[census.Process]:
        """The processes that the fault's victim is made of, now."""
        victim, everybody = fault.victim, self._run.processes()
        if victim.part == "syncer":
            return [one for one in [self._run.process(None)] if one]
        if victim.part == "door":
            return [one for one in everybody if one.part == "door"]
        assert victim.learner_id is not None
        if victim.part == "gateway":
            gateway = census.gateway_of(everybody, victim.learner_id)
            return [gateway] if gateway else []
        if victim.part == "courier":
            return [one for one in census.of_learner(everybody, victim.learner_id) if one.part == "courier"]
        if victim.part in ("trainer", "rank"):
            training = census.trainers(everybody, victim.learner_id)
            return [one for one in training if victim.part == "trainer" or (one.rank or 0) == victim.rank]
        return census.of_learner(everybody, victim.learner_id)

    def _kill(self, fault: Fault, _number: int) -> tuple[str, None]:
        hit = [one for one in self.victims(fault) if one.signal(signal.SIGKILL)]
        return _shown(hit), None

    def _stop(self, fault: Fault, number: int) -> tuple[str, Callable[[], None] | None]:
        hit = [one for one in self.victims(fault) if one.signal(signal.SIGSTOP)]
        if not hit:
            return "", None
        self._stopped[number] = hit

        def go_on() -> None:
            mine = self._stopped.pop(number)
            others = {one for stopped in self._stopped.values() for one in stopped}
            for one in mine:
                if one not in others:
                    one.signal(signal.SIGCONT)

        return _shown(hit), go_on

    def _weather(self, fault: Fault, number: int, weather: Weather) -> tuple[str, Callable[[], None]]:
        learner_id = _learner_id(fault)
        self._run.proxy.begin(learner_id, number, weather)
        return f"the network of learner {learner_id}", lambda: self._run.proxy.end(learner_id, number)

    def _cut(self, fault: Fault, number: int) -> tuple[str, Callable[[], None]]:
        return self._weather(fault, number, Weather(silent=True))

    def _one_way(self, fault: Fault, number: int) -> tuple[str, Callable[[], None]]:
        return self._weather(fault, number, Weather(silent=True, directions=(DOWN,)))

    def _slow(self, fault: Fault, number: int) -> tuple[str, Callable[[], None]]:
        return self._weather(fault, number, _SLOW)

    def _reset(self, fault: Fault, _number: int) -> tuple[str, None]:
        num_connections = self._run.proxy.reset(_learner_id(fault))
        return f"{num_connections} connections" if num_connections else "", None

    def _drop(self, fault: Fault, _number: int) -> tuple[str, None]:
        num_connections = self._run.proxy.drop(_learner_id(fault), _DROPPED_BYTES)
        return f"{_DROPPED_BYTES} bytes each way of {num_connections} connections" if num_connections else "", None

    def _garbage(self, fault: Fault, _number: int) -> tuple[str, Callable[[], None] | None]:
        target = next(
            ((one, min(ports)) for one in self.victims(fault) if (ports := census.holdings(one.pid).listening)), None
        )
        if target is None:
            return "", None
        one, port = target
        command = [sys.executable, "-m", "hf_diloco.chaos.garbage", str(one.pid), str(port), str(fault.seed)]
        thrower = subprocess.Popen(command, stdin=subprocess.DEVNULL)

        def end() -> None:
            thrower.kill()
            thrower.wait()

        return f"port {port} of {one.part} (pid {one.pid})", end

    def _disk_full(self, fault: Fault, number: int) -> tuple[str, Callable[[], None] | None]:
        hit = self.victims(fault)
        if not hit:
            return "", None
        one = hit[0]
        others = [limits for other, limits in self._full.values() if other == one]
        soft, hard = others[0] if others else resource.prlimit(one.pid, resource.RLIMIT_FSIZE)
        self._full[number] = one, (soft, hard)
        size = self._run.directory.tape.stat().st_size  # not 0: memory regions, which a full disk spares, count too
        resource.prlimit(one.pid, resource.RLIMIT_FSIZE, (size, hard))

        def make_room() -> None:
            del self._full[number]
            if one.signal(0) and all(other != one for other, _ in self._full.values()):
                resource.prlimit(one.pid, resource.RLIMIT_FSIZE, (soft, hard))

        return _shown(hit[:1]), make_room

    def _broken_checkpoint(self, fault: Fault, _number: int) -> tuple[str, None]:
        hit = [one for one in self.victims(fault) if one.signal(signal.SIGSTOP)]  # it shall not write another one now
        paths = checkpoint_paths(self._run.directory.checkpoints)
        if len(paths) < 2 or not hit:  # with one only, there would be nothing to fall back to
            for one in hit:
                one.signal(signal.SIGCONT)
            return "", None
        file = max(paths[-1].glob("*.safetensors"), key=lambda path: path.stat().st_size)
        flip_a_bit(file, fault.seed)
        for one in hit:
            one.signal(signal.SIGKILL)
        return f"{paths[-1].name}/{file.name}", None

    def _clock_jump(self, fault: Fault, _number: int) -> tuple[str, Callable[[], None]]:
        seconds = random.Random(fault.seed).randint(-_MOST_SECONDS_OFF, _MOST_SECONDS_OFF)
        path = self._run.clock(fault.victim.learner_id)
        clock.set_off(path, seconds)
        return f"{seconds:+d} s", lambda: clock.set_off(path, 0)


def flip_a_bit(path: os.PathLike[str], seed: int) -> int:
    """Flip one bit of a file in place; the offset of its byte."""
    generator = random.Random(seed)
    with open(path, "r+b") as file:
        offset = generator.randrange(os.fstat(file.fileno()).st_size)
        file.seek(offset)
        byte = file.read(1)[0] ^ (1 << generator.randrange(8))
        file.seek(offset)
        file.write(bytes([byte]))
    return offset


def _learner_id(fault: Fault) -> int:
    assert fault.victim.learner_id is not None
    return fault.victim.learner_id


def _shown(hit: list[census.Process]) -> str:
    return ", ".join(f"{one.part} pid {one.pid}" for one in hit)
