"""A network of its own for learners of a test, joined to this one by a cable (veth); and learners' links in it."""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import subprocess
import threading
from collections.abc import Callable

import pytest
from links_world import eventually

from hf_diloco.links.rpc import RpcLearnerLink

_CLONE_NEWNET = 0x40000000
_NUMBERS = itertools.count()


class Network:
    """``address`` is this host's, seen from there. Skips the test where networks cannot be made."""

    def __init__(self) -> None:
        if os.geteuid() or not all(map(shutil.which, ("ip", "unshare", "nsenter"))):
            pytest.skip("a network of its own needs root, ip, unshare and nsenter")
        number = next(_NUMBERS) % 64 + 64 * (os.getpid() % 1000)
        subnet = f"10.{200 + number // 16384}.{number // 64 % 256}"
        first = number % 64 * 4 + 1
        self.address, self.far_address = f"{subnet}.{first}", f"{subnet}.{first + 1}"
        self._holder = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
        try:
            self._lay_cable(f"hfd{number}")
        except BaseException:
            self.close()
            raise

    def _lay_cable(self, name: str) -> None:
        pid = str(self._holder.pid)
        own = os.readlink("/proc/self/ns/net")
        eventually(lambda: os.readlink(f"/proc/{pid}/ns/net") != own or self._holder.poll() is not None, "a network")
        added = subprocess.run(
            ["ip", "link", "add", name, "type", "veth", "peer", "name", "far", "netns", pid],
            capture_output=True, text=True,
        )  # fmt: skip
        if added.returncode:
            pytest.skip(f"no veth pair: {added.stderr.strip()}")
        there = ["nsenter", "--net", "--target", pid]
        for command in (
            ["ip", "address", "add", f"{self.address}/30", "dev", name],
            ["ip", "link", "set", name, "up"],
            [*there, "ip", "address", "add", f"{self.far_address}/30", "dev", "far"],
            [*there, "ip", "link", "set", "far", "up"],
            [*there, "ip", "link", "set", "lo", "up"],
        ):
            subprocess.run(command, check=True)

    def run(self, function: Callable[[], None]) -> None:
        """Call ``function`` in a thread that is in this network; so are all threads and processes it starts."""
        errors: list[BaseException] = []

        def inside() -> None:
            try:
                with open(f"/proc/{self._holder.pid}/ns/net", encoding="ascii") as namespace:
                    if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
                        raise OSError(ctypes.get_errno(), "setns")
                function()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=inside)
        thread.start()
        thread.join()
        if errors:
            raise errors[0]

    def close(self) -> None:
        """The network ends with the last process in it, and the cable with the network."""
        self._holder.kill()
        self._holder.wait()


class DistantLearnerLink(RpcLearnerLink):
    """A learner's end in another network."""

    network: Network

    def open(self) -> None:
        self.network.run(super().open)
