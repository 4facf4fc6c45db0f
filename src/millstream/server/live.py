"""Live reads: long-polls that wait for one answer, and SSE connections that follow a stream (§5.7, §5.8).

Both listen to their stream and are woken after each batch that changed it. A follower that its client reads too
slowly is not queued for: it stops, and goes on from its own offset when the client has caught up, so what a slow
client costs is one bounded buffer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from millstream.protocol.cursors import JITTER_SECONDS, next_cursor
from millstream.protocol.offsets import format_offset
from millstream.protocol.sse import HEARTBEAT, encode_control, encode_data
from millstream.server.limits import ReadLimits
from millstream.server.messages import Sink
from millstream.shard.reader import ReadResult
from millstream.shard.shard import Shard
from millstream.streams.state import Stream


class LiveReaders:
    """Counts live reads and shares what several of them need at once."""

    def __init__(self, shard: Shard, limits: ReadLimits) -> None:
        self.shard = shard
        self.limits = limits
        self.count = 0
        # The data event encoded last: after an append every follower of the stream asks for the same one.
        self._encoded: tuple[int, int, int, bytes] = (0, 0, 0, b"")

    def has_room(self, stream: Stream) -> bool:
        return (
            self.count < self.limits.live_readers_max
            and self.shard.listener_count(stream) < self.limits.live_readers_per_stream_max
        )

    def cursor(self, echoed: str | None) -> str:
        clock = self.shard.clock
        return next_cursor(clock.now_ms(), echoed, clock.uniform(*JITTER_SECONDS) if echoed else 0.0)

    def data_event(self, stream: Stream, start: int, result: ReadResult) -> bytes:
        incarnation, cached_start, cached_end, event = self._encoded
        if (incarnation, cached_start, cached_end) != (stream.incarnation, start, result.next_offset):
            event = encode_data(stream.content_type, result.messages)
            self._encoded = (stream.incarnation, start, result.next_offset, event)
        return event


class LongPoll:
    """Waits until there is something beyond `offset`, the stream ends, or time is up; then calls `done` once.

    `done` gets True if the stream changed and False if time ran out.
    """

    def __init__(self, readers: LiveReaders, stream: Stream, offset: int, done: Callable[[bool], None]) -> None:
        self._readers = readers
        self._stream = stream
        self._offset = offset
        self._done = done
        readers.count += 1
        readers.shard.listen(stream, self)
        self._timer = asyncio.get_running_loop().call_later(readers.limits.long_poll_seconds, self._finish, False)

    def wake(self, stream: Stream) -> None:
        if stream.tail > self._offset or stream.closed or stream.deleted:
            self._finish(True)

    def _finish(self, changed: bool) -> None:
        self.cancel()
        self._done(changed)

    def cancel(self) -> None:
        self._timer.cancel()
        self._readers.shard.unlisten(self._stream, self)
        self._readers.count -= 1


class SseFollower:
    """A body stream of data and control events, from an offset until the stream or the connection's time ends."""

    def __init__(self, readers: LiveReaders, stream: Stream, offset: int, cursor: str | None) -> None:
        self._readers = readers
        self._stream = stream
        self._offset = min(offset, stream.tail)
        self._cursor = readers.cursor(cursor)
        self._sink: Sink | None = None
        self._is_blocked = False
        self._timers: list[asyncio.TimerHandle] = []

    def start(self, sink: Sink) -> None:
        self._sink = sink
        self._readers.count += 1
        self._readers.shard.listen(self._stream, self)
        loop, limits = asyncio.get_running_loop(), self._readers.limits
        lifetime = loop.call_later(limits.sse_lifetime_seconds, self._finish)
        heartbeat = loop.call_later(limits.sse_heartbeat_seconds, self._beat)
        self._timers = [lifetime, heartbeat]
        if self._offset == self._stream.tail and not self._stream.closed:
            # Nothing to send yet: the first control event still tells the client where it stands (§6, `now`).
            self._write(self._control(self._offset, up_to_date=True, closed=False))
        self._pump()

    def wake(self, stream: Stream) -> None:
        if not self._is_blocked:
            self._pump()

    def resume(self) -> None:
        self._is_blocked = False
        self._pump()

    def _pump(self) -> None:
        """Send all there is; the last control event says so, and whether it is the end."""
        stream = self._stream
        while self._sink is not None and not self._is_blocked:
            if stream.deleted:
                self._finish()
            elif self._offset < stream.tail:
                start = self._offset
                result = self._readers.shard.read(stream, start, self._readers.limits.chunk_bytes_max)
                self._offset = result.next_offset
                event = self._readers.data_event(stream, start, result)
                self._write(event + self._control(result.next_offset, result.up_to_date, result.closed))
                if result.closed:
                    self._finish()
            elif stream.closed:
                self._write(self._control(stream.tail, up_to_date=True, closed=True))
                self._finish()
            else:
                return

    def _control(self, offset: int, up_to_date: bool, closed: bool) -> bytes:
        current = self._readers.cursor(None)
        if int(current) > int(self._cursor):
            self._cursor = current
        return encode_control(format_offset(offset), cursor=self._cursor, up_to_date=up_to_date, closed=closed)

    def _write(self, data: bytes) -> None:
        if self._sink is not None and not self._sink.write(data):
            self._is_blocked = True

    def _beat(self) -> None:
        if not self._is_blocked:
            self._write(HEARTBEAT)
        loop = asyncio.get_running_loop()
        self._timers[1] = loop.call_later(self._readers.limits.sse_heartbeat_seconds, self._beat)

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
            self._readers.shard.unlisten(self._stream, self)
            self._readers.count -= 1
