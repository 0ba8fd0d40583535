"""One thread that waits for file descriptors and timers, in each process of a link. Costs nothing while idle."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

logger = logging.getLogger(__name__)

READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


UNTOLD_TIMEOUT_SECONDS = 10.0  # what a learner goes by until the door has told it the run's link_timeout_seconds
SHORTEST_LOCAL_TIMEOUT_SECONDS = 2.0  # between trainer and courier, which ...
LOCAL_TICK_SECONDS = 0.5  # ... tell each other so often that they live, before and after that


def tick_seconds(link_timeout_seconds: float) -> float:
    """How often two processes tell each other that they live."""
    return min(2.0, link_timeout_seconds / 5)


class Loop:
    """Callbacks run one at a time in the thread that is in :meth:`run`; one that raises is logged, the loop goes on."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._selector.register(self._wake_read, READ, self._woken)
        self._soon: deque[Callable[[], None]] = deque()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._stopping = False
        self._thread: threading.Thread | None = None

    def start(self, name: str) -> None:
        """Run in a daemon thread of this name."""
        self._thread = threading.Thread(target=self.run, name=name, daemon=True)
        self._thread.start()

    def call_soon(self, callback: Callable[[], None]) -> None:
        """Run this in the loop's thread. From any thread."""
        self._soon.append(callback)
        try:
            self._wake_write.send(b"x")
        except BlockingIOError:  # it has been woken often enough
            pass
        except OSError:
            if not self._stopping:
                raise

    def call_later(self, seconds: float, callback: Callable[[], None]) -> None:
        """Run this in ``seconds``. From the loop's thread, or before it runs."""
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._count), callback))

    def every(self, seconds: float, callback: Callable[[], None]) -> None:
        """Run this every ``seconds``."""

        def again() -> None:
            self.call_later(seconds, again)
            callback()

        self.call_later(seconds, again)

    def watch(self, sock: socket.socket, events: int, callback: Callable[[int], None]) -> None:
        """Call back with the events that are there. In the loop's thread, or before it runs."""
        try:
            self._selector.modify(sock, events, callback)
        except KeyError:
            self._selector.register(sock, events, callback)

    def forget(self, sock: socket.socket) -> None:
        """Stop to watch. In the loop's thread."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(sock)

    def run(self) -> None:
        """Work until :meth:`stop`."""
        while not self._stopping:
            timeout = max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else None
            for key, events in self._selector.select(timeout):
                self._guarded(key.data, events)
            while self._soon:
                self._guarded(self._soon.popleft())
            while self._timers and self._timers[0][0] <= time.monotonic():
                self._guarded(heapq.heappop(self._timers)[2])
        self._selector.close()
        self._wake_read.close()
        self._wake_write.close()

    def stop(self) -> None:
        """End :meth:`run` and wait for the thread, if there is one. From any thread."""
        self._stopping = True
        if self._thread is None:
            return
        with contextlib.suppress(OSError):
            self._wake_write.send(b"x")
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _woken(self, _events: int) -> None:
        try:
            while self._wake_read.recv(4096):
                pass
        except BlockingIOError:
            pass

    @staticmethod
    def _guarded(callback: Callable[..., None], *args: object) -> None:
        try:
            callback(*args)
        except Exception:
            logger.exception("a callback of the link loop failed")
