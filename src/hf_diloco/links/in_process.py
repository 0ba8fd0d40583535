"""Links inside one process: the same guarantees as ``links.rpc`` without processes or sockets, and faults on demand.

For tests and for learners that are threads of the syncer's process. Nothing here starts a thread: a link that went
down comes back when the learner's end next calls ``receive``, or at ``heal``.
"""

from __future__ import annotations

import json
import random
import threading
import time
from dataclasses import dataclass

from torch import Tensor

from hf_diloco.core.message_json import from_wire, to_wire
from hf_diloco.core.messages import Message
from hf_diloco.errors import LearnerRefusedError
from hf_diloco.links.base import LinkDown, LinkEvent, LinkUp, Received, check_payload
from hf_diloco.links.received import LentReceived

_POISON = 0xA5  # written over released payloads, so that a test notices who still reads them


def _copied(learner_id: int, message: Message, payload: Tensor | None) -> LentReceived:
    """What arrives at the other end: a message that went through JSON, and bytes of its own."""
    arrived = from_wire(json.loads(json.dumps(to_wire(message))))
    if payload is None:
        return LentReceived(learner_id, arrived)
    copy = payload.clone()
    return LentReceived(learner_id, arrived, copy, [lambda: copy.fill_(_POISON)])


@dataclass(frozen=True, kw_only=True)
class Weather:
    """What links suffer at random."""

    loss_chance: float = 0.0  # that a link goes down when something is sent on it, which is lost with all under way
    max_down_seconds: float = 0.0  # until it may come back
    max_delay_seconds: float = 0.0  # of a message; those after it on the same link wait for it


class _Inbox:
    """Events of one end, in order; with ``rng``, messages without payload sometimes overtake earlier payloads."""

    def __init__(self, changed: threading.Condition, rng: random.Random | None, max_delay_seconds: float) -> None:
        self._changed, self._rng, self._max_delay_seconds = changed, rng, max_delay_seconds
        self._events: list[tuple[float, LinkEvent]] = []  # with the time at which it may be received

    def __bool__(self) -> bool:
        return bool(self._events)

    def put(self, event: LinkEvent) -> None:
        position, arrives_at = len(self._events), 0.0
        if self._rng and isinstance(event, Received):
            if self._max_delay_seconds:
                arrives_at = time.monotonic() + self._rng.uniform(0.0, self._max_delay_seconds)
            while event.payload is None and position and self._may_overtake(event, self._events[position - 1][1]):
                if self._rng.random() < 0.5:
                    break
                position -= 1
        self._events.insert(position, (arrives_at, event))
        self._changed.notify_all()

    @staticmethod
    def _may_overtake(event: LinkEvent, earlier: LinkEvent) -> bool:
        return event.learner_id != earlier.learner_id or (isinstance(earlier, Received) and earlier.payload is not None)

    def lose(self, learner_id: int) -> None:
        """Forget what has not been received yet of this learner's link."""
        self._events = [
            (arrives_at, event)
            for arrives_at, event in self._events
            if not (isinstance(event, Received) and event.learner_id == learner_id)
        ]

    def clear(self) -> None:
        self._events.clear()

    def has_down(self, learner_id: int) -> bool:
        """Whether a LinkDown is still to be received: then a LinkUp before it tells of a link that is gone."""
        return any(isinstance(event, LinkDown) and event.learner_id == learner_id for _, event in self._events)

    def get(self, timeout_seconds: float) -> LinkEvent | None:
        deadline = time.monotonic() + timeout_seconds
        while True:
            now = time.monotonic()
            if (position := self._first_arrived(now)) is not None:
                return self._events.pop(position)[1]
            if now >= deadline:
                return None
            self._changed.wait(min([deadline, *(at for at, _ in self._events if at > now)]) - now)

    def _first_arrived(self, now: float) -> int | None:
        """Position of the first event that may be received, and does not stand behind one of its link that may not."""
        waiting: set[int] = set()
        for position, (arrives_at, event) in enumerate(self._events):
            if arrives_at > now:
                waiting.add(event.learner_id)
            elif event.learner_id not in waiting:
                return position
        return None


class InProcessHub:
    """The syncer's ends of links to learners in the same process.

    ``connect`` makes the learner's end. ``cut`` takes a link down (what was under way is lost) until ``heal``.
    ``open`` after ``close`` is a syncer that came back: links that were not closed come up again.

    Args:
        seed: if given, messages without payload overtake earlier payloads at random, as they may.
        weather: what else happens at random; needs a seed.
    """

    def __init__(self, *, seed: int | None = None, weather: Weather | None = None) -> None:
        self.address = "in-process"
        self._changed = threading.Condition(threading.RLock())
        self._rng = None if seed is None else random.Random(seed)
        self.weather = weather or Weather()
        self._inbox = _Inbox(self._changed, self._rng, self.weather.max_delay_seconds)
        self._is_open = False
        self._ends: list[InProcessLearnerLink] = []  # opened and not closed
        self._up: dict[int, InProcessLearnerLink] = {}
        self._known: set[int] = set()  # whose LinkUp the syncer has received
        self._is_cut: set[int] = set()
        self._down_until: dict[int, float] = {}
        self._moved: dict[int, list[int]] = {}

    def connect(self, learner_id: int, incarnation: str = "0") -> InProcessLearnerLink:
        """The learner's end of a link; ``open`` it to begin."""
        return InProcessLearnerLink(self, learner_id, incarnation)

    def cut(self, learner_id: int, reason: str = "cut by the test") -> None:
        """Take this learner's link down until ``heal``."""
        with self._changed:
            self._is_cut.add(learner_id)
            self._take_down(learner_id, reason)

    def heal(self, learner_id: int) -> None:
        """Undo ``cut``: the link comes up at once."""
        with self._changed:
            self._is_cut.discard(learner_id)
            for end in list(self._ends):
                self._bring_up(end)

    def open(self) -> None:
        """Let learners link. What was sent to a syncer before this one is not for it."""
        with self._changed:
            self._inbox.clear()
            self._is_open = True
            for end in list(self._ends):
                self._bring_up(end)

    def send(self, learner_ids: list[int], message: Message, payload: Tensor | None = None) -> None:
        """Queue one message for several learners; dropped for those whose link is down."""
        check_payload(payload)
        with self._changed:
            for learner_id in learner_ids:
                if learner_id in self._known and learner_id in self._up and not self._is_lost(learner_id):
                    self._up[learner_id]._inbox.put(_copied(learner_id, message, payload))
                    self._count(learner_id, 1, payload)

    def receive(self, timeout_seconds: float) -> LinkEvent | None:
        """The next event of any link, or None after ``timeout_seconds``."""
        with self._changed:
            event = self._inbox.get(timeout_seconds)
            if isinstance(event, LinkUp) and not self._inbox.has_down(event.learner_id):
                self._known.add(event.learner_id)
            elif isinstance(event, LinkDown):
                self._known.discard(event.learner_id)
            return event

    def drop(self, learner_id: int, reason: str) -> None:
        """End this learner's link; it comes back when the learner next calls ``receive``."""
        with self._changed:
            self._take_down(learner_id, reason)

    def bytes_moved(self, learner_id: int) -> tuple[int, int]:
        """Payload bytes received from and sent to this learner so far."""
        with self._changed:
            received, sent = self._moved.get(learner_id, (0, 0))
            return received, sent

    def close(self, *, drain_seconds: float = 0.0) -> None:
        """End all links. What was sent before is still received at the other end."""
        with self._changed:
            self._is_open = False
            for learner_id in list(self._up):
                self._take_down(learner_id, "the syncer closed its links", lose=False)

    def _is_lost(self, learner_id: int) -> bool:
        """The link is lost at random, just now."""
        if not self._rng or self._rng.random() >= self.weather.loss_chance:
            return False
        self._down_until[learner_id] = time.monotonic() + self._rng.uniform(0.0, self.weather.max_down_seconds)
        self._take_down(learner_id, "lost at random")
        return True

    def _bring_up(self, end: InProcessLearnerLink) -> None:
        learner_id = end.learner_id
        if end not in self._ends or self._up.get(learner_id) is end:
            return
        if time.monotonic() < self._down_until.get(learner_id, 0.0):
            return
        if not self._is_open or learner_id in self._is_cut:
            end._error = "link cut" if learner_id in self._is_cut else "the syncer does not listen"
            return
        if other := self._up.get(learner_id):
            if other._incarnation != end._incarnation:
                self._ends.remove(end)
                error = LearnerRefusedError(
                    f"learner id {learner_id} is already in use in this process; "
                    "give each learner its own HF_DILOCO_LEARNER_ID"
                )
                end._inbox.put(LinkDown(learner_id, str(error), fatal=error))
                return
            self._take_down(learner_id, "fenced by a new link of the same learner")
        self._up[learner_id] = end
        end._error = None
        self._inbox.put(LinkUp(learner_id))
        end._inbox.put(LinkUp(learner_id))

    def _take_down(self, learner_id: int, reason: str, lose: bool = True) -> None:
        if (end := self._up.pop(learner_id, None)) is None:
            return
        for inbox in (self._inbox, end._inbox):
            if lose:
                inbox.lose(learner_id)
            inbox.put(LinkDown(learner_id, reason))
        self._known.discard(learner_id)
        end._knows_up = False
        end._error = reason

    def _count(self, learner_id: int, direction: int, payload: Tensor | None) -> None:
        self._moved.setdefault(learner_id, [0, 0])[direction] += 0 if payload is None else payload.numel()


class InProcessLearnerLink:
    """The learner's end; made by :meth:`InProcessHub.connect`."""

    def __init__(self, hub: InProcessHub, learner_id: int, incarnation: str) -> None:
        self.learner_id, self._incarnation, self._hub = learner_id, incarnation, hub
        self._inbox = _Inbox(hub._changed, hub._rng, hub.weather.max_delay_seconds)
        self._knows_up = False  # LinkUp of the present link has been received: from now on sending makes sense
        self._error: str | None = None

    def open(self) -> None:
        """Link, now or when the hub opens."""
        with self._hub._changed:
            if self not in self._hub._ends:
                self._hub._ends.append(self)
            self._hub._bring_up(self)

    def send(self, message: Message, payload: Tensor | None = None) -> None:
        """Queue a message. Dropped silently while the link is down."""
        check_payload(payload)
        hub = self._hub
        with hub._changed:
            is_up = self._knows_up and hub._up.get(self.learner_id) is self
            if is_up and not hub._is_lost(self.learner_id):
                hub._inbox.put(_copied(self.learner_id, message, payload))
                hub._count(self.learner_id, 0, payload)

    def receive(self, timeout_seconds: float) -> LinkEvent | None:
        """The next event, or None after ``timeout_seconds``. A dropped link is taken up again here."""
        with self._hub._changed:
            event = self._wait(time.monotonic() + timeout_seconds)
            if isinstance(event, LinkUp):
                self._knows_up = not self._inbox.has_down(self.learner_id)
            return event

    def _wait(self, deadline: float) -> LinkEvent | None:
        while True:
            if not self._inbox:
                self._hub._bring_up(self)
            now = time.monotonic()
            comes_back_at = self._hub._down_until.get(self.learner_id, 0.0)
            until = min(deadline, comes_back_at) if comes_back_at > now else deadline
            event = self._inbox.get(max(until - now, 0.0))
            if event is not None or time.monotonic() >= deadline:
                return event

    def last_error(self) -> str | None:
        """Why the link is down; None while it is up."""
        return self._error

    def close(self, *, drain_seconds: float = 0.0) -> None:
        """Leave. What was sent before is still received by the syncer."""
        hub = self._hub
        with hub._changed:
            if self in hub._ends:
                hub._ends.remove(self)
            if hub._up.get(self.learner_id) is self:
                hub._take_down(self.learner_id, "the learner closed its link", lose=False)
