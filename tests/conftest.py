"""For all tests: every one says what it needs, and none leaves a process behind."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Iterator

# Before anything imports torch or a Hugging Face library; for the processes that tests start too.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import psutil
import pytest

# A suite that runs in the background ignores Ctrl-C, and so would all processes that it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

KINDS = {"fast", "distributed", "examples"}
_LINGER_SECONDS = 2.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    wrong = []
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        kinds = KINDS & marks
        if len(kinds) != 1 and not (not kinds and "long" in marks):  # too long for `fast`, and no processes
            wrong.append(f"{item.nodeid}: {', '.join(sorted(kinds)) or 'none'}")
    if wrong:
        raise pytest.UsageError(f"every test must carry exactly one of {sorted(KINDS)}:\n  " + "\n  ".join(wrong))


@pytest.fixture(autouse=True)
def no_process_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test with real processes that leaves some running, and kills them. Only children of this process."""
    if KINDS & {mark.name for mark in request.node.iter_markers()} <= {"fast"}:
        yield
        return
    me = psutil.Process()
    before = set(me.children(recursive=True))
    yield
    deadline = time.monotonic() + _LINGER_SECONDS
    while (left := _running(set(me.children(recursive=True)) - before)) and time.monotonic() < deadline:
        time.sleep(0.05)
    shown = [f"pid {process.pid}: {name}" for process, name in left.items()]
    for process in left:
        _kill(process)
    psutil.wait_procs(list(left), timeout=10)
    assert not shown, "processes left behind (killed now):\n  " + "\n  ".join(shown)


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """A command that is run in this process sets up logging for good, to a stream that is this test's only."""
    root, ours = logging.getLogger(), logging.getLogger("hf_diloco")
    handlers, levels = list(root.handlers), (root.level, ours.level)
    yield
    for handler in set(root.handlers) - set(handlers):
        root.removeHandler(handler)
        handler.close()
    root.setLevel(levels[0])
    ours.setLevel(levels[1])
    logging.captureWarnings(False)


@pytest.fixture(autouse=True)
def no_lease_left() -> Iterator[None]:
    """Learners of the next test have the same numbers, and a data set of this one may be alive yet."""
    yield
    if lease := sys.modules.get("hf_diloco.learner.lease"):
        lease._leases.clear()


def _running(processes: set[psutil.Process]) -> dict[psutil.Process, str]:
    found = {}
    for process in processes:
        try:
            if process.status() != psutil.STATUS_ZOMBIE:
                found[process] = " ".join(process.cmdline())[:200]
        except psutil.NoSuchProcess:
            continue
    return found


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return
