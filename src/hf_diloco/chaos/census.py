"""Which processes a run has, what they are, and what they hold: read from /proc.

All processes of a run carry its mark in their environment, also those whose parents are gone.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

MARK = "HF_DILOCO_CHAOS_RUN"
_LISTEN = "0A"
# As links.child names them (the kernel keeps 15 characters).
_HELPERS = {
    "hfd-courier": "courier", "hfd-courier-0": "courier-zygote", "hfd-gateway": "gateway",
    "hfd-gateway-0": "gateway-zygote", "hfd-door": "door",
}  # fmt: skip


@dataclass(frozen=True)
class Process:
    """One process, known by its pid and the time it started, so that a signal never hits another one."""

    pid: int
    started: int  # clock ticks after boot
    parent: int
    part: str  # courier, courier-zygote, gateway, gateway-zygote, door; else "main"
    learner_id: int | None  # None: the syncer's
    rank: int | None  # as torchrun sets it

    def signal(self, number: int) -> bool:
        """Whether it was still there."""
        fields = _stat(self.pid)
        if fields is None or int(fields[19]) != self.started:
            return False
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            return False
        return True


@dataclass(frozen=True)
class Holdings:
    """What one process holds open."""

    num_fds: int
    num_regions: int  # memfd
    listening: frozenset[int]  # TCP ports


def processes(mark: str) -> list[Process]:
    """The run's processes that live now, zombies left out."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            environment = dict(
                item.split(b"=", 1) for item in (entry / "environ").read_bytes().split(b"\0") if b"=" in item
            )
            if environment.get(MARK.encode()) != mark.encode():
                continue
            name = (entry / "comm").read_text().strip()
        except OSError:
            continue  # it ended just now, or is another user's
        fields = _stat(int(entry.name))
        if fields is None or fields[0] == "Z":
            continue
        part = _HELPERS.get(name, "main")
        found.append(
            Process(
                pid=int(entry.name),
                started=int(fields[19]),
                parent=int(fields[1]),
                part=part,
                learner_id=_number(environment.get(b"HF_DILOCO_LEARNER_ID")),
                rank=_number(environment.get(b"RANK")),
            )
        )
    return found


def of_learner(everybody: Iterable[Process], learner_id: int) -> list[Process]:
    """All processes of one learner, those first that started first."""
    return sorted((one for one in everybody if one.learner_id == learner_id), key=lambda one: (one.started, one.pid))


def trainers(everybody: Iterable[Process], learner_id: int) -> list[Process]:
    """The processes that train, by rank. A launcher above them is none; before it has a courier nobody is."""
    own = of_learner(everybody, learner_id)
    linked = {one.parent for one in own if one.part == "courier-zygote"}
    training = [one for one in own if one.part == "main" and (one.rank is not None or one.pid in linked)]
    return sorted(training, key=lambda one: one.rank or 0)


def gateway_of(everybody: Iterable[Process], learner_id: int) -> Process | None:
    """The gateway at the other end of this learner's link: the courier knows its port, listens at the same, or both."""
    everybody = list(everybody)
    known: set[int] = set()
    for one in of_learner(everybody, learner_id):
        if one.part == "courier":
            known |= {port for ports in _tcp_ports(one.pid) for port in ports}
    for one in everybody:
        if one.part == "gateway" and holdings(one.pid).listening & known:
            return one
    return None


def holdings(pid: int) -> Holdings:
    """What it holds open; nothing if it is gone."""
    links = _links(pid)
    listening = frozenset(local for local, remote in _tcp_ports(pid, links) if not remote)
    return Holdings(
        num_fds=len(links),
        num_regions=sum(link.startswith("/memfd:") for link in links),
        listening=listening,
    )


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat from the state on."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def _links(pid: int) -> list[str]:
    links = []
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):
            try:
                links.append(os.readlink(f"/proc/{pid}/fd/{name}"))
            except OSError:
                continue
    except OSError:
        pass
    return links


def _tcp_ports(pid: int, links: list[str] | None = None) -> list[tuple[int, int]]:
    """Local and remote port of each TCP socket that it holds; remote 0: it listens. In its own network namespace."""
    inodes = {link[8:-1] for link in (_links(pid) if links is None else links) if link.startswith("socket:[")}
    found = []
    for family in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/{pid}/net/{family}").read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[9] in inodes:
                local, remote = (int(address.rpartition(":")[2], 16) for address in fields[1:3])
                found.append((local, 0 if fields[3] == _LISTEN else remote))
    return found


def _number(text: bytes | None) -> int | None:
    return int(text) if text and text.isdigit() else None
