"""``python -m hf_diloco.chaos.island FD PORT COMMAND...``: runs a command where the network is one port.

The command gets a network namespace of its own, with nothing but loopback in it. What listens there at PORT is handed
out through FD (a unix socket), so that a process outside can serve it: the :mod:`proxy <hf_diloco.chaos.proxy>`, which
stands for the network between a learner and the syncer. Nobody outside can reach anything inside. Works as root, and
as any user where the system lets users make namespaces.

Only the standard library is loaded here; the command takes this process's place.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import sys
from pathlib import Path

_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1


def isolate() -> None:
    """Leave the network for a namespace with loopback only.

    Raises:
        OSError: the system does not let this user.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()
    if os.geteuid() != 0 or libc.unshare(_CLONE_NEWNET):
        if libc.unshare(_CLONE_NEWNET | _CLONE_NEWUSER):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        fcntl.ioctl(sock, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP))


def main() -> None:
    """Isolate this process, hand the listening socket out, become the command."""
    fd, port, *command = sys.argv[1:]
    with socket.socket(fileno=int(fd)) as outside:
        try:
            isolate()
        except OSError as error:
            sys.exit(f"a learner cannot get a network of its own: {error}. Run as root, or leave network faults out.")
        with socket.create_server(("127.0.0.1", int(port)), backlog=128) as listener:
            socket.send_fds(outside, [b"x"], [listener.fileno()])
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
