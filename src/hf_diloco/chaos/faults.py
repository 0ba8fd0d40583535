"""Faults by name: what is done to whom, when, and for how long; and storms of them.

A fault's kind says what happens, its victim to whom. In text: ``kill:learner``, ``cut:learner 1``, ``stop:rank 1.0``.

kill               SIGKILL
stop               SIGSTOP, and SIGCONT when the time is over
cut                the learner's network is silent both ways: nothing is forwarded, nothing is closed
one_way            nothing that the syncer sends arrives at the learner; what the learner sends does
slow               a thin line: few bytes a second, long and uneven delays
reset              all connections of the learner are reset, in the middle of what they carry
drop               bytes vanish from the middle of a stream, in both directions
garbage            random bytes at the port of the door, of a gateway or of a courier
disk_full          the tape cannot grow (RLIMIT_FSIZE of the running syncer)
broken_checkpoint  one bit of the newest checkpoint is flipped, and the syncer killed so that it has to be read
clock_jump         the wall clock of all processes of the victim jumps, by up to a day either way, and back
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hf_diloco.errors import ConfigError

PARTS = ("learner", "trainer", "rank", "courier", "gateway", "door", "syncer")
NETWORK_KINDS = ("cut", "one_way", "slow", "reset", "drop")
INSTANT_KINDS = ("kill", "reset", "drop", "broken_checkpoint")  # nothing to end after a while
_QUIET_SECONDS = 10.0  # before a storm's first fault: what the run holds and does undisturbed is looked at then
_LONG_SECONDS = (10.0, 30.0)
_DURATIONS = {"garbage": (5.0, 15.0), "disk_full": (3.0, 8.0)}

# A storm draws from these, equally often.
STORM: tuple[tuple[str, str], ...] = (
    ("kill", "learner"), ("kill", "courier"), ("kill", "gateway"), ("kill", "door"), ("kill", "syncer"),
    ("stop", "learner"), ("stop", "courier"), ("stop", "gateway"), ("stop", "syncer"),
    ("cut", "learner"), ("one_way", "learner"), ("slow", "learner"), ("reset", "learner"), ("drop", "learner"),
    ("garbage", "door"), ("garbage", "gateway"), ("garbage", "courier"),
    ("clock_jump", "learner"), ("disk_full", "syncer"), ("broken_checkpoint", "syncer"),
)  # fmt: skip
# These can be asked for by name.
ALL: tuple[tuple[str, str], ...] = (
    *STORM,
    ("kill", "trainer"), ("kill", "rank"), ("stop", "trainer"), ("stop", "rank"), ("stop", "door"),
    ("clock_jump", "syncer"),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Victim:
    """Whom a fault hits."""

    part: str  # one of PARTS; "learner": all its processes, "trainer": the one that trains
    learner_id: int | None = None  # None: the door, the syncer
    rank: int | None = None  # of a "rank"

    def __str__(self) -> str:
        if self.learner_id is None:
            return self.part
        return f"{self.part} {self.learner_id}" + (f".{self.rank}" if self.rank is not None else "")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault. It comes ``at_seconds`` after training began, or when the run's outer step reaches ``at_step``."""

    kind: str
    victim: Victim
    at_seconds: float | None = None
    at_step: int | None = None
    seconds: float = 0.0  # how long it lasts; kinds that are over at once have 0
    seed: int = 0  # for what is random about it

    def __post_init__(self) -> None:
        if (self.kind, self.victim.part) not in ALL:
            raise ConfigError(f"there is no fault {self.kind}:{self.victim.part}; there are {', '.join(names(ALL))}.")

    def __str__(self) -> str:
        return f"{self.kind}:{self.victim}" + (f" for {self.seconds:.0f} s" if self.seconds else "")

    def is_due(self, seconds: float, outer_step: int) -> bool:
        """Whether its time has come."""
        by_time = self.at_seconds is not None and seconds >= self.at_seconds
        return by_time or (self.at_step is not None and outer_step >= self.at_step)


def names(kinds: Sequence[tuple[str, str]]) -> list[str]:
    """``kind:part`` of each."""
    return [f"{kind}:{part}" for kind, part in kinds]


def choose(words: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """The kinds that these words name: ``kill`` (all victims of a storm's kills) or ``kill:gateway``; none: a storm's.

    Raises:
        ConfigError: one of them names nothing.
    """
    chosen: list[tuple[str, str]] = []
    for word in words:
        kind, _, part = word.partition(":")
        among = ALL if part or all(kind != known for known, _ in STORM) else STORM
        found = [pair for pair in among if pair[0] == kind and part in ("", pair[1])]
        if not found:
            raise ConfigError(f"there is no fault {word!r}; there are {', '.join(names(ALL))}.")
        chosen += [pair for pair in found if pair not in chosen]
    return tuple(chosen) or STORM


def storm(
    seed: int,
    *,
    seconds: float,
    every_seconds: float,
    num_learners: int,
    kinds: Sequence[tuple[str, str]] = STORM,
) -> list[Fault]:
    """Faults at the times of a Poisson process; the same for the same arguments.

    Kinds come in shuffled rounds, so that each is as often as any other; learners are drawn evenly.

    Args:
        seed: of everything random.
        seconds: no fault begins after this, and none in the first ten.
        every_seconds: mean time between two.
        num_learners: learners 0 to this, exclusive.
        kinds: pairs of kind and victim's part.
    """
    generator = random.Random(seed)
    faults: list[Fault] = []
    bag = _shuffled_rounds(generator, kinds)
    now = _QUIET_SECONDS + generator.expovariate(1 / every_seconds)
    while now < seconds:
        kind, part = next(bag)
        learner_id = None if part in ("door", "syncer") else generator.randrange(num_learners)
        duration = generator.uniform(*_DURATIONS.get(kind, _LONG_SECONDS))
        faults.append(
            Fault(
                kind=kind,
                victim=Victim(part=part, learner_id=learner_id, rank=0 if part == "rank" else None),
                at_seconds=now,
                seconds=0.0 if kind in INSTANT_KINDS else duration,
                seed=generator.getrandbits(32),
            )
        )
        now += generator.expovariate(1 / every_seconds)
    return faults


def _shuffled_rounds(generator: random.Random, kinds: Sequence[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    while True:
        round = list(kinds)
        generator.shuffle(round)
        yield from round
