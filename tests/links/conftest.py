from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Iterator

import psutil
import pytest
from links_world import descendants


def _open_files() -> set[str]:
    gc.collect()
    links = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            links.add(f"{number} {os.readlink(f'/proc/self/fd/{number}')}")
    return links


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No process, thread or descriptor outlives a test; what does is ended, and the test fails."""
    processes, threads, files = set(descendants()), set(threading.enumerate()), _open_files()
    yield
    left = []
    for process in set(descendants()) - processes:  # another test's stay: multiprocessing's tracker
        try:
            left.append(f"process {process.pid} {process.status()} {process.cmdline()}")
            process.kill()
            process.wait(10)
        except psutil.NoSuchProcess:
            continue
    left += [f"thread {thread.name}" for thread in set(threading.enumerate()) - threads]
    if len(now := _open_files()) > len(files):
        left.append(f"descriptors {now - files}")
    assert not left, left
