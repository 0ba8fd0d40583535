"""Wall clocks that jump, each victim's own: a library that is preloaded into its processes (``clock.c``).

libfaketime would be the ready-made one, but with it (0.9.10) ``time.sleep`` of Python 3.11 fails.
"""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path

from hf_diloco.errors import DiLoCoError, UnsupportedError

_SOURCE = Path(__file__).with_name("clock.c")


def can_jump() -> bool:
    """Whether there is a C compiler, which this takes."""
    return shutil.which("cc") is not None


def build(directory: Path) -> Path:
    """Compile the library; its path.

    Raises:
        UnsupportedError: there is no C compiler.
        DiLoCoError: it cannot compile it.
    """
    if not can_jump():
        raise UnsupportedError("clock jumps need a C compiler (cc). Install one, or leave clock_jump out.")
    library = directory / "clock.so"
    command = ["cc", "-O2", "-shared", "-fPIC", "-o", str(library), str(_SOURCE), "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise DiLoCoError(f"the library for clock jumps cannot be compiled:\n{done.stderr[-2000:]}")
    return library


def environment(library: Path, clock: Path) -> dict[str, str]:
    """Of a process whose wall clock is off by what the file ``clock`` says."""
    set_off(clock, 0)
    return {"LD_PRELOAD": str(library), "HF_DILOCO_CHAOS_CLOCK": str(clock)}


def set_off(clock: Path, seconds: int) -> None:
    """From now on the clock is off by so many seconds."""
    with clock.open("r+b" if clock.exists() else "w+b") as file:  # in place: processes have it mapped
        file.write(struct.pack("=q", seconds))
