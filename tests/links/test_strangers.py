"""What a stranger can do at each port of a run whose links carry traffic: nothing."""

from __future__ import annotations

import json
import os
import pickle
import re
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from links_world import (
    PATIENCE,
    TOKEN,
    descendants,
    eventually,
    forks_of,
    is_whole,
    payload_of,
    port_of,
    signed,
    until,
)

from hf_diloco.errors import AuthenticationError
from hf_diloco.links import handshake
from hf_diloco.links.base import LinkDown, Received
from hf_diloco.links.rpc import RpcLearnerLink, RpcSyncerLinks
from hf_diloco.links.token import Token

pytestmark = pytest.mark.distributed

TIMEOUT = 6.0
REFUSED_SECONDS = 5.0
MOST_GROWTH = 300 << 20  # bytes; the traffic's own buffers are among them


class Traffic:
    """A link over which payloads go back and forth all the time."""

    def __init__(self, syncer: RpcSyncerLinks, link: RpcLearnerLink) -> None:
        self.syncer, self.link = syncer, link
        self.num_trips, self.num_downs, self.num_killed = 0, 0, 0  # killed: links, by the test itself
        self.torn: list[object] = []
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._echo), threading.Thread(target=self._train)]
        for thread in self._threads:
            thread.start()

    def _echo(self) -> None:
        while not self._over.is_set():
            event = self.syncer.receive(0.1)
            if isinstance(event, Received):
                self.syncer.send([event.learner_id], event.message, event.payload)
                event.release()

    def _train(self) -> None:
        payload, waits_since = payload_of(1 << 20), 0.0
        while not self._over.is_set():
            event = self.link.receive(0.1)
            if isinstance(event, LinkDown):
                self.num_downs += 1
            elif isinstance(event, Received):
                self.num_trips += 1
                if not is_whole(event):
                    self.torn.append(event)
                event.release()
            # Right after LinkUp the syncer may not know of the link yet, and what it sends is dropped: try again.
            if event or time.monotonic() - waits_since > 2:
                self.link.send(signed(payload, self.num_trips), payload)
                waits_since = time.monotonic()

    def goes_on(self) -> None:
        before = self.num_trips
        eventually(lambda: self.num_trips >= before + 3, "traffic goes on")
        assert not self.torn

    def stop(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()


@pytest.fixture
def traffic() -> Iterator[Traffic]:
    syncer = RpcSyncerLinks("127.0.0.1", 0, TOKEN, link_timeout_seconds=TIMEOUT)
    syncer.open()
    link = RpcLearnerLink("127.0.0.1", port_of(syncer), TOKEN, 0, "a")
    link.open()
    traffic = Traffic(syncer, link)
    try:
        traffic.goes_on()
        yield traffic
    finally:
        traffic.stop()
        link.close()
        syncer.close()


def port_at(traffic: Traffic, where: str) -> int:
    """Where the door, or the present gateway's or courier's RPC agent, listens.

    Some junk makes an agent stop to listen while its link goes on: then the link is replaced, to have a port again.
    """
    if where == "door":
        return port_of(traffic.syncer)
    found: list[int] = []

    def look() -> bool:
        for process in forks_of(where):
            try:
                connections = process.net_connections("tcp")
                found.extend(item.laddr.port for item in connections if item.status == psutil.CONN_LISTEN)
                if not found and time.time() - process.create_time() > 3:
                    process.kill()
                    traffic.num_killed += 1
            except psutil.NoSuchProcess:
                continue
        return bool(found)

    eventually(look, f"a {where} listens")
    return found[-1]


class Memory:
    """The most that any process below this one has taken since, in bytes."""

    def __init__(self) -> None:
        self._before = {process.pid: process.memory_info().rss for process in descendants()}

    def grown(self) -> int:
        grown = [0]
        for process in descendants():
            try:
                rss = process.memory_info().rss
            except psutil.NoSuchProcess:
                continue
            grown.append(rss - self._before.setdefault(process.pid, rss))
        return max(grown)


def _trap(mark: Path) -> bytes:
    class Trap:
        def __reduce__(self) -> tuple:
            return os.system, (f"touch {mark}",)

    return pickle.dumps(Trap())


TEN_GB = struct.pack("<Q", 10 << 30)
FRAMES: dict[str, Callable[[Path], bytes]] = {
    "pickle": _trap,
    "pickle in a frame": lambda mark: struct.pack("<Q", len(_trap(mark))) + _trap(mark),
    "truncated greeting": lambda _: b"HFDL\x00\x01C",
    "truncated frame": lambda _: struct.pack("<Q", 1000) + bytes(10),
    "ten gigabytes announced": lambda _: TEN_GB + TEN_GB + bytes(1 << 16),
    "half a gigabyte announced": lambda _: struct.pack("<Q", 1 << 29) + bytes(1 << 16),
    "tls that goes on and on": lambda _: b"\x16\x03\x01\xff\xff" + bytes(1 << 16),
}


def _send(port: int, data: bytes, seconds: float = 1.0) -> None:
    """Send it, and stay until shown out, at most for so long."""
    with socket.create_connection(("127.0.0.1", port), timeout=seconds) as sock:
        try:
            sock.sendall(data)
            while sock.recv(4096):
                pass
        except OSError:
            pass


@pytest.mark.parametrize(
    "where",
    ["door", pytest.param("gateway", marks=pytest.mark.long), pytest.param("courier", marks=pytest.mark.long)],
)
def test_frames_of_a_stranger(traffic: Traffic, where: str, tmp_path: Path) -> None:
    mark, memory = tmp_path / "mark", Memory()
    for number, (name, frame) in enumerate(FRAMES.items(), 1):
        _send(port_at(traffic, where), frame(mark))
        assert memory.grown() < MOST_GROWTH, name
        traffic.goes_on()
        assert traffic.num_downs <= (0 if where == "door" else number + traffic.num_killed), name
    assert not mark.exists()


@pytest.mark.parametrize(
    ("where", "seconds"),
    [
        ("door", 3),
        ("gateway", 3),
        pytest.param("door", 60, marks=pytest.mark.long),
        pytest.param("gateway", 60, marks=pytest.mark.long),
        pytest.param("courier", 60, marks=pytest.mark.long),
    ],
)
def test_random_bytes(traffic: Traffic, where: str, seconds: int) -> None:
    memory, end, num_calls = Memory(), time.monotonic() + seconds, 0
    while time.monotonic() < end or num_calls < 2:
        _send(port_at(traffic, where), os.urandom(1 << 16))
        num_calls += 1
        assert memory.grown() < MOST_GROWTH
        traffic.goes_on()
        assert traffic.num_downs <= (0 if where == "door" else num_calls + traffic.num_killed)


@pytest.mark.parametrize("where", ["gateway", "courier"])
def test_an_rpc_agent_that_pickles(traffic: Traffic, where: str, tmp_path: Path) -> None:
    if _seccomp(forks_of(where)[0]) != 2:
        pytest.skip("no seccomp here")
    script = Path(__file__).with_name("stock_rpc.py")
    mark = tmp_path / "mark"
    peer = subprocess.run(
        [sys.executable, str(script), str(port_at(traffic, where)), str(mark)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert "call failed" in peer.stdout, peer
    assert "invalid load key, '{'" in peer.stdout, "it reached the agent, and was answered in JSON"
    assert "Operation not permitted" in peer.stdout, "what C++ runs by itself met seccomp"
    assert "succeeded" not in peer.stdout
    assert not list(tmp_path.iterdir())
    traffic.goes_on()
    assert traffic.num_downs <= 1


def _seccomp(process: psutil.Process) -> int:
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(re.search(r"^Seccomp:\s+(\d)", status, re.MULTILINE)[1])


def test_links_are_locked_in(traffic: Traffic) -> None:
    probe = "from hf_diloco.links import agent, wire; wire.install(); agent.self_test(sandboxed=True)"
    tried = subprocess.run([sys.executable, "-c", f"{probe}; import os; os._exit(0)"], capture_output=True, text=True)
    works = tried.returncode == 0
    assert works or "NoSandboxError" in tried.stderr, tried.stderr
    for role in ("gateway", "courier"):
        (process,) = forks_of(role)
        eventually(lambda: (_seccomp(process) == 2) == works, f"the {role} is locked")  # noqa: B023
        assert process.rlimit(psutil.RLIMIT_DATA)[0] < 4 << 30


def test_the_self_test_finds_a_sandbox_that_does_not_hold() -> None:
    probe = "from hf_diloco.links import sandbox; sandbox.check_locked(may_connect=False)"
    tried = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert "NoSandboxError: opening a file was not forbidden" in tried.stderr


def test_nothing_listens_beyond_loopback(traffic: Traffic) -> None:
    listening = [
        item.laddr.ip
        for process in [*descendants(), psutil.Process()]
        for item in process.net_connections("inet")
        if item.status == psutil.CONN_LISTEN
    ]
    assert len(listening) >= 3
    assert set(listening) == {"127.0.0.1"}


def test_who_holds_the_token_announces_too_much(traffic: Traffic) -> None:
    """At the door, after the greeting; and a data connection to a link that is not there."""
    port, memory = port_of(traffic.syncer), Memory()
    for request in (struct.pack("!I", 0xFFFFFFFF), struct.pack("!I", 1 << 14) + b"[" * (1 << 14)):
        sock = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)
        with sock:
            handshake._prove(sock, "here", Token(TOKEN, None), handshake.CONTROL)
            sock.sendall(request)
            assert sock.recv(1) == b""
    sock = handshake.connect("127.0.0.1", port, Token(TOKEN, None), handshake.DATA, {"token": "x"}, PATIENCE)
    with sock:
        assert sock.recv(1) == b""
    assert memory.grown() < 100 << 20
    traffic.goes_on()
    assert traffic.num_downs == 0


def test_a_wrong_token_is_refused_soon_and_both_sides_say_so(tmp_path: Path) -> None:
    command = [sys.executable, str(Path(__file__).with_name("far_end.py")), "syncer", "0", str(TIMEOUT)]
    log = tmp_path / "log"
    with log.open("w") as errors, subprocess.Popen(
        command, env=os.environ | {"TEST_TOKEN": TOKEN}, stdout=subprocess.PIPE, stderr=errors
    ) as syncer:  # fmt: skip
        try:
            port = int(json.loads(syncer.stdout.readline())["address"].rpartition(":")[2])
            wrong, began = Token("of another run", None), time.monotonic()
            with pytest.raises(
                AuthenticationError, match=r"does not accept this learner's token.*HF_DILOCO_TOKEN_FILE"
            ):
                handshake.connect("127.0.0.1", port, wrong, handshake.CONTROL, {}, PATIENCE)
            assert time.monotonic() - began < REFUSED_SECONDS
            warning = (
                r"(?m)^\d{4}-\d\d-\d\d [\d:,]+ WARNING \[door\] a learner at 127\.0\.0\.1:\d+ came with a wrong token"
            )
            eventually(lambda: re.search(warning, log.read_text()) is not None, "both say so", REFUSED_SECONDS)
            link = RpcLearnerLink("127.0.0.1", port, wrong.secret, 1, "a")
            link.open()
            down = until(link, LinkDown)
            link.close()
            assert isinstance(down.fatal, AuthenticationError)
        finally:
            syncer.kill()
