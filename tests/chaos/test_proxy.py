"""The network of a storm: what it does to bytes that go through it."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from hf_diloco.chaos.proxy import DOWN, Proxy, Weather

pytestmark = pytest.mark.distributed

PATIENCE = 20.0


@pytest.fixture
def line() -> Iterator[tuple[Proxy, socket.socket, socket.socket]]:
    """A proxy for learner 0, the learner's end of a connection through it, and the syncer's."""
    with Proxy() as proxy, socket.create_server(("127.0.0.1", 0)) as door:
        proxy.aim(*door.getsockname())
        learners = socket.create_server(("127.0.0.1", 0))
        address = learners.getsockname()
        proxy.serve(0, learners)
        with socket.create_connection(address, PATIENCE) as learner:
            syncer, _ = door.accept()
            syncer.settimeout(PATIENCE)
            with syncer:
                learner.sendall(b"?")  # when this has come through, the proxy knows the connection
                assert syncer.recv(1) == b"?"
                yield proxy, learner, syncer


def receive(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size and (piece := sock.recv(size - len(data))):
        data += piece
    return data


def is_silent(sock: socket.socket) -> bool:
    sock.settimeout(0.3)
    try:
        return sock.recv(1) is None
    except TimeoutError:
        return True
    finally:
        sock.settimeout(PATIENCE)


def test_it_relays_both_ways_and_the_end(line):
    proxy, learner, syncer = line
    payload = bytes(range(256)) * 4000
    sender = threading.Thread(target=lambda: (learner.sendall(payload), learner.shutdown(socket.SHUT_WR)))
    sender.start()
    assert receive(syncer, len(payload)) == payload
    sender.join()
    assert syncer.recv(1) == b""
    syncer.sendall(b"back")
    assert receive(learner, 4) == b"back"
    assert proxy.moved(0) == len(payload) + 5


def test_a_cut_is_silent_and_loses_nothing(line):
    proxy, learner, syncer = line
    proxy.begin(0, 1, Weather(silent=True))
    proxy.begin(0, 2, Weather(silent=True))
    learner.sendall(b"up")
    syncer.sendall(b"down")
    assert is_silent(syncer)
    proxy.end(0, 1)
    assert is_silent(learner), "the other fault is still going on"
    proxy.end(0, 2)
    assert receive(syncer, 2) == b"up"
    assert receive(learner, 4) == b"down"


def test_one_way(line):
    proxy, learner, syncer = line
    proxy.begin(0, 1, Weather(silent=True, directions=(DOWN,)))
    learner.sendall(b"up")
    syncer.sendall(b"down")
    assert receive(syncer, 2) == b"up"
    assert is_silent(learner)
    proxy.end(0, 1)
    assert receive(learner, 4) == b"down"


def test_a_thin_line_with_delay(line):
    proxy, learner, syncer = line
    proxy.begin(0, 1, Weather(bytes_per_second=100_000, delay_seconds=0.2, jitter_seconds=0.2))
    began_at = time.monotonic()
    learner.sendall(b"x" * 50_000)
    assert receive(syncer, 50_000) == b"x" * 50_000
    assert time.monotonic() - began_at >= 0.7
    proxy.end(0, 1)
    began_at = time.monotonic()
    learner.sendall(b"x" * 50_000)
    assert receive(syncer, 50_000) == b"x" * 50_000
    assert time.monotonic() - began_at < 0.5


def test_reset(line):
    proxy, learner, syncer = line
    assert proxy.reset(0) == 1
    for end in (learner, syncer):
        with pytest.raises(ConnectionResetError):
            end.recv(1)


def test_bytes_vanish_in_the_middle_of_what_is_there_and_not_of_what_comes(line):
    proxy, learner, syncer = line
    learner.sendall(b"first")
    assert receive(syncer, 5) == b"first"
    assert proxy.drop(0, 1000) == 1
    learner.sendall(b"x" * 1000 + b"last")
    assert receive(syncer, 4) == b"xxxx"  # the end of the block is what is lost first
    proxy.begin(1, 1, Weather(silent=True))  # another learner's weather is not ours
    learner.sendall(b"more")
    assert receive(syncer, 4) == b"more"


def test_without_a_syncer_connections_are_reset(line):
    proxy, _, _ = line
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        proxy.aim(*nobody.getsockname())
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    proxy.serve(0, listener)  # in the place of the first one
    with pytest.raises(ConnectionResetError), socket.create_connection(address, PATIENCE) as learner:
        learner.recv(1)


def test_nothing_of_it_is_left():
    before = set(os.listdir("/proc/self/fd"))
    with Proxy() as proxy, socket.create_server(("127.0.0.1", 0)) as door:
        proxy.aim(*door.getsockname())
        for learner_id in (0, 1):
            listener = socket.create_server(("127.0.0.1", 0))
            address = listener.getsockname()
            proxy.serve(learner_id, listener)
            with socket.create_connection(address, PATIENCE) as learner:
                learner.sendall(b"?")
                syncer, _ = door.accept()
                with syncer:
                    assert syncer.recv(1) == b"?"
        proxy.begin(0, 1, Weather(silent=True))
    assert set(os.listdir("/proc/self/fd")) == before
    assert not [thread for thread in threading.enumerate() if "chaos" in thread.name]
