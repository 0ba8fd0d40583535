"""far_end.py in a process of its own."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
from links_world import (
    PATIENCE,
    TOKEN,
)


class FarEnd:
    """far_end.py in a process of its own."""

    def __init__(self, *arguments: object, pass_fds: tuple[int, ...] = ()) -> None:
        command = [sys.executable, str(Path(__file__).with_name("far_end.py")), *map(str, arguments)]
        environment = os.environ | {"TEST_TOKEN": TOKEN}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment, pass_fds=pass_fds)
        self._said: queue.SimpleQueue[dict] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self._said.put(json.loads(line))

    def hear(self, wanted: Callable[[dict], bool] | str) -> dict:
        """The next line of this kind."""
        seen = []
        while True:
            try:
                seen.append(self._said.get(timeout=PATIENCE))
            except queue.Empty:
                raise AssertionError(f"not said within {PATIENCE} s; said {seen[-10:]}") from None
            if wanted in seen[-1] if isinstance(wanted, str) else wanted(seen[-1]):
                return seen[-1]

    def end(self) -> None:
        """kill -9, and wait for all that it started."""
        try:
            family = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            family = []
        self.process.kill()
        self.process.wait()
        ours = [process for process in family if process.is_running() and "hf_diloco" in " ".join(_command(process))]
        _, alive = psutil.wait_procs(ours, timeout=10)
        self.process.stdin.close()
        self._reader.join()
        self.process.stdout.close()
        psutil.wait_procs(family, timeout=10)
        assert not alive, f"outlived their parent by 10 s: {alive}"


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []
