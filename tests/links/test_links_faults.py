"""What the RPC links survive: real processes, real signals, foreign bytes."""

from __future__ import annotations

import os
import resource
import signal
import socket
import threading
import types
from collections.abc import Callable, Iterator

import psutil
import pytest
from far_process import FarEnd
from links_world import (
    PATIENCE,
    TOKEN,
    collect,
    descendants,
    eventually,
    forks_of,
    is_whole,
    number_of,
    payload_of,
    port_of,
    signed,
    until,
)

from hf_diloco.core.messages import Notice
from hf_diloco.errors import AuthenticationError, LearnerRefusedError
from hf_diloco.links import handshake, learner_end
from hf_diloco.links.base import LinkDown, LinkUp, Received
from hf_diloco.links.relay import relay
from hf_diloco.links.rpc import RpcLearnerLink, RpcSyncerLinks
from hf_diloco.links.token import Token

pytestmark = pytest.mark.distributed

TIMEOUT = 4.0  # link timeout of these tests


@pytest.fixture
def far() -> Iterator[Callable[..., FarEnd]]:
    ends: list[FarEnd] = []

    def start(*arguments: object, pass_fds: tuple[int, ...] = ()) -> FarEnd:
        ends.append(FarEnd(*arguments, pass_fds=pass_fds))
        return ends[-1]

    yield start
    for end in ends:
        if end.process.returncode is None:
            end.end()


@pytest.fixture
def syncer() -> Iterator[RpcSyncerLinks]:
    links = RpcSyncerLinks("127.0.0.1", 0, TOKEN, link_timeout_seconds=TIMEOUT)
    links.open()
    yield links
    links.close()


@pytest.fixture
def connect() -> Iterator[Callable[..., RpcLearnerLink]]:
    links: list[RpcLearnerLink] = []

    def start(port: int, learner_id: int = 0, incarnation: str = "a", token: str = TOKEN) -> RpcLearnerLink:
        link = RpcLearnerLink("127.0.0.1", port, token, learner_id, incarnation)
        links.append(link)
        link.open()
        return link

    yield start
    for link in links:
        link.close()


@pytest.fixture
def pair(syncer: RpcSyncerLinks, connect: Callable[..., RpcLearnerLink]) -> tuple[RpcSyncerLinks, RpcLearnerLink]:
    link = connect(port_of(syncer))
    until(link, LinkUp)
    until(syncer, LinkUp)
    return syncer, link


def comes_back(syncer: RpcSyncerLinks, link: RpcLearnerLink) -> None:
    """Both ends see the link go and come, and it carries again, both ways."""
    until(syncer, LinkDown)
    until(link, LinkDown)
    until(link, LinkUp)
    until(syncer, LinkUp)
    payload = payload_of(9 << 20)
    link.send(signed(payload), payload)
    received = until(syncer, Received)
    assert is_whole(received)
    syncer.send([0], signed(payload), received.payload)
    received.release()
    received = until(link, Received)
    assert is_whole(received)
    received.release()


@pytest.mark.parametrize("role", ["courier", "gateway"])
@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.long)])
def test_a_process_of_the_link_is_lost(pair: tuple, role: str, number: int) -> None:
    (process,) = forks_of(role)
    process.send_signal(number)
    comes_back(*pair)
    eventually(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE, "the old one has gone")


def test_why_a_link_was_dropped_is_known_although_the_door_says_so_late(pair: tuple) -> None:
    syncer, link = pair
    (door,) = (process for process in descendants("hf_diloco.links.door") if process.ppid() == os.getpid())
    (gateway,) = forks_of("gateway")
    door.suspend()
    syncer.drop(0, "for the test")
    eventually(lambda: not gateway.is_running() or gateway.status() == psutil.STATUS_ZOMBIE, "the gateway has gone")
    door.resume()
    assert until(link, LinkDown).reason == "for the test"


@pytest.mark.parametrize("what", ["zygote courier", "zygote gateway", "door"])
def test_a_helper_process_is_killed(pair: tuple, what: str) -> None:
    module, *role = what.split()
    found = [process for process in descendants(f"hf_diloco.links.{module}") if process.cmdline()[5:] == role]
    parents = [process for process in found if process.ppid() == os.getpid()]
    assert len(parents) == 1
    parents[0].kill()
    comes_back(*pair)


@pytest.mark.long
def test_kill_in_the_middle_of_transfers_tears_nothing(pair: tuple) -> None:
    syncer, link = pair
    payloads = [payload_of(40 << 20, seed) for seed in range(2)]
    number, arrived = 0, 0
    for attempt in range(9):
        for _ in range(3):
            payload = payloads[number % 2]
            link.send(signed(payload, number), payload)
            syncer.send([0], signed(payload, number), payload)
            number += 1
        victim = forks_of("courier" if attempt % 2 else "gateway")
        if attempt % 3 == 0:  # in the middle: when the first has arrived
            event = until(syncer, lambda event: isinstance(event, Received))
            assert is_whole(event)
            event.release()
        for process in victim:
            process.kill()
        for end in (syncer, link):
            last = -1
            for event in collect(end, LinkUp):
                if isinstance(event, Received):
                    assert is_whole(event)
                    assert number_of(event) > last
                    last = number_of(event)
                    arrived += 1
                    event.release()
    payload = payloads[0]
    link.send(signed(payload, number), payload)
    assert is_whole(until(syncer, lambda event: isinstance(event, Received) and number_of(event) == number))


def test_the_syncer_is_killed_and_comes_back(far: Callable, connect: Callable) -> None:
    first = far("syncer", 0, TIMEOUT)
    port = int(first.hear("address")["address"].rpartition(":")[2])
    link, payload = connect(port), payload_of(50 << 20)
    until(link, LinkUp)
    link.send(signed(payload), payload)
    first.end()
    until(link, LinkDown)
    assert "refused" in (link.last_error() or "") or link.last_error()
    eventually(lambda: link.last_error() == f"connection refused by 127.0.0.1:{port}", "the reason is known")
    second = far("syncer", port, TIMEOUT)
    second.hear("address")
    until(link, LinkUp)
    link.send(signed(payload), payload)
    assert is_whole(until(link, Received))


@pytest.mark.parametrize("fork", ["", pytest.param("1", marks=pytest.mark.long)])
def test_the_trainer_is_killed(
    syncer: RpcSyncerLinks, far: Callable, fork: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_FORK", fork)
    trainer = far("trainer", port_of(syncer), 0, TIMEOUT, 1 << 20)
    until(syncer, LinkUp)
    trainer.end()  # checks that nobody outlives it
    until(syncer, LinkDown)
    far("trainer", port_of(syncer), 0, TIMEOUT, 0)
    until(syncer, LinkUp)


@pytest.mark.parametrize("who", ["trainer", "syncer"])
def test_a_stopped_main_process_is_missed(who: str, far: Callable) -> None:
    syncer = far("syncer", 0, TIMEOUT)
    port = int(syncer.hear("address")["address"].rpartition(":")[2])
    trainer = far("trainer", port, 0, TIMEOUT, 1 << 20)
    trainer.hear("back")
    stopped, other = (trainer, syncer) if who == "trainer" else (syncer, trainer)
    stopped.process.send_signal(signal.SIGSTOP)
    other.hear("down")
    stopped.process.send_signal(signal.SIGCONT)
    stopped.hear("down")
    syncer.hear("up")
    trainer.hear("up")
    assert trainer.hear("back")["whole"]


@pytest.mark.long
def test_a_healthy_learner_does_not_notice(pair: tuple, far: Callable) -> None:
    (syncer, link), payload = pair, payload_of(4 << 20)
    (own,) = forks_of("gateway")
    for learner_id in (1, 2):
        far("trainer", port_of(syncer), learner_id, TIMEOUT, 8 << 20)
        until(syncer, LinkUp)
    for attempt in range(8):
        eventually(lambda: len(forks_of("gateway")) > 1, "another link")
        for other in forks_of("gateway"):
            if other != own:
                other.kill()
        link.send(signed(payload, attempt), payload)
        received = until(syncer, lambda event: isinstance(event, Received) and event.learner_id == 0)
        assert number_of(received) == attempt
        received.release()
    assert link.receive(0.0) is None


GARBAGE = {
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "tls": bytes.fromhex("16030100f8010000f40303") + bytes(64),
    "zeros": bytes(4096),
    "ssh": b"SSH-2.0-OpenSSH_9.6\r\n",
    "greeting_then_noise": b"HFDL\x00\x01C\x00" + bytes(64),
    "silence": b"",
}


@pytest.mark.parametrize("kind", GARBAGE)
def test_garbage_at_the_door(pair: tuple, connect: Callable, kind: str) -> None:
    syncer, link = pair
    socks = [socket.create_connection(("127.0.0.1", port_of(syncer)), timeout=30) for _ in range(100)]
    for sock in socks:
        sock.sendall(GARBAGE[kind])
    other = connect(port_of(syncer), 1)
    until(other, LinkUp)  # nobody blocks the door
    for sock in socks:
        try:
            while sock.recv(4096):  # and each is shown out
                pass
        except ConnectionError:
            pass
        sock.close()
    link.send(Notice(text="well"))
    until(syncer, lambda event: isinstance(event, Received) and event.message == Notice(text="well"))
    (door,) = descendants("hf_diloco.links.door")
    eventually(lambda: door.num_fds() < 30 and door.num_threads() < 20, "the door forgets them")


def test_garbage_at_the_gateway_costs_one_link(pair: tuple) -> None:
    (gateway,) = forks_of("gateway")
    (port,) = {item.laddr.port for item in gateway.net_connections("tcp") if item.status == psutil.CONN_LISTEN}
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.sendall(GARBAGE["http"])
        comes_back(*pair)


def test_wrong_token(syncer: RpcSyncerLinks, connect: Callable) -> None:
    link = connect(port_of(syncer), token="of another run")
    down = until(link, LinkDown)
    assert isinstance(down.fatal, AuthenticationError)
    assert "HF_DILOCO_TOKEN_FILE" in str(down.fatal)
    assert syncer.receive(0.0) is None


def test_the_door_proves_that_it_knows_the_token() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def impostor() -> None:
            sock, _ = listener.accept()
            with sock:
                sock.recv(8)
                sock.sendall(b"HFDL\x00\x01" + bytes(16) + bytes(32))
                sock.recv(64)
                sock.sendall(b"+" + bytes(32))

        thread = threading.Thread(target=impostor)
        thread.start()
        with pytest.raises(AuthenticationError, match="not this run's syncer"):
            handshake.connect("127.0.0.1", listener.getsockname()[1], Token(TOKEN, None), handshake.CONTROL, {}, 10)
        thread.join()


def test_another_version_is_named(syncer: RpcSyncerLinks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "LINK_PROTOCOL", 99)
    with pytest.raises(LearnerRefusedError, match=r"link protocol 99.*link protocol 1\b"):
        handshake.connect("127.0.0.1", port_of(syncer), Token(TOKEN, None), handshake.CONTROL, {}, 10)


def test_nobody_listens(connect: Callable) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    link = connect(port)
    eventually(lambda: link.last_error() == f"connection refused by 127.0.0.1:{port}", "the reason is known")
    assert link.receive(0.0) is None


def test_the_syncers_timeout_governs(pair: tuple) -> None:
    _, link = pair
    assert link._timeout == TIMEOUT


@pytest.mark.long
def test_who_has_a_long_timeout_bears_a_long_silence(connect: Callable) -> None:
    syncer = RpcSyncerLinks("127.0.0.1", 0, TOKEN, link_timeout_seconds=60)
    syncer.open()
    try:
        link = connect(port_of(syncer))
        until(link, LinkUp)
        until(syncer, LinkUp)
        (gateway,) = forks_of("gateway")
        gateway.suspend()
        assert link.receive(12.0) is None
        gateway.resume()
        link.send(Notice(text="still here"))
        assert isinstance(syncer.receive(PATIENCE), Received)
    finally:
        syncer.close()


def test_out_of_open_files_for_a_moment(syncer: RpcSyncerLinks, monkeypatch: pytest.MonkeyPatch) -> None:
    failures = [OSError(24, "Too many open files")]

    def socketpair() -> tuple[socket.socket, socket.socket]:
        if failures:
            raise failures.pop()
        return socket.socketpair()

    parts = types.SimpleNamespace(socketpair=socketpair, gethostname=socket.gethostname)
    monkeypatch.setattr(learner_end, "socket", parts)
    link = RpcLearnerLink("127.0.0.1", port_of(syncer), TOKEN, 0, "a")
    link.open()
    try:
        until(link, LinkUp)
        assert not failures
    finally:
        link.close()


def test_links_may_have_as_many_open_files_as_the_system_allows() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, before[1]), before[1]))
    syncer = RpcSyncerLinks("127.0.0.1", 0, TOKEN, link_timeout_seconds=TIMEOUT)
    try:
        syncer.open()
        for process in (psutil.Process(), *descendants("hf_diloco.links")):
            assert process.rlimit(psutil.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        syncer.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_one_failure_on_the_way_to_the_gateway_is_not_for_ever(syncer: RpcSyncerLinks) -> None:
    """After a failure it tries the relay, which cannot be on the syncer's own host; then directly again."""
    link = RpcLearnerLink("127.0.0.1", port_of(syncer), TOKEN, 0, "a")
    link._courier_args["direct"] = False  # as after such a failure
    link.open()
    try:
        until(link, LinkUp)
    finally:
        link.close()


def test_through_the_relay(syncer: RpcSyncerLinks, far: Callable) -> None:
    """A learner in another network, whose only way out leads to the door."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(PATIENCE)
        trainer = far("isolated", theirs.fileno(), 0, 10, 100 << 20, pass_fds=(theirs.fileno(),))
        theirs.close()
        _, fds, _, _ = socket.recv_fds(ours, 1, 1)
    if not fds:
        pytest.skip(trainer.hear("skip")["skip"])
    relays: list[threading.Thread] = []

    def forward(listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            other = socket.create_connection(("127.0.0.1", port_of(syncer)))
            relays.append(threading.Thread(target=relay, args=(sock, other)))
            relays[-1].start()

    with socket.socket(fileno=fds[0]) as listener:
        thread = threading.Thread(target=forward, args=(listener,))
        thread.start()
        until(syncer, LinkUp)
        for _ in range(3):
            received = until(syncer, Received)
            assert is_whole(received)
            syncer.send([0], received.message, received.payload)
            received.release()
            assert trainer.hear("back")["whole"]
        assert len(relays) == 10  # one control connection, and three for each of ctl, up and down
        trainer.end()
        until(syncer, LinkDown)
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
    for thread in relays:
        thread.join()
