"""For the tests of the links: waiting for events, payloads that tell whether they are whole, finding processes."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from pathlib import Path

import psutil
import torch

from hf_diloco.core.messages import Message, SupplyFile
from hf_diloco.links.base import LearnerLink, LinkEvent, Received, SyncerLinks
from hf_diloco.links.rpc import RpcSyncerLinks
from hf_diloco.links.token import make_certificate, write_token

TOKEN = "token-of-the-tests"
PATIENCE = 60.0


def syncer_with_tls(path: Path, timeout: float = 10.0) -> tuple[RpcSyncerLinks, str]:
    """A syncer that listens everywhere, and the token of its learners. ``path`` takes its certificate."""
    certificate = make_certificate()
    (path / "certificate.pem").write_text(certificate)
    token = write_token(TOKEN, certificate)
    links = RpcSyncerLinks("0.0.0.0", 0, token, certificate=path / "certificate.pem", link_timeout_seconds=timeout)
    return links, token


def port_of(syncer: SyncerLinks) -> int:
    return int(syncer.address.rpartition(":")[2])


def until(
    end: LearnerLink | SyncerLinks, wanted: Callable[[LinkEvent], bool] | type, seconds: float = PATIENCE
) -> LinkEvent:
    """The first event of this kind; others before it are dropped."""
    return collect(end, wanted, seconds)[-1]


def collect(
    end: LearnerLink | SyncerLinks, wanted: Callable[[LinkEvent], bool] | type, seconds: float = PATIENCE
) -> list[LinkEvent]:
    """All events up to the first of this kind."""
    fits = (lambda event: isinstance(event, wanted)) if isinstance(wanted, type) else wanted
    deadline, seen = time.monotonic() + seconds, []
    while time.monotonic() < deadline:
        event = end.receive(0.2)
        if event is not None:
            seen.append(event)
            if fits(event):
                return seen
    error = end.last_error() if hasattr(end, "last_error") else None
    raise AssertionError(f"not within {seconds} s; seen {[str(event)[:120] for event in seen]}, last error {error}")


def payload_of(size: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)


def checksum(payload: torch.Tensor) -> int:
    return zlib.crc32(payload.numpy())


def signed(payload: torch.Tensor, number: int = 0) -> Message:
    """A message whose name tells what its payload must be."""
    return SupplyFile(name=f"{number}:{payload.numel()}:{checksum(payload)}")


def is_whole(event: LinkEvent) -> bool:
    assert isinstance(event, Received)
    assert isinstance(event.message, SupplyFile)
    assert event.payload is not None
    _, size, crc = map(int, event.message.name.split(":"))
    return size == event.payload.numel() and crc == checksum(event.payload)


def number_of(event: LinkEvent) -> int:
    assert isinstance(event, Received)
    assert isinstance(event.message, SupplyFile)
    return int(event.message.name.split(":")[0])


def descendants(module: str = "") -> list[psutil.Process]:
    """Processes that this one started, directly or not; with ``module``, those that run it."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            command = " ".join(process.cmdline())
            if process.status() != psutil.STATUS_ZOMBIE or not module:
                found += [process] if module in command else []
        except psutil.NoSuchProcess:
            continue
    return found


def forks_of(role: str, root: psutil.Process | None = None) -> list[psutil.Process]:
    """The couriers or gateways below ``root``, without their zygotes."""
    found = []
    for process in (root or psutil.Process()).children(recursive=True):
        try:
            command, parent = process.cmdline(), process.parent()
            if "hf_diloco.links.zygote" in command and command[-1] == role and parent and parent.cmdline() == command:
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def eventually(condition: Callable[[], bool], what: str, seconds: float = PATIENCE) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.02)
