"""One end of the links in a process of its own, for tests that kill or stop it. Says what happens as JSON lines.

far_end.py syncer PORT TIMEOUT                    sends every payload back
far_end.py trainer PORT LEARNER TIMEOUT SIZE      sends payloads of SIZE bytes as they come back; 0: says hello only
far_end.py isolated FD LEARNER TIMEOUT SIZE       the same in a network namespace of its own; passes a listening
                                                  socket of there through FD first and calls that
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import socket
import struct
import sys

_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)


def isolate(fd: int) -> int:
    """Leave the network; a port of the new one, whose listening socket the test has."""
    flags = _CLONE_NEWNET if os.geteuid() == 0 else _CLONE_NEWNET | _CLONE_NEWUSER
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(flags) and libc.unshare(_CLONE_NEWNET | _CLONE_NEWUSER):
        say(skip=f"no network namespace: {os.strerror(ctypes.get_errno())}")
        sys.exit()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        request = struct.pack("16sh14x", b"lo", 1)  # IFF_UP
        fcntl.ioctl(sock, 0x8914, request)  # SIOCSIFFLAGS
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket(fileno=fd) as test:
        socket.send_fds(test, [b"x"], [listener.fileno()])
        return listener.getsockname()[1]


def syncer(port: int, timeout: float) -> None:
    from hf_diloco.links.base import LinkDown, LinkUp, Received
    from hf_diloco.links.rpc import RpcSyncerLinks

    links = RpcSyncerLinks("127.0.0.1", port, os.environ["TEST_TOKEN"], link_timeout_seconds=timeout)
    links.open()
    say(address=links.address)
    while True:
        event = links.receive(60)
        if isinstance(event, LinkUp):
            say(up=event.learner_id)
        elif isinstance(event, LinkDown):
            say(down=event.learner_id, reason=event.reason)
        elif isinstance(event, Received) and event.payload is not None:
            links.send([event.learner_id], event.message, event.payload)
            event.release()


def trainer(port: int, learner_id: int, timeout: float, size: int) -> None:
    from links_world import is_whole, payload_of, signed

    from hf_diloco.links.base import LinkDown, LinkUp, Received
    from hf_diloco.links.rpc import RpcLearnerLink

    token = os.environ["TEST_TOKEN"]
    link = RpcLearnerLink("127.0.0.1", port, token, learner_id, f"{os.getpid()}")
    link.open()
    payload, number = payload_of(size, learner_id), 0
    if os.environ.get("TEST_FORK") and os.fork() == 0:  # as a DataLoader's worker: it holds copies of all descriptors
        sys.stdin.read()
        os._exit(0)
    while True:
        event = link.receive(60)
        if isinstance(event, LinkDown):
            say(down=learner_id, reason=event.reason, fatal=repr(event.fatal) if event.fatal else None)
            continue
        if isinstance(event, LinkUp):
            say(up=learner_id)
        elif isinstance(event, Received):
            say(back=number, whole=event.payload is None or is_whole(event))
            event.release()
            number += 1
        if event and size:
            link.send(signed(payload, number), payload)


def main() -> None:
    role, *arguments = sys.argv[1:]
    if role == "syncer":
        syncer(int(arguments[0]), float(arguments[1]))
    port = isolate(int(arguments[0])) if role == "isolated" else int(arguments[0])
    trainer(port, int(arguments[1]), float(arguments[2]), int(arguments[3]))


if __name__ == "__main__":
    main()
