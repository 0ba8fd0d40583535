"""The network between learners and syncer, as bad as one likes: delays, thin lines, silence, resets, lost bytes.

One thread relays the connections of all learners to the door. This kernel family's own means (netem) are not there
everywhere; a proxy needs no privilege.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

_BLOCK_BYTES = 1 << 16
_MOST_QUEUED = 64  # blocks under way in one direction of one connection
_TURN_SECONDS = 0.02  # of a thin line, for one connection
UP, DOWN = "up", "down"  # learner to syncer; syncer to learner


@dataclass(frozen=True, kw_only=True)
class Weather:
    """One bad thing about a learner's network, for as long as it is in force."""

    directions: tuple[str, ...] = (UP, DOWN)
    silent: bool = False  # nothing is forwarded, nothing is closed
    bytes_per_second: float | None = None
    delay_seconds: float = 0.0
    jitter_seconds: float = 0.0  # up to so much more; the order within a connection stays


@dataclass
class _Direction:
    """What all connections of one learner share, one way."""

    open: asyncio.Event
    free_at: float = 0.0  # when the line has sent what was given to it


@dataclass(eq=False)
class _Connection:
    """One that is relayed."""

    writers: tuple[asyncio.StreamWriter, asyncio.StreamWriter]
    to_drop: dict[str, int] = field(default_factory=lambda: {UP: 0, DOWN: 0})  # bytes still to vanish


@dataclass
class _Lane:
    """One learner's way to the syncer."""

    directions: dict[str, _Direction]
    weather: dict[int, Weather] = field(default_factory=dict)  # by number of the fault
    server: asyncio.Server | None = None
    connections: set[_Connection] = field(default_factory=set)
    num_bytes: int = 0


class Proxy:
    """Relays learners to the syncer. Use as a context manager; the methods are for any one thread.

    Args:
        seed: of the jitter.
    """

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self._lanes: dict[int, _Lane] = {}
        self._target = ("127.0.0.1", 0)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="hf-diloco-chaos-proxy", daemon=True)
        self._tasks: set[asyncio.Task[None]] = set()

    def __enter__(self) -> Proxy:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # -------------------------------------------------------------------------------------------------- what it is told

    def aim(self, host: str, port: int) -> None:
        """Where the syncer listens."""
        self._target = (host, port)

    def serve(self, learner_id: int, listener: socket.socket) -> None:
        """Relay what comes to this socket, which is the proxy's from now on; it takes the place of the last one."""
        asyncio.run_coroutine_threadsafe(self._serve(learner_id, listener), self._loop).result(10)

    def begin(self, learner_id: int, number: int, weather: Weather) -> None:
        """From now on this weather too, under a number of the caller's."""
        self._call(lambda: self._change(learner_id, lambda lane: lane.weather.update({number: weather})))

    def end(self, learner_id: int, number: int) -> None:
        """That weather is over."""
        self._call(lambda: self._change(learner_id, lambda lane: lane.weather.pop(number, None)))

    def reset(self, learner_id: int) -> int:
        """Reset all connections of this learner; how many there were."""
        return int(self._call(lambda: self._reset(learner_id)))

    def drop(self, learner_id: int, num_bytes: int) -> int:
        """The next so many bytes of each connection there is vanish, both ways; how many connections there were."""

        def drop() -> int:
            connections = self._lane(learner_id).connections
            for connection in connections:
                connection.to_drop = {UP: num_bytes, DOWN: num_bytes}
            return len(connections)

        return int(self._call(drop))

    def moved(self, learner_id: int) -> int:
        """Bytes relayed for this learner so far, both ways."""
        lane = self._lanes.get(learner_id)
        return lane.num_bytes if lane else 0

    # --------------------------------------------------------------------------------------------- in the loop's thread

    def _call(self, function: Callable[[], Any]) -> Any:
        async def call() -> Any:
            return function()

        return asyncio.run_coroutine_threadsafe(call(), self._loop).result(10)

    def _lane(self, learner_id: int) -> _Lane:
        if learner_id not in self._lanes:
            self._lanes[learner_id] = _Lane({name: _Direction(asyncio.Event()) for name in (UP, DOWN)})
            self._change(learner_id, lambda lane: None)
        return self._lanes[learner_id]

    def _change(self, learner_id: int, change: Callable[[_Lane], object]) -> None:
        lane = self._lane(learner_id)
        change(lane)
        for name, direction in lane.directions.items():
            if any(weather.silent and name in weather.directions for weather in lane.weather.values()):
                direction.open.clear()
            else:
                direction.open.set()

    def _reset(self, learner_id: int) -> int:
        connections = list(self._lane(learner_id).connections)
        for connection in connections:
            for writer in connection.writers:
                _abort(writer)
        return len(connections)

    async def _serve(self, learner_id: int, listener: socket.socket) -> None:
        lane = self._lane(learner_id)
        if lane.server:
            lane.server.close()
        lane.server = await asyncio.start_server(
            lambda reader, writer: self._relay(lane, reader, writer), sock=listener, limit=_BLOCK_BYTES
        )

    async def _relay(self, lane: _Lane, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            await lane.directions[UP].open.wait()
            other_reader, other_writer = await asyncio.open_connection(*self._target, limit=_BLOCK_BYTES)
        except (OSError, asyncio.CancelledError):  # the syncer is not there, or this is the end
            _abort(writer)
            return
        connection = _Connection((writer, other_writer))
        lane.connections.add(connection)
        try:
            await asyncio.gather(
                self._pump(lane, connection, UP, reader, other_writer),
                self._pump(lane, connection, DOWN, other_reader, writer),
            )
        except asyncio.CancelledError:  # the end; passed on, it would be logged as an error
            for each in connection.writers:
                _abort(each)
        finally:
            lane.connections.discard(connection)
        for each in connection.writers:
            each.close()

    async def _pump(
        self,
        lane: _Lane,
        connection: _Connection,
        name: str,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        """One direction of one connection, end of stream included, until that end."""
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_MOST_QUEUED)
        sender = asyncio.create_task(self._send(lane, connection, name, queue, writer))
        try:
            block, due = b"x", 0.0
            while block:
                try:
                    block = await reader.read(_BLOCK_BYTES)
                except OSError:
                    block = b""
                due = max(due, self._loop.time() + self._delay(lane, name))
                await queue.put((due, block))
            await sender
        finally:
            sender.cancel()

    async def _send(
        self,
        lane: _Lane,
        connection: _Connection,
        name: str,
        queue: asyncio.Queue[tuple[float, bytes]],
        writer: asyncio.StreamWriter,
    ) -> None:
        lost = False
        while True:
            due, block = await queue.get()
            await asyncio.sleep(due - self._loop.time())
            await lane.directions[name].open.wait()
            if not block:
                break
            if connection.to_drop[name]:
                dropped = min(connection.to_drop[name], len(block))
                connection.to_drop[name] -= dropped
                block = block[: len(block) - dropped]
            lane.num_bytes += len(block)
            while block and not lost:  # else: nobody takes it; go on to the end of the stream
                piece = await self._wait_for_line(lane, name, block)
                block = block[len(piece) :]
                try:
                    writer.write(piece)
                    await writer.drain()
                except OSError:
                    lost = True
        with contextlib.suppress(OSError):
            writer.write_eof()

    def _delay(self, lane: _Lane, name: str) -> float:
        return sum(
            weather.delay_seconds + self._random.uniform(0, weather.jitter_seconds)
            for weather in lane.weather.values()
            if name in weather.directions
        )

    async def _wait_for_line(self, lane: _Lane, name: str, block: bytes) -> bytes:
        """As much of the block as the line takes at once; connections take turns, so that none waits behind a heap."""
        rates = [
            weather.bytes_per_second
            for weather in lane.weather.values()
            if weather.bytes_per_second and name in weather.directions
        ]
        if not rates:
            return block
        piece = block[: max(int(min(rates) * _TURN_SECONDS), 1)]
        direction, now = lane.directions[name], self._loop.time()
        direction.free_at = max(direction.free_at, now) + len(piece) / min(rates)
        await asyncio.sleep(direction.free_at - now)
        return piece

    async def _end(self) -> None:
        for lane in self._lanes.values():
            if lane.server:
                lane.server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _abort(writer: asyncio.StreamWriter) -> None:
    """End a connection with RST."""
    sock = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
