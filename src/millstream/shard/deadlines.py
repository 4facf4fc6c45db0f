"""Deadlines: streams that end by themselves, and the reads that put that off.

A sliding window restarts with every read; that becomes a record once a second, not once a read. A stream whose time
has come is deleted by a record like any other.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Final

from millstream.errors import MillstreamError
from millstream.pending import Pending
from millstream.slices import batched
from millstream.streams.records import StreamDeleted, StreamsTouched
from millstream.streams.state import Stream
from millstream.units import Incarnation, Milliseconds

if TYPE_CHECKING:
    from millstream.shard.shard import Shard

# Windows that one record restarts: about 20 bytes each in the log.
TOUCHES_PER_RECORD: Final = 4096
# Streams whose end is begun in one turn of the loop.
EXPIRED_PER_TURN: Final = 256


GONE_MIN: Final = 1024


class Deadlines:
    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._touched: dict[Incarnation, Milliseconds] = {}
        self._heap: list[tuple[Milliseconds, Incarnation]] = []
        self._is_expiring = False
        # Incarnations in the heap whose streams are gone: when they are the most of it, it is made anew without them.
        self._gone: set[Incarnation] = set()
        # Where reads restarted windows and this shard does not lead: whoever does must hear of it.
        self.on_touched: Callable[[dict[Incarnation, Milliseconds]], None] = lambda touched: None

    def start(self, saved: Iterable[tuple[Incarnation, Milliseconds]], unsaved: Iterable[Stream]) -> None:
        """Watch over the incarnations that the catalog says have deadlines, and over those it does not know yet."""
        self._heap = [(deadline, incarnation) for incarnation, deadline in saved]
        heapq.heapify(self._heap)
        for stream in unsaved:
            self.watch(stream)

    def __len__(self) -> int:
        """How many deadlines are in memory."""
        return len(self._heap) + len(self._gone)

    def tick(self) -> None:
        """Do what is due; called once a second."""
        self._shard.expiry_clock.now_ms()  # so that a jump is noticed, whoever leads
        if self._shard.committer.failure is None:
            self.flush_touches()
            if not self._is_expiring:
                self._is_expiring = True
                self._expire()
        elif self._touched:
            touched, self._touched = self._touched, {}
            self.on_touched(touched)

    def touch(self, stream: Stream) -> None:
        """A read restarts a sliding window. That becomes a record once a second, not once a read."""
        if stream.expiry.ttl_seconds is not None:
            stream.last_access_ms = max(stream.last_access_ms, self._shard.clock.now_ms())
            self._touched[stream.incarnation] = stream.last_access_ms

    def touched_elsewhere(self, touched: dict[Incarnation, Milliseconds]) -> None:
        """Reads at other nodes restarted these windows."""
        for incarnation, at_ms in touched.items():
            if self._touched.get(incarnation, 0) < at_ms:
                self._touched[incarnation] = at_ms

    def watch(self, stream: Stream | None) -> None:
        if stream is not None:
            deadline_ms = stream.expiry.deadline_ms(stream.last_access_ms)
            if deadline_ms is not None:
                heapq.heappush(self._heap, (deadline_ms, stream.incarnation))

    def unwatch(self, stream: Stream) -> None:
        """The stream was deleted: nobody waits for its end any more."""
        if stream.expiry.deadline_ms(Milliseconds(0)) is None:
            return
        self._gone.add(stream.incarnation)
        if len(self._gone) > max(GONE_MIN, len(self._heap) // 2):
            self._heap = [one for one in self._heap if one[1] not in self._gone]
            heapq.heapify(self._heap)
            self._gone.clear()

    def flush_touches(self) -> None:
        touched, self._touched = self._touched, {}
        for some in batched(list(touched.items()), TOUCHES_PER_RECORD):
            self._write_touches(dict(some))

    def _write_touches(self, touched: dict[Incarnation, Milliseconds]) -> None:
        def written(error: MillstreamError | None) -> None:
            if error is not None:
                self._touched = touched | self._touched

        self._shard.committer.commit(StreamsTouched(touched)).when_settled(written)

    def _expire(self) -> None:
        """Delete streams whose time has come. A window that slid since it was noted is noted anew."""
        now_ms = self._shard.expiry_clock.now_ms()
        for _ in range(EXPIRED_PER_TURN):
            if not self._heap or self._heap[0][0] > now_ms or self._shard.committer.failure is not None:
                self._is_expiring = False
                return
            _, incarnation = heapq.heappop(self._heap)
            if incarnation in self._gone:
                self._gone.discard(incarnation)
                continue
            stream = self._shard.namespace.by_incarnation(incarnation)
            if stream is None or stream.deleted:
                continue
            if stream.is_expired(now_ms):
                self._shard.exclusively(stream.key, partial(self._enact_expiry, incarnation))
            else:
                self.watch(stream)
        asyncio.get_running_loop().call_soon(self._expire)  # requests come in between

    def _enact_expiry(self, incarnation: Incarnation) -> Pending[None]:
        stream = self._shard.namespace.by_incarnation(incarnation)
        now_ms = self._shard.clock.now_ms()
        if stream is not None and not stream.deleted:
            if self._shard.namespace.is_expired(stream, now_ms):
                return self._shard.committer.commit(StreamDeleted(incarnation, now_ms, stream.key, expired=True))
            self.watch(stream)
        return Pending.settled(None)
