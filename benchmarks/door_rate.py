"""How fast are bytes on their way from courier to gateway: a plain socket, the relay, the relay in TLS?

    python benchmarks/door_rate.py [--megabytes 512] [--repeats 7]

Each way ends in this process, which sends and receives. Between lie, as in a link through the door, two processes that
relay: the courier's and the door's. The three take turns. Prints MB/s (best and median), the ratio to the plain socket,
and what a TLS handshake costs: in full, as each connection of a link makes it, and resumed, as none does.
"""

from __future__ import annotations

import argparse
import contextlib
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from hf_diloco.links import tls
from hf_diloco.links.relay import listen_for, relay
from hf_diloco.links.token import make_certificate, read_token, write_token

_BLOCK_BYTES = 8 << 20


def be_courier(port: int, certificate: str) -> None:
    """Relay from a port, which is printed, to the door's ``port``."""

    def dial() -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", port))
        pinned = read_token(write_token("secret", Path(certificate).read_text())).fingerprint if certificate else None
        return tls.secure(sock, pinned, "here") if pinned else sock

    print(listen_for(0, dial).getsockname()[1], flush=True)
    sys.stdin.read()


def be_door(port: int, certificate: str) -> None:
    """Relay from a port, which is printed, to ``port``."""
    context = tls.door_context(Path(certificate)) if certificate else None
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        while True:
            sock, _ = listener.accept()
            sock = context.wrap_socket(sock, server_side=True) if context else sock
            relay(sock, socket.create_connection(("127.0.0.1", port)))


@contextlib.contextmanager
def relays(port: int, certificate: str) -> Iterator[int]:
    """A courier and a door that relay to ``port``; the courier's port."""
    with contextlib.ExitStack() as stack:
        for role in ("door", "courier"):
            process = subprocess.Popen(
                [sys.executable, __file__, "--be", role, str(port), certificate],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
            stack.enter_context(process)
            stack.callback(process.kill)
            port = int(process.stdout.readline())
        yield port


def seconds_for(num_bytes: int, listener: socket.socket, port: int) -> float:
    """From the first byte sent to ``port`` to the last one that arrives at ``listener``."""
    with socket.create_connection(("127.0.0.1", port)) as source:
        source.sendall(b"x")
        sink, _ = listener.accept()
        with sink:
            sink.recv(1)
            block, room = bytes(_BLOCK_BYTES), memoryview(bytearray(_BLOCK_BYTES))
            blocks = threading.Thread(target=lambda: [source.sendall(block) for _ in range(num_bytes // _BLOCK_BYTES)])
            began, left = time.perf_counter(), num_bytes
            blocks.start()
            while left:
                left -= sink.recv_into(room)
            taken = time.perf_counter() - began
            blocks.join()
    return taken


def handshake_seconds(certificate: str, *, resumed: bool) -> float:
    """Median of a hundred handshakes over loopback, both ends in this process."""
    server = tls.door_context(Path(certificate))
    server.num_tickets = 1 if resumed else 0
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    session, taken = None, []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for _ in range(101):
            ours = socket.create_connection(listener.getsockname())
            theirs, _ = listener.accept()
            answers = threading.Thread(target=_greet, args=(server, theirs))
            answers.start()
            began = time.perf_counter()
            with client.wrap_socket(ours, session=session) as secured:
                taken.append(time.perf_counter() - began)
                secured.recv(1)  # the ticket comes before it
                assert secured.session_reused == (session is not None)
                session = secured.session if resumed else None
            answers.join()
    return statistics.median(taken[1:])


def _greet(server: ssl.SSLContext, sock: socket.socket) -> None:
    with server.wrap_socket(sock, server_side=True) as secured:
        secured.sendall(b"x")


def main() -> None:
    if sys.argv[1:2] == ["--be"]:
        {"courier": be_courier, "door": be_door}[sys.argv[2]](int(sys.argv[3]), sys.argv[4])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    num_bytes = options.megabytes * 10**6 // _BLOCK_BYTES * _BLOCK_BYTES
    with contextlib.ExitStack() as stack:
        certificate = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "certificate.pem"
        certificate.write_text(make_certificate())
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        sink = listener.getsockname()[1]
        ports = {
            "plain socket": sink,
            "relay": stack.enter_context(relays(sink, "")),
            "relay in TLS": stack.enter_context(relays(sink, str(certificate))),
        }
        rates: dict[str, list[float]] = {name: [] for name in ports}
        for _ in range(options.repeats):
            for name, port in ports.items():
                rates[name].append(num_bytes / seconds_for(num_bytes, listener, port) / 1e6)
        best, median = max(rates["plain socket"]), statistics.median(rates["plain socket"])
        for name, found in rates.items():
            print(
                f"{name:12}  best {max(found):5.0f} MB/s ({max(found) / best:.2f} of the plain socket's), "
                f"median {statistics.median(found):5.0f} MB/s ({statistics.median(found) / median:.2f})"
            )
        for resumed in (False, True):
            taken = handshake_seconds(str(certificate), resumed=resumed)
            print(f"TLS handshake, {'resumed' if resumed else 'in full'}: median {taken * 1e3:.2f} ms")


if __name__ == "__main__":
    main()
