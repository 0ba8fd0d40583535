"""What has arrived over links and waits for the one thread that handles it."""

from __future__ import annotations

import queue
import threading
from collections import Counter

from hf_diloco.links.base import LinkEvent, Received

_MAX_MESSAGES = 10_000  # of one link
_MAX_BYTES = 64 << 20  # of one link, as JSON; payloads are held back where they come in


class Inbox:
    """Events of links, by number of the link; a link that sends faster than they are handled is found out."""

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[tuple[int, LinkEvent, int]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_messages: Counter[int] = Counter()
        self._num_bytes: Counter[int] = Counter()

    def put(self, number: int, event: LinkEvent, num_bytes: int = 0) -> bool:
        """Queue an event of this link. False: it has too much here already, and the message is not taken."""
        if isinstance(event, Received):
            with self._lock:
                if self._num_messages[number] >= _MAX_MESSAGES or self._num_bytes[number] + num_bytes > _MAX_BYTES:
                    return False
                self._num_messages[number] += 1
                self._num_bytes[number] += num_bytes
        self._events.put((number, event, num_bytes))
        return True

    def get(self, timeout_seconds: float) -> tuple[int, LinkEvent] | None:
        """The next event and the number of its link, or None after ``timeout_seconds``."""
        try:
            number, event, num_bytes = self._events.get(timeout=max(0.0, timeout_seconds))
        except queue.Empty:
            return None
        if isinstance(event, Received):
            with self._lock:
                self._num_messages[number] -= 1
                self._num_bytes[number] -= num_bytes
                if not self._num_messages[number]:
                    del self._num_messages[number], self._num_bytes[number]
        return number, event

    def clear(self) -> None:
        """Forget all: payloads in here would keep shared memory."""
        while self.get(0.0):
            pass
