"""The one port of the syncer."""

from __future__ import annotations

import errno
import socket
import time

from hf_diloco.errors import ConfigError

_BIND_SECONDS = 5.0  # the door of a syncer that was killed lets go of the port within moments


def join_address(host: str, port: int) -> str:
    """``host:port``, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listen(host: str, port: int) -> socket.socket:
    """Listen there; a port that is taken is waited for.

    Raises:
        ConfigError: the address cannot be listened at.
    """
    deadline = time.monotonic() + _BIND_SECONDS
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    while True:
        try:
            return socket.create_server((host, port), family=family, backlog=128)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or port == 0 or time.monotonic() > deadline:
                raise ConfigError(
                    f"cannot listen at {join_address(host, port)}: {error.strerror}. Choose a free port (0: any) and "
                    "an address of this machine (0.0.0.0: all of them)."
                ) from error
            time.sleep(0.1)
