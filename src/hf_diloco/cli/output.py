"""What a child of ``hf-diloco launch`` prints, on its way into its log.

The child prints into a file in memory, and its guard copies that into the log. So who prints never feels the disk:
there is no error when it is full, and no wait when it is slow. It does not feel the death of its guard either, as it
would with a pipe: that breaks, or fills up, when nobody reads it.

Only the standard library is loaded here, for the sake of the guard.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import threading

_KEPT_BYTES = 2**20  # in memory, while the log cannot be written; what is older is lost
_TAIL_BYTES = 2**16
_CHUNK_BYTES = 2**16
_COPY_EVERY_SECONDS = 0.1
_PUNCH_HOLE = 0x01 | 0x02  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE


def new_output() -> int:
    """A file in memory that several processes may append to. The caller closes it.

    Raises:
        OSError: there is no memory or no file descriptor left.
    """
    output = os.memfd_create("hf-diloco-output")
    fcntl.fcntl(output, fcntl.F_SETFL, os.O_APPEND)
    return output


def last_lines(output: int, num_lines: int) -> str:
    """The last lines of what was printed, whether or not they are in the log."""
    start = max(0, os.fstat(output).st_size - _TAIL_BYTES)
    text = os.pread(output, _TAIL_BYTES, start).decode("utf-8", errors="replace")
    return "\n".join(text.rstrip().split("\n")[-num_lines:])


class LogWriter(threading.Thread):
    """Copies an output into a log, and frees the memory that it took.

    While the log cannot be written, the last part of the output is kept, and the rest is lost; a line in the log says
    how much. A thread of its own, so that a slow disk keeps the guard from nothing.

    Args:
        output: from :func:`new_output`.
        log: open for writing.
    """

    def __init__(self, output: int, log: int) -> None:
        super().__init__(name="log", daemon=True)  # a disk that hangs keeps nobody from ending
        self._output, self._log = output, log
        self._position = 0  # of the first byte that is neither in the log nor lost
        self._num_lost = 0  # bytes, since the last line about them
        self._num_freed = 0
        self._libc = ctypes.CDLL(None)
        self._ended = threading.Event()

    def run(self) -> None:
        """Copy until :meth:`close`, and then what is left."""
        while not self._ended.wait(_COPY_EVERY_SECONDS):
            self._copy()
        self._copy()

    def close(self, timeout_seconds: float) -> None:
        """Copy what is left and end; with a disk that hangs, give up after ``timeout_seconds``."""
        self._ended.set()
        self.join(timeout_seconds)

    def _copy(self) -> None:
        end = os.fstat(self._output).st_size
        if end < self._position:  # somebody has truncated it: `echo ... > /dev/stderr`
            self._position = self._num_freed = 0
        while self._position < end and self._write(os.pread(self._output, _CHUNK_BYTES, self._position)):
            continue
        kept_from = max(0, end - _KEPT_BYTES)
        if self._position < kept_from:
            self._num_lost += kept_from - self._position
            self._position = kept_from
        self._free(kept_from)

    def _write(self, chunk: bytes) -> bool:
        """Write some of ``chunk``. Returns whether more can be written."""
        try:
            if self._num_lost:
                line = f"\n[hf-diloco: {self._num_lost:,} bytes of output are lost: this log could not be written]\n"
                if os.write(self._log, line.encode()) < len(line):
                    return False  # the disk was full again at once
                self._num_lost = 0
            self._position += os.write(self._log, chunk)
        except OSError:
            return False
        return True

    def _free(self, end: int) -> None:
        """Give back the memory of what lies before ``end``; only whole pages are given back."""
        end -= end % mmap.PAGESIZE
        if end > self._num_freed:
            self._libc.fallocate(
                self._output, _PUNCH_HOLE, ctypes.c_int64(self._num_freed), ctypes.c_int64(end - self._num_freed)
            )
            self._num_freed = end
