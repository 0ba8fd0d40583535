"""What a peer with a link may send, and what memory that takes; tokens; bytes in and out of TLS. No processes."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from hf_diloco.config import DiLoCoPlugin
from hf_diloco.core.messages import Notice
from hf_diloco.errors import ConfigError, MessageError
from hf_diloco.links import buffers, courier, gateway, inbox, tls
from hf_diloco.links.base import LinkUp, Received
from hf_diloco.links.buffers import MAX_PAYLOAD_BYTES, PIECE_BYTES, WINDOW, BufferPool, map_region
from hf_diloco.links.channel import Channel, FrameReader
from hf_diloco.links.courier import in_words
from hf_diloco.links.gateway import Gateway
from hf_diloco.links.loop import Loop
from hf_diloco.links.relay import relay
from hf_diloco.links.token import Token, make_certificate, read_token, write_token
from hf_diloco.links.zygote import _Zygote

pytestmark = pytest.mark.fast

MESSAGE = {"kind": "Notice", "text": "x"}


class Syncer:
    """The syncer's main process, as a gateway sees it: takes messages, and releases their payloads when told to."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.messages: list[dict] = []
        self.releases: list = []
        self._loop = Loop()
        self._channel = Channel(ours, self._loop, self._take, lambda _reason: None)
        self.gateway = Gateway(theirs, "token", 10.0)
        self._loop.start("test-syncer")
        self.gateway._loop.start("test-gateway")

    def _take(self, message: dict, _payload: torch.Tensor | None, release: object) -> None:
        if message["op"] == "message":
            self.messages.append(message)
            self.releases.append(release)

    def put(self, number: int, total: int, offset: int = 0, *, last: bool = True, size: int | None = None):
        size = min(PIECE_BYTES, total - offset) if size is None else size
        piece = torch.ones(size, dtype=torch.uint8) if size else None
        return self.gateway.put("token", number, offset, total, [MESSAGE, 0] if last else None, piece)

    def release_next(self) -> None:
        _until(lambda: self.releases)
        self.releases.pop(0)()

    def close(self) -> None:
        # the gateway first: at the end of its channel it would end this process
        for loop, channel in ((self.gateway._loop, self.gateway._channel), (self._loop, self._channel)):
            loop.stop()
            channel.close()
        for transfer in self.gateway._transfers.values():
            if transfer.buffer:
                self.gateway._pool.release(transfer.buffer)
        self.gateway._transfers.clear()
        self.gateway._pool.close()


def _until(condition) -> None:
    waited = threading.Event()
    for _ in range(1000):
        if condition():
            return
        waited.wait(0.01)
    raise AssertionError("not within 10 s")


@pytest.fixture
def syncer() -> Iterator[Syncer]:
    syncer = Syncer()
    yield syncer
    syncer.close()


def test_an_announcement_takes_no_memory(syncer: Syncer) -> None:
    syncer.put(0, 4 << 30, last=False)
    (transfer,) = syncer.gateway._transfers.values()
    assert os.fstat(transfer.buffer.fd).st_blocks * 512 == PIECE_BYTES


@pytest.mark.parametrize(
    ("number", "total", "offset", "size"),
    [
        (0, MAX_PAYLOAD_BYTES + 1, 0, 1),
        (0, -1, 0, 1),
        (gateway._MAX_TRANSFERS, 1, 0, 1),
        (0, 10, 0, 9),  # pieces are whole,
        (0, 3 * PIECE_BYTES, 1, PIECE_BYTES),  # in their places,
        (0, 10, PIECE_BYTES, 1),  # and inside
        (0, 10, -PIECE_BYTES, 10),
        (0, 0, 0, 1),
    ],
)
def test_what_is_no_piece_is_refused(syncer: Syncer, number: int, total: int, offset: int, size: int) -> None:
    with pytest.raises(MessageError):
        syncer.put(number, total, offset, size=size)
    assert not syncer.messages


def test_another_token_is_refused(syncer: Syncer) -> None:
    with pytest.raises(MessageError, match="another link"):
        syncer.gateway.put("other", 0, 0, 1, None, torch.ones(1, dtype=torch.uint8))


def test_a_piece_is_answered_when_there_is_room(syncer: Syncer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway, "MAX_HELD_BYTES", 3 << 16)
    answers = [syncer.put(number, 1 << 16) for number in range(5)]
    assert [answer.done() for answer in answers] == [True, True, False, False, False]
    _until(lambda: len(syncer.messages) == 5)  # all are with the syncer; it has only not used them yet
    for _ in range(3):
        syncer.release_next()
    _until(lambda: all(answer.done() for answer in answers))


def test_a_payload_larger_than_the_room_goes_through(syncer: Syncer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway, "MAX_HELD_BYTES", 1 << 16)
    total = 2 * PIECE_BYTES
    first = syncer.put(0, total, last=False)
    assert first.done()
    last = syncer.put(0, total, PIECE_BYTES)
    _until(lambda: syncer.messages)
    assert not last.done()
    syncer.release_next()
    _until(last.done)


def test_downloads_larger_than_the_room_go_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when others wait behind them; and however slow the line is, they have the time."""
    monkeypatch.setattr(courier, "MAX_HELD_BYTES", 1 << 16)
    timeouts, delivered = set(), []

    def call(_peer: object, name: str, *arguments: int, timeout_seconds: float) -> torch.futures.Future:
        timeouts.add(timeout_seconds)
        answer: torch.futures.Future = torch.futures.Future()
        answer.set_result(torch.full((arguments[3],), arguments[1], dtype=torch.uint8) if name == "get" else None)
        return answer

    monkeypatch.setattr(courier.wire, "call", call)
    ours, theirs = socket.socketpair()
    trainer = Loop()

    def take(message: dict, payload: torch.Tensor | None, release: Callable[[], None]) -> None:
        delivered.extend([int(payload[0])] if payload is not None else [])
        release()

    channel = Channel(ours, trainer, take, lambda _reason: None)
    link = courier.Courier(theirs, {"host_name": "here"})
    link._token, link._down = "token", None
    for number in (1, 2, 3):
        link._downloads.put((number, 1 << 16, MESSAGE))
    trainer.start("test-trainer")
    link._loop.start("test-courier")

    def download() -> None:
        with contextlib.suppress(TypeError):  # the last one is none
            link._download(None)

    thread = threading.Thread(target=download, daemon=True)
    thread.start()
    try:
        _until(lambda: len(delivered) == 3)
    finally:
        link._downloads.put(None)
        thread.join(60)
        for loop, end in ((link._loop, link._channel), (trainer, channel)):
            loop.stop()
            end.close()
        link._pool.close()
    assert delivered == [1, 2, 3]
    assert timeouts == {0.0}


def test_a_fork_that_fails_costs_one_link_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def fork() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", fork)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        parent = _Zygote(theirs, os.getppid(), "gateway")
        link, far_end = socket.socketpair()
        with link:
            parent._fork(7, {}, far_end.detach())
            assert link.recv(1) == b"", "the link has ended"
        assert FrameReader(ours).read()[0].message == {"op": "exited", "number": 7}


def test_no_more_pieces_than_a_window(syncer: Syncer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway, "MAX_HELD_BYTES", 1)
    for number in range(WINDOW):
        assert not syncer.put(number, 1 << 16).done()
    with pytest.raises(MessageError, match="under way"):
        syncer.put(WINDOW, 1 << 16)


def test_a_learner_that_is_told_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox, "_MAX_MESSAGES", 3)
    box, received = inbox.Inbox(), Received(0, Notice(text="x"))
    assert box.put(1, LinkUp(0))
    assert [box.put(1, received) for _ in range(4)] == [True, True, True, False]
    assert box.put(2, received)  # another link
    assert box.get(0) == (1, LinkUp(0))
    assert box.get(0) == (1, received)
    assert box.put(1, received)
    box.clear()
    assert box.get(0) is None
    assert all(box.put(1, received, inbox._MAX_BYTES // 2) for _ in range(2))
    assert not box.put(1, received, 1)


def test_a_region_that_can_shrink_is_not_mapped() -> None:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, 4096)
        with pytest.raises(MessageError, match="not sealed"):
            map_region(fd, 4096)
    finally:
        os.close(fd)
    buffer = BufferPool().take(100)
    with pytest.raises(PermissionError):
        os.ftruncate(buffer.fd, 0)
    buffer.destroy()


@pytest.mark.parametrize(
    "content", [b"[" * 100_000, b"{", b"[]", b"null", b'{"fds": 1}', b'{"fds": "x"}'], ids=lambda value: value[:12]
)
def test_a_broken_frame_ends_the_channel(content: bytes) -> None:
    ours, theirs = socket.socketpair()
    loop, reasons = Loop(), []
    Channel(ours, loop, lambda *_: None, reasons.append)
    loop.start("test-channel")
    theirs.sendall(len(content).to_bytes(4, "big") + content)
    _until(lambda: reasons)
    theirs.close()
    loop.stop()


def test_a_frame_that_is_too_long_is_not_awaited() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"\xff\xff\xff\xff")
        with pytest.raises(MessageError, match="at most"):
            FrameReader(ours).read()


def test_a_pool_tells_what_is_held() -> None:
    released = []
    pool = BufferPool(lambda: released.append(pool.held_bytes))
    first, second = pool.take(1), pool.take(1 << 20)
    assert pool.held_bytes == first.size + second.size
    pool.hold(first)
    pool.release(first)
    assert released == []
    pool.release(first)
    assert released == [second.size]
    again = pool.take(1)
    assert again is first
    pool.release(again)
    pool.release(second)
    assert pool.held_bytes == 0
    pool.close()
    assert buffers.MAX_PAYLOAD_BYTES > 1 << 28


# ------------------------------------------------------------------------------------------------------------- tokens


def test_a_token_is_read_as_it_was_written() -> None:
    assert read_token("secret\n") == Token("secret", None)
    token = write_token("secret", make_certificate())
    assert read_token(token).secret == "secret"
    assert len(read_token(token).fingerprint) == 64


@pytest.mark.parametrize("text", ["", ".", "secret.", "secret.12", "." + "0" * 64, "secret." + "0" * 63, "a.b.c"])
def test_a_damaged_token_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="Copy the file `token`"):
        read_token(text)


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o602])
def test_a_learner_refuses_a_token_file_that_others_can_read(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "token"
    path.write_text("secret\n")
    path.chmod(mode)
    plugin = DiLoCoPlugin(syncer="host:1", learner_id=0, token_file=str(path))
    with pytest.raises(ConfigError, match=rf"mode {mode:04o}.*chmod 600 {path}"):
        plugin.read_token()
    path.chmod(0o600)
    assert plugin.read_token() == "secret"


@pytest.mark.parametrize(
    ("address", "expected"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("::ffff:127.0.0.1", True), ("10.0.0.1", False),
     ("::ffff:10.0.0.1", False), ("fe80::1%eth0", False), ("0.0.0.0", False)],
)  # fmt: skip
def test_what_stays_on_this_host(address: str, expected: bool) -> None:
    assert tls.is_loopback(address) is expected


# ---------------------------------------------------------------------------------------------------------------- TLS


def _receive_all(sock: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size and (piece := sock.recv(1 << 20)):
        data += piece
    return bytes(data)


def test_bytes_go_both_ways_through_tls_at_once(tmp_path: Path) -> None:
    (tmp_path / "certificate.pem").write_text(make_certificate())
    pinned = read_token(write_token("x", (tmp_path / "certificate.pem").read_text())).fingerprint
    near, courier_in = socket.socketpair()
    courier_out, door_in = socket.socketpair()
    door_out, far = socket.socketpair()
    for sock in (near, far):
        sock.settimeout(60)

    def courier() -> None:
        relay(courier_in, tls.secure(courier_out, pinned, "here"))

    def door() -> None:
        relay(tls.door_context(tmp_path / "certificate.pem").wrap_socket(door_in, server_side=True), door_out)

    up, down = random.Random(0).randbytes((9 << 20) + 1), random.Random(1).randbytes((5 << 20) + 3)
    work = [courier, door, lambda: near.sendall(up), lambda: far.sendall(down)]
    threads = [threading.Thread(target=function) for function in work]
    for thread in threads:
        thread.start()
    got: dict[str, bytes] = {}
    other = threading.Thread(target=lambda: got.update(up=_receive_all(far, len(up))))
    other.start()
    assert _receive_all(near, len(down)) == down
    other.join()
    assert got["up"] == up
    near.sendall(b"last words")
    near.close()
    assert _receive_all(far, 100) == b"last words"  # and then its end
    far.close()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def test_the_end_of_a_connection_is_said_in_words() -> None:
    ended = RuntimeError("EOF: end of file (this error originated at tensorpipe/transport/uv/connection_impl.cc:132)")
    assert in_words(ended) == "the connection to the syncer ended"
    assert in_words(MessageError("the syncer announces more than it may")) is None
