"""Live reads: long-polls that wait for one answer, and SSE connections that follow a stream (§5.7, §5.8).

Both wait on a topic (a stream or a bucket) and are woken after each batch that changed it. Nothing is queued for a slow
client: its follower stops, and continues from its offset when the client has caught up. So a slow client costs one
bounded buffer.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from copy import copy
from typing import Any, TypeVar

from millstream.errors import MillstreamError, Unavailable
from millstream.pending import Pending
from millstream.protocol.cursors import JITTER_SECONDS, Cursor, next_interval, parse_cursor
from millstream.protocol.offsets import format_offset
from millstream.protocol.sse import HEARTBEAT, encode_control, encode_data
from millstream.server.http.limits import ReadLimits
from millstream.server.http.messages import Request, Sink
from millstream.server.http.metrics import Metrics
from millstream.shard.listeners import Topic
from millstream.shard.reader import ReadResult
from millstream.shard.shard import Shard
from millstream.streams.state import Stream
from millstream.units import Offset

logger = logging.getLogger("millstream.server")

T = TypeVar("T")


class LiveReaders:
    """Counts live reads, and caches what several of them need at once."""

    def __init__(self, shard: Shard, limits: ReadLimits, metrics: Metrics) -> None:
        self.shard = shard
        self.limits = limits
        self._metrics = metrics
        self.live: set[LongPoll | Follower] = set()
        # The last encoded events: after an append nearly every follower of the stream needs the same ones.
        self._encoded: tuple[tuple[int, int, int, bool, int], bytes] = ((0, 0, 0, False, 0), b"")

    def with_limits(self, limits: ReadLimits) -> LiveReaders:
        """The same readers, counted and ended together, with other limits."""
        readers = copy(self)
        readers.limits = limits
        return readers

    def measure(self, request: Request, live: str) -> None:
        """Measure a live read separately, because its duration is mostly waiting."""
        request.series = self._metrics.series("GET", live)

    def check_room(self, topic: Topic) -> None:
        if (
            len(self.live) >= self.limits.live_readers_max
            or self.shard.listeners.count(topic) >= self.limits.live_readers_per_stream_max
        ):
            raise Unavailable("there are too many live reads", code="too_many_live_readers", retry_after_seconds=5)

    def end_all(self) -> None:
        """The server is stopping: end each live read as if its time were up."""
        for reader in tuple(self.live):
            reader.end()

    def interval(self, echoed: str | None) -> int:
        """The interval for a live answer's cursor, given the cursor that the client echoed."""
        clock = self.shard.clock
        cursor = parse_cursor(echoed) if echoed is not None else None
        return next_interval(clock.now_ms(), cursor, clock.uniform(*JITTER_SECONDS) if cursor is not None else 0.0)

    def events(self, stream: Stream, start: int, result: ReadResult, interval: int) -> bytes:
        """The data event of a read and the control event that follows it."""
        # These values determine the rest of the result: whether it reaches the tail.
        up_to_date = result.up_to_date and self.shard.is_current()
        key = (stream.incarnation, start, result.next_offset, result.closed or not up_to_date, interval)
        if self._encoded[0] != key:
            token = format_offset(result.next_offset)
            data = encode_data(stream.content_type, result.pieces, token)
            cursor = str(Cursor(interval, stream.incarnation, result.next_offset))
            control = encode_control(token, cursor=cursor, up_to_date=up_to_date, closed=result.closed)
            self._encoded = (key, data + control)
        return self._encoded[1]


class LongPoll:
    """Waits until `is_ready` or until the time is up; then `over` is settled."""

    def __init__(self, readers: LiveReaders, topic: Topic, is_ready: Callable[[], bool]) -> None:
        readers.check_room(topic)
        self._readers = readers
        self._topic = topic
        self._is_ready = is_ready
        self.over: Pending[None] = Pending(None, on_abandon=self._stop)
        readers.live.add(self)
        readers.shard.listeners.listen(topic, self)
        self._timer = asyncio.get_running_loop().call_later(readers.limits.long_poll_seconds, self._finish)

    def wake(self) -> None:
        if self._is_ready():
            self._finish()

    def end(self) -> None:
        self._finish()

    def _finish(self) -> None:
        self._stop()
        self.over.settle()

    def _stop(self) -> None:
        self._timer.cancel()
        self._readers.shard.listeners.unlisten(self._topic, self)
        self._readers.live.discard(self)


class Follower(ABC):
    """A body stream that a topic wakes, until it ends itself or its connection's time is up.

    Subclasses implement `_advance`: write at most one piece, and return whether to continue.
    """

    def __init__(self, readers: LiveReaders, topic: Topic) -> None:
        readers.check_room(topic)
        self._readers = readers
        self._topic = topic
        self._sink: Sink | None = None
        self._is_blocked = False
        self._timers: list[asyncio.TimerHandle] = []
        self._fetching: asyncio.Task[None] | None = None

    @abstractmethod
    def _advance(self) -> bool: ...

    def start(self, sink: Sink) -> None:
        self._sink = sink
        self._readers.live.add(self)
        self._readers.shard.listeners.listen(self._topic, self)
        loop, limits = asyncio.get_running_loop(), self._readers.limits
        lifetime = loop.call_later(limits.sse_lifetime_seconds, self._finish)
        heartbeat = loop.call_later(limits.sse_heartbeat_seconds, self._beat)
        self._timers = [lifetime, heartbeat]
        self.wake()

    def wake(self) -> None:
        while self._sink is not None and not self._is_blocked and self._fetching is None and self._advance():
            pass

    def _fetch(self, work: Coroutine[Any, Any, T], send: Callable[[T], object]) -> None:
        """Send what the cold tier returns and continue from there. Until then nothing is sent."""

        async def run() -> None:
            try:
                result = await work
            except MillstreamError as error:
                logger.warning("a live read ends: %s", error)
                self._finish()  # the client reconnects from its offset
                return
            self._fetching = None
            if self._sink is not None:
                send(result)
                self.wake()

        self._fetching = asyncio.get_running_loop().create_task(run())

    def resume(self) -> None:
        self._is_blocked = False
        self.wake()

    def _write(self, data: bytes) -> None:
        if self._sink is not None and not self._sink.write(data):
            self._is_blocked = True

    def _beat(self) -> None:
        if not self._is_blocked:
            self._write(HEARTBEAT)
        loop = asyncio.get_running_loop()
        self._timers[1] = loop.call_later(self._readers.limits.sse_heartbeat_seconds, self._beat)

    def end(self) -> None:
        self._finish()

    def _finish(self) -> None:
        sink = self._sink
        if sink is not None:
            self.cancel()
            sink.finish()

    def cancel(self) -> None:
        if self._sink is not None:
            self._sink = None
            for timer in self._timers:
                timer.cancel()
            if self._fetching is not None and self._fetching is not asyncio.current_task():
                self._fetching.cancel()
            self._readers.shard.listeners.unlisten(self._topic, self)
            self._readers.live.discard(self)


class StreamFollower(Follower):
    """Data and control events of one stream, from an offset on."""

    def __init__(self, readers: LiveReaders, stream: Stream, offset: Offset, cursor: str | None) -> None:
        super().__init__(readers, stream.incarnation)
        self._stream = stream
        self._offset = min(offset, stream.tail)
        self._interval = readers.interval(cursor)

    def start(self, sink: Sink) -> None:
        has_nothing_yet = self._offset == self._stream.tail and not self._stream.closed
        super().start(sink)
        if has_nothing_yet:
            # The first control event tells the client its offset even if there is no data (§6, `now`).
            self._write(self._control(self._offset, up_to_date=True, closed=False))

    def _advance(self) -> bool:
        """Send what is available. The last control event says that it is all, and whether the stream is closed."""
        stream = self._stream
        if stream.deleted:
            self._finish()
        elif self._offset < stream.tail:
            shard, limit = self._readers.shard, self._readers.limits.chunk_bytes_max
            if not shard.is_hot(stream, self._offset):
                self._fetch(shard.reader.read_cold(stream, self._offset, limit), self._send)
                return False
            self._send(shard.read(stream, self._offset, limit))
            return True
        elif stream.closed:
            self._write(self._control(stream.tail, up_to_date=True, closed=True))
            self._finish()
        return False

    def _send(self, result: ReadResult) -> None:
        self._advance_interval()
        events = self._readers.events(self._stream, self._offset, result, self._interval)
        self._offset = result.next_offset
        self._write(events)
        if result.closed:
            self._finish()

    def _advance_interval(self) -> None:
        self._interval = max(self._interval, self._readers.interval(None))

    def _control(self, offset: int, up_to_date: bool, closed: bool) -> bytes:
        self._advance_interval()
        up_to_date = up_to_date and self._readers.shard.is_current()
        cursor = str(Cursor(self._interval, self._stream.incarnation, Offset(offset)))
        return encode_control(format_offset(offset), cursor=cursor, up_to_date=up_to_date, closed=closed)
