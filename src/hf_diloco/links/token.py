"""The run's token: a secret that proves membership and, with TLS, the fingerprint of the syncer's certificate.

``<secret>.<SHA-256 of the certificate, 64 hex digits>``, or the secret alone where TLS is switched off. One string,
so that whoever may link also knows to whom. No torch here.
"""

from __future__ import annotations

import datetime
import hashlib
import re
import ssl
from typing import NamedTuple

from hf_diloco.errors import ConfigError

_FINGERPRINT = re.compile(r"[0-9a-f]{64}")


class Token(NamedTuple):
    """What the token says."""

    secret: str
    fingerprint: str | None  # of the only certificate to be trusted; None: TLS is switched off


def read_token(text: str) -> Token:
    """The two parts of a token.

    Raises:
        ConfigError: it was cut or changed on the way.
    """
    secret, dot, fingerprint = text.strip().partition(".")
    if not secret or (dot and not _FINGERPRINT.fullmatch(fingerprint)):
        raise ConfigError(
            f"the token is damaged ({len(text.strip())} characters; a secret, a dot and 64 hex digits are expected). "
            "Copy the file `token` from the syncer's run directory again."
        )
    return Token(secret, fingerprint or None)


def write_token(secret: str, certificate: str | None) -> str:
    """The token of a run with this secret and this certificate (PEM)."""
    return secret if certificate is None else f"{secret}.{fingerprint(_der(certificate))}"


def fingerprint(certificate: bytes) -> str:
    """SHA-256 of a certificate (DER), as hex digits."""
    return hashlib.sha256(certificate).hexdigest()


def make_certificate() -> str:
    """A new private key and a certificate for it, signed by itself (PEM).

    Learners know it by its fingerprint alone, so it names no host and does not expire.
    """
    from cryptography import x509  # takes 0.1 s, once in the life of a run directory
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "hf-diloco syncer")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.datetime(2000, 1, 1))
        .not_valid_after(datetime.datetime(9999, 12, 31))
        .sign(key, hashes.SHA256())
    )
    pem, unencrypted = serialization.Encoding.PEM, serialization.NoEncryption()
    key_text = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, unencrypted)
    return (key_text + certificate.public_bytes(pem)).decode("ascii")


def _der(text: str) -> bytes:
    """The certificate in a file that also holds its key.

    Raises:
        ValueError: there is none.
    """
    start = text.index(ssl.PEM_HEADER)
    return ssl.PEM_cert_to_DER_cert(text[start:])
