"""What is said on a TCP connection before bytes are relayed: version, proof of the token both ways, one request.

Both sides prove that they know the run's secret without showing it (HMAC-SHA256 over both nonces and the kind of
connection). Beyond loopback TLS is there before the first byte of this; the learner has then checked whose certificate
it is. No torch in this module: the door imports it.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import socket
import struct
from typing import Any

from hf_diloco import __version__
from hf_diloco.errors import AuthenticationError, LearnerRefusedError, MessageError
from hf_diloco.links import tls
from hf_diloco.links.token import Token

LINK_PROTOCOL = 1
CONTROL, DATA = b"C", b"D"  # a learner's liveness connection; one that is relayed to its gateway
MAX_REQUEST_BYTES = 1 << 14

_MAGIC, _MAGIC_TLS = b"HFDL", b"HFDT"  # the second answers who must come with TLS
_GREETING = struct.Struct("!4sHc1x")  # magic, protocol, kind
_ANSWER = struct.Struct("!4sH16s")  # magic, protocol, library version
_NONCE_BYTES = _PROOF_BYTES = 32
_ACCEPTED, _REJECTED = b"+", b"-"


def host_key() -> str:
    """The same for two processes if they can reach each other's loopback. Unlike any other where it cannot be told."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return secrets.token_hex(16)


def keep_alive(sock: socket.socket, timeout_seconds: float) -> None:
    """Let the kernel notice a peer that vanished, also while data is under way; and no delay for small packets."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    third = max(1, round(timeout_seconds / 3))
    for option, value in (
        (socket.TCP_KEEPIDLE, third),
        (socket.TCP_KEEPINTVL, third),
        (socket.TCP_KEEPCNT, 2),
        (socket.TCP_USER_TIMEOUT, max(1000, round(2000 * timeout_seconds))),
    ):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


def connect(host: str, port: int, token: Token, kind: bytes, request: dict[str, Any], timeout: float) -> socket.socket:
    """A connection that the door has let in and that carries ``request``. It keeps ``timeout``.

    It is a TLS connection where the address is not loopback, or the door says that it must be (on loopback there may
    be the mouth of a tunnel or a container's port), unless the token says that TLS is switched off.

    Raises:
        OSError: nobody there, or the connection broke.
        AuthenticationError: one side could not prove who it is.
        LearnerRefusedError: the other side speaks another version.
        MessageError: what answered is not a syncer.
    """
    try:
        return _connect(host, port, token, kind, request, timeout, private=False)
    except _TlsDemanded:
        return _connect(host, port, token, kind, request, timeout, private=True)


class _TlsDemanded(Exception):
    """The door does not speak plainly with strangers who come from elsewhere."""


def _connect(
    host: str, port: int, token: Token, kind: bytes, request: dict[str, Any], timeout: float, *, private: bool
) -> socket.socket:
    sock = socket.create_connection((host, port), timeout=timeout)
    try:
        keep_alive(sock, timeout)
        if token.fingerprint and (private or not tls.is_loopback(sock.getpeername()[0])):
            sock = tls.secure(sock, token.fingerprint, f"{host}:{port}")
        _prove(sock, f"{host}:{port}", token, kind)
        send_document(sock, request)
        return sock
    except BaseException:
        sock.close()
        raise


def _prove(sock: socket.socket, where: str, token: Token, kind: bytes) -> None:
    """Show the door that we know the secret, and see that it does."""
    sock.sendall(_GREETING.pack(_MAGIC, LINK_PROTOCOL, kind))
    magic, protocol, library = _ANSWER.unpack(_receive(sock, _ANSWER.size))
    if magic == _MAGIC_TLS and token.fingerprint:
        raise _TlsDemanded
    if magic == _MAGIC_TLS:
        raise AuthenticationError(
            f"the syncer at {where} speaks TLS, and this learner's token names no certificate. Copy the file `token` "
            "from the syncer's run directory to this machine and check HF_DILOCO_TOKEN_FILE (or HF_DILOCO_TOKEN)."
        )
    if magic != _MAGIC:
        raise MessageError(f"what answers at {where} is not a syncer of hf-diloco")
    if protocol != LINK_PROTOCOL:
        other = library.rstrip(b"\0").decode("ascii", "replace")
        raise LearnerRefusedError(
            f"this learner has hf-diloco {__version__} (link protocol {LINK_PROTOCOL}), the syncer at {where} has "
            f"{other} (link protocol {protocol}); install the same version on both."
        )
    server_nonce, client_nonce = _receive(sock, _NONCE_BYTES), secrets.token_bytes(_NONCE_BYTES)
    sock.sendall(client_nonce + _proof(token.secret, b"learner", kind, server_nonce, client_nonce))
    if _receive(sock, 1) != _ACCEPTED:
        raise AuthenticationError(
            f"the syncer at {where} does not accept this learner's token. Copy the file `token` from the syncer's "
            "run directory to this machine and check HF_DILOCO_TOKEN_FILE (or HF_DILOCO_TOKEN); a token belongs "
            "to one run."
        )
    proof = _receive(sock, _PROOF_BYTES)
    if not hmac.compare_digest(proof, _proof(token.secret, b"syncer", kind, server_nonce, client_nonce)):
        raise AuthenticationError(
            f"what answers at {where} does not know this run's token: it is not this run's syncer. Check the "
            "address (HF_DILOCO_SYNCER) and the token (HF_DILOCO_TOKEN_FILE)."
        )


def welcome(sock: socket.socket, secret: str, *, may_speak: bool) -> tuple[bytes, dict[str, Any]]:
    """The door's side of :func:`connect`: the kind of connection and its request.

    Raises:
        OSError: it broke, or took too long.
        AuthenticationError: wrong secret.
        MessageError: not a learner, or of another version, or ``may_speak`` is False (then it is told to speak TLS).
    """
    magic, protocol, kind = _GREETING.unpack(_receive(sock, _GREETING.size))
    if magic != _MAGIC or kind not in (CONTROL, DATA):
        raise MessageError("not a learner")
    if not may_speak:
        sock.sendall(_ANSWER.pack(_MAGIC_TLS, LINK_PROTOCOL, b""))
        raise MessageError("it comes from elsewhere and speaks without TLS")
    nonce = secrets.token_bytes(_NONCE_BYTES)
    sock.sendall(_ANSWER.pack(_MAGIC, LINK_PROTOCOL, __version__.encode()[:16]) + nonce)
    if protocol != LINK_PROTOCOL:
        raise MessageError(f"link protocol {protocol}; this syncer speaks {LINK_PROTOCOL} (hf-diloco {__version__})")
    client_nonce = _receive(sock, _NONCE_BYTES)
    proof = _receive(sock, _PROOF_BYTES)
    if not hmac.compare_digest(proof, _proof(secret, b"learner", kind, nonce, client_nonce)):
        sock.sendall(_REJECTED)
        raise AuthenticationError("wrong token")
    sock.sendall(_ACCEPTED + _proof(secret, b"syncer", kind, nonce, client_nonce))
    return kind, receive_document(sock)


def send_document(sock: socket.socket, document: dict[str, Any]) -> None:
    """Send a small JSON document."""
    text = json.dumps(document).encode()
    sock.sendall(struct.pack("!I", len(text)) + text)


def receive_document(sock: socket.socket) -> dict[str, Any]:
    """Receive what :func:`send_document` sent.

    Raises:
        MessageError: too long, or no JSON object.
        EOFError: the connection ended.
    """
    (length,) = struct.unpack("!I", _receive(sock, 4))
    if length > MAX_REQUEST_BYTES:
        raise MessageError(f"a request of {length} bytes")
    try:
        document = json.loads(_receive(sock, length))
    except (ValueError, RecursionError) as error:
        raise MessageError("a request that is not JSON") from error
    if not isinstance(document, dict):
        raise MessageError("a request that is not an object")
    return document


def _proof(secret: str, side: bytes, kind: bytes, server_nonce: bytes, client_nonce: bytes) -> bytes:
    text = b"hf-diloco link 1|" + side + b"|" + kind + b"|" + server_nonce + client_nonce
    return hmac.new(secret.encode(), text, hashlib.sha256).digest()


def _receive(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        if not (piece := sock.recv(size - len(data))):
            raise EOFError("the connection ended in the middle of the greeting" if data else "the connection ended")
        data += piece
    return data
