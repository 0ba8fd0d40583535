"""TLS between machines: who is let in, and that nothing travels beside it."""

from __future__ import annotations

import re
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from elsewhere import DistantLearnerLink, Network
from links_world import (
    PATIENCE,
    TOKEN,
    is_whole,
    payload_of,
    port_of,
    signed,
    syncer_with_tls,
    until,
)

from hf_diloco.errors import AuthenticationError, MessageError
from hf_diloco.links import handshake, tls
from hf_diloco.links.base import LinkUp, Received
from hf_diloco.links.rpc import RpcLearnerLink, RpcSyncerLinks
from hf_diloco.links.token import make_certificate, read_token, write_token

pytestmark = pytest.mark.distributed

TIMEOUT = 6.0
REFUSED_SECONDS = 5.0


@pytest.fixture
def network() -> Iterator[Network]:
    network = Network()
    yield network
    network.close()


@pytest.fixture
def secured(tmp_path: Path) -> Iterator[tuple[RpcSyncerLinks, str]]:
    syncer, token = syncer_with_tls(tmp_path, TIMEOUT)
    syncer.open()
    yield syncer, token
    syncer.close()


def _from_elsewhere(network: Network, port: int, token: str) -> tuple[Exception | None, float]:
    """How a learner in the other network fares at the door."""
    result: list[Exception] = []
    began = time.monotonic()

    def call() -> None:
        try:
            handshake.connect(network.address, port, read_token(token), handshake.CONTROL, {}, PATIENCE).close()
        except Exception as error:
            result.append(error)

    network.run(call)
    return result[0] if result else None, time.monotonic() - began


def test_who_is_let_in_from_elsewhere(secured: tuple[RpcSyncerLinks, str], network: Network) -> None:
    syncer, token = secured
    other = write_token(TOKEN, make_certificate())
    port = port_of(syncer)
    assert _from_elsewhere(network, port, token)[0] is None
    for wrong, text in (
        (other, "has another certificate than the one this token names.*HF_DILOCO_SYNCER"),
        (TOKEN, "speaks TLS, and this learner's token names no certificate.*HF_DILOCO_TOKEN_FILE"),
        (token.replace(TOKEN, "of another run"), "does not accept this learner's token"),
    ):
        error, seconds = _from_elsewhere(network, port, wrong)
        assert isinstance(error, AuthenticationError)
        assert re.search(text, str(error))
        assert seconds < REFUSED_SECONDS


def test_old_tls_and_no_secret_are_refused(secured: tuple[RpcSyncerLinks, str]) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    address = ("127.0.0.1", port_of(secured[0]))
    with socket.create_connection(address, timeout=PATIENCE) as sock, pytest.raises(ssl.SSLError):
        context.wrap_socket(sock)
    with socket.create_connection(address, timeout=PATIENCE) as sock:
        inside = tls.secure(sock, read_token(secured[1]).fingerprint, "here")
        with inside:
            inside.sendall(b"GET / HTTP/1.1\r\n\r\n")
            assert inside.recv(100) == b""


def test_without_tls_the_learner_is_told(tmp_path: Path, network: Network) -> None:
    syncer = RpcSyncerLinks("0.0.0.0", 0, TOKEN, link_timeout_seconds=TIMEOUT)
    syncer.open()
    try:
        assert _from_elsewhere(network, port_of(syncer), TOKEN)[0] is None
        error, _ = _from_elsewhere(network, port_of(syncer), write_token(TOKEN, make_certificate()))
        assert isinstance(error, MessageError)
        assert "--no-tls" in str(error)
    finally:
        syncer.close()


class Recorder:
    """Stands between learner and door, hands on what it is given, and notes who spoke plainly or in what words."""

    def __init__(self, address: str, door: tuple[str, int], word: bytes) -> None:
        self._listener = socket.create_server((address, 0))
        self._door, self._word = door, word
        self.port = self._listener.getsockname()[1]
        self.first_bytes: list[bytes] = []
        self.num_bytes, self.heard_word = 0, False
        self._socks: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            door = socket.create_connection(self._door)
            self.first_bytes.append(sock.recv(1, socket.MSG_PEEK))
            self._socks += [sock, door]
            for pair in ((sock, door), (door, sock)):
                self._threads.append(threading.Thread(target=self._carry, args=pair))
                self._threads[-1].start()

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(1 << 20):
                self.num_bytes += len(data)
                self.heard_word |= self._word in data
                sink.sendall(data)
        except OSError:
            pass
        for sock in (source, sink):
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        for thread in self._threads[1:]:
            thread.join()
        for sock in [self._listener, *self._socks]:
            sock.close()


def test_all_traffic_is_in_tls(secured: tuple[RpcSyncerLinks, str], network: Network) -> None:
    syncer, token = secured
    word, payload = bytes(payload_of(32).tolist()), payload_of(32).repeat(1 << 18)
    recorder = Recorder(network.address, (network.address, port_of(syncer)), word)
    link = DistantLearnerLink(network.address, recorder.port, token, 0, "a")
    link.network = network
    try:
        link.open()
        until(link, LinkUp)
        until(syncer, LinkUp)
        for _ in range(3):
            link.send(signed(payload), payload)
            received = until(syncer, Received)
            assert is_whole(received)
            syncer.send([0], received.message, received.payload)
            received.release()
            received = until(link, Received)
            assert is_whole(received)
            received.release()
        assert recorder.num_bytes > 6 * payload.numel()
        assert recorder.first_bytes == [b"\x16"] * 10  # one control connection, three for each of ctl, up, down
        assert not recorder.heard_word
    finally:
        link.close()
        recorder.close()


def test_a_tunnel_that_ends_elsewhere_is_told_to_use_tls(secured: tuple[RpcSyncerLinks, str], network: Network) -> None:
    """The learner believes that it speaks to loopback, the door sees who comes from another address."""
    syncer, token = secured
    recorder = Recorder("127.0.0.1", (network.address, port_of(syncer)), TOKEN.encode())
    link = RpcLearnerLink("127.0.0.1", recorder.port, token, 0, "a")
    try:
        link.open()
        until(link, LinkUp)
        assert recorder.first_bytes == [b"H", b"\x16"]
    finally:
        link.close()
        recorder.close()
