"""TLS 1.3 around a connection between courier and door, with a certificate that is pinned by the token.

Nothing is ever resumed: a resumed handshake saves no round trip in TLS 1.3 (benchmarks/door_rate.py has the times).
No torch here: the door imports it.
"""

from __future__ import annotations

import functools
import hmac
import ipaddress
import socket
import ssl
from pathlib import Path

from hf_diloco.errors import AuthenticationError, MessageError
from hf_diloco.links.token import fingerprint

_CLIENT_HELLO = b"\x16"  # the first byte of TLS; a greeting of ours begins with a letter


def is_loopback(address: str) -> bool:
    """Whether bytes to and from this IP address stay on this host."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return (mapped or ip).is_loopback


def door_context(certificate: Path) -> ssl.SSLContext:
    """What the door needs to serve TLS, from a file with its key and certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0
    context.load_cert_chain(certificate)
    return context


def speaks_tls(sock: socket.socket) -> bool:
    """Whether the first byte that the peer sends is that of TLS. The byte stays unread.

    Raises:
        OSError: the connection broke, or nothing came in time.
    """
    return sock.recv(1, socket.MSG_PEEK) == _CLIENT_HELLO


def secure(sock: socket.socket, pinned: str, where: str) -> ssl.SSLSocket:
    """TLS on a connection that was just made, to the one certificate with this fingerprint. ``sock`` is used up.

    Raises:
        AuthenticationError: the peer has another certificate.
        MessageError: the peer does not speak TLS, or the connection broke.
        TimeoutError: it says nothing.
    """
    secured = _courier_context().wrap_socket(sock, do_handshake_on_connect=False)
    try:
        secured.do_handshake()
        certificate = secured.getpeercert(binary_form=True) or b""
        if not hmac.compare_digest(fingerprint(certificate), pinned):
            raise AuthenticationError(
                f"what answers at {where} has another certificate than the one this token names: it is not this run's "
                "syncer, or the token is old. Check the address (HF_DILOCO_SYNCER) and copy the file `token` from the "
                "syncer's run directory again (HF_DILOCO_TOKEN_FILE). If both are right, somebody stands between."
            )
        return secured
    except TimeoutError:
        secured.close()
        raise
    except OSError as error:
        secured.close()
        if isinstance(error, AuthenticationError):
            raise
        raise MessageError(
            f"what answers at {where} does not speak TLS ({error.strerror or error}). If its syncer was started with "
            "--no-tls, copy its file `token` again: this one asks for TLS."
        ) from error


@functools.cache
def _courier_context() -> ssl.SSLContext:
    """No certificate authority is asked: :func:`secure` compares the certificate itself."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context
