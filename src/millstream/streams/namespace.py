"""The namespace of a shard: which streams, buckets and producers there are, as of the last applied record.

Streams are in memory or load on demand from where checkpoints put them. What changed since then is kept track of here,
so that the next checkpoint writes exactly that: `begin_capture` hands it out, `commit` and `roll_back` end the capture.

Commands are judged over it (`checks.py`); only records change it (`machine.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from typing import Final, Protocol

from millstream.errors import Gone, NotFound
from millstream.protocol.keys import StreamKey
from millstream.protocol.producers import ProducerState
from millstream.streams.captures import Capture, Encoder
from millstream.streams.limits import DEFAULT_LIMITS, StreamLimits
from millstream.streams.producers import Producers
from millstream.streams.state import Bucket, Stream
from millstream.units import Incarnation, Milliseconds

# Later than anything: who has only one clock goes by that alone.
FOREVER_MS: Final = Milliseconds(1 << 62)


class StateSource(Protocol):
    """Where state that is not in memory comes from: the catalog, as of the last checkpoint."""

    def load_key(self, key: StreamKey) -> Stream | None: ...

    def load_incarnation(self, incarnation: Incarnation) -> Stream | None: ...

    def load_producer(self, incarnation: Incarnation, producer_id: str) -> ProducerState | None: ...

    def producer_count(self, incarnation: Incarnation) -> int: ...


class Namespace:
    """`expiry_ms` is the time by which streams expire, if that is not simply the present one."""

    def __init__(
        self,
        source: StateSource,
        limits: StreamLimits = DEFAULT_LIMITS,
        expiry_ms: Callable[[], Milliseconds] = lambda: FOREVER_MS,
    ) -> None:
        self.limits = limits
        self._source = source
        self._expiry_ms = expiry_ms
        self._by_key: dict[StreamKey, Stream] = {}
        self._by_incarnation: dict[Incarnation, Stream] = {}
        self.buckets: dict[str, Bucket] = {}
        self.producers = Producers(source, limits)
        # Changes since the last capture, but for streams that only grew: whoever writes checkpoints learns that from
        # their messages. Blobs are deleted after the flush: until then the object store alone would still restore a
        # state that refers to them.
        self.changed: dict[Incarnation, Stream] = {}
        self.removed: dict[Incarnation, StreamKey] = {}
        self.freed_blobs: list[str] = []
        # Captures that are neither committed nor rolled back, oldest first, and the changes of all of them together,
        # which the catalog does not show yet. Of the newest, the streams that are still to be encoded.
        self._captures: list[Capture] = []
        self.captured: dict[Incarnation, Stream] = {}
        self.captured_removals: dict[Incarnation, StreamKey] = {}
        self.unencoded: dict[Incarnation, Stream] = {}

    # -- looking up ------------------------------------------------------------------------------------------

    def find(self, key: StreamKey) -> Stream | None:
        """The stream that holds this name, soft-deleted or expired ones included."""
        stream = self._by_key.get(key)
        return stream if stream is not None else self._admit(self._source.load_key(key))

    def by_incarnation(self, incarnation: Incarnation) -> Stream | None:
        stream = self._by_incarnation.get(incarnation)
        return stream if stream is not None else self._admit(self._source.load_incarnation(incarnation))

    def get(self, key: StreamKey, now_ms: Milliseconds) -> Stream:
        """The live stream of that name; expiry shows before the record that enacts it."""
        stream = self.find(key)
        if stream is None:
            self.bucket(key.bucket)
            raise NotFound(f"stream {key} does not exist")
        if stream.soft_deleted or (stream.forks and self.is_expired(stream, now_ms)):
            raise Gone(f"stream {key} was deleted; its bytes remain for its forks only")
        if self.is_expired(stream, now_ms):
            raise NotFound(f"stream {key} has expired", code="stream_expired")
        return stream

    def producer(self, stream: Stream, producer_id: str, now_ms: Milliseconds) -> ProducerState | None:
        """What is known of a stream's producer, appends in flight included."""
        if stream.ahead is not None:
            state = stream.ahead.producers.get(producer_id)
            if state is not None:
                return state
        state = self.producers.get(stream.incarnation, producer_id)
        if state is None or not self.producers.is_expired(state, now_ms):
            return state
        return None if self.producers.is_expired(state, self._expiry_ms()) else state  # as with streams

    def is_expired(self, stream: Stream, now_ms: Milliseconds) -> bool:
        """Whether a stream's time is over, also by the clock that does not jump ahead, which is asked only then."""
        return stream.is_expired(now_ms) and stream.is_expired(self._expiry_ms())

    def resident(self) -> Iterator[Stream]:
        return iter(self._by_incarnation.values())

    def if_resident(self, incarnation: Incarnation) -> Stream | None:
        return self._by_incarnation.get(incarnation)

    def peek(self, incarnation: Incarnation) -> Stream | None:
        """The same as `by_incarnation` for whoever only looks: what is not in memory stays out of it."""
        stream = self._by_incarnation.get(incarnation)
        if stream is not None or self.is_removed(incarnation):
            return stream
        return self._source.load_incarnation(incarnation)

    def peek_key(self, key: StreamKey) -> Stream | None:
        """The same as `find` for whoever only looks."""
        stream = self._by_key.get(key) or self._source.load_key(key)
        if stream is None or self.is_removed(stream.incarnation):
            return None
        return stream

    def is_removed(self, incarnation: Incarnation) -> bool:
        """Whether a stream is gone that the catalog may still show."""
        return incarnation in self.removed or incarnation in self.captured_removals

    def unsaved(self) -> Iterator[Stream]:
        """Streams that changed since the catalog was last written, and did not only grow; some may not be in it."""
        yield from self.changed.values()
        for incarnation, stream in self.captured.items():
            if incarnation not in self.changed and incarnation not in self.removed:
                yield stream

    def bucket(self, name: str) -> Bucket:
        bucket = self.buckets.get(name)
        if bucket is None:
            raise NotFound(f"bucket {name} does not exist", code="bucket_not_found")
        return bucket

    def resident_count(self) -> int:
        return len(self._by_incarnation)

    # -- changing, which only records do (`machine.py`) --------------------------------------------------------

    def add(self, stream: Stream) -> None:
        """A stream was created, and its bucket with it if there was none (implicit on /v1/stream)."""
        name = stream.key.bucket
        bucket = self.buckets.get(name)
        if bucket is None:
            bucket = self.buckets[name] = Bucket(name, stream.created_at_ms, is_implicit=True)
        bucket.streams += 1
        self._admit(stream)
        self.change(stream)

    def change(self, stream: Stream) -> None:
        """The stream is about to change in any way but growing."""
        self.grow(stream)
        self.changed[stream.incarnation] = stream

    def grow(self, stream: Stream) -> None:
        """The stream is about to get messages, and nothing about it changes but what these tell: its tail, and when it
        was last written to and accessed."""
        if self.unencoded and self.unencoded.pop(stream.incarnation, None) is not None:
            self._captures[-1].encode(stream)

    def remove(self, stream: Stream) -> None:
        """The stream is gone for good."""
        stream.deleted = True
        self.changed.pop(stream.incarnation, None)
        self._by_incarnation.pop(stream.incarnation, None)
        if self._by_key.get(stream.key) is stream:
            del self._by_key[stream.key]
        self.removed[stream.incarnation] = stream.key
        self.producers.drop(stream.incarnation)
        bucket = self.buckets.get(stream.key.bucket)
        if bucket is not None:
            bucket.streams -= 1
            if bucket.is_implicit and not bucket.streams:
                del self.buckets[bucket.name]

    # -- captures (see `captures.py`) ------------------------------------------------------------------------

    def begin_capture(self, encoder: Encoder | None = None) -> Capture:
        """Capture the changes so far. With an encoder, its streams are to be encoded as they are at this moment."""
        assert not self.unencoded, "a capture is still being encoded"
        capture = Capture(self.changed, self.removed, self.freed_blobs, self.producers.begin_capture(), encoder)
        self.changed, self.removed, self.freed_blobs = {}, {}, []
        self._captures.append(capture)
        self.unencoded = capture.unencoded
        self._show_captures()
        return capture

    def commit(self, capture: Capture) -> None:
        """The catalog has what the capture holds."""
        self.producers.commit(capture.producers)
        self._end(capture)

    def roll_back(self, capture: Capture) -> None:
        """The capture, which is the newest, could not be stored: its changes are to be captured again."""
        assert capture is self._captures[-1], "captures are rolled back from the newest to the oldest"
        self.producers.roll_back(capture.producers)
        self.removed = capture.removed | self.removed
        self.changed = _without(capture.changed, self.removed) | self.changed
        self.freed_blobs = capture.freed_blobs + self.freed_blobs
        self._end(capture)

    def _end(self, capture: Capture) -> None:
        self._captures.remove(capture)
        if capture.unencoded is self.unencoded:
            self.unencoded = {}
        self._show_captures()

    def _show_captures(self) -> None:
        """Note what the catalog does not show yet."""
        if len(self._captures) == 1:  # as where this node flushes; there may be very many streams in it
            self.captured, self.captured_removals = self._captures[0].changed, self._captures[0].removed
            return
        changed: dict[Incarnation, Stream] = {}
        removed: dict[Incarnation, StreamKey] = {}
        for capture in self._captures:
            changed |= capture.changed
            removed |= capture.removed
        self.captured, self.captured_removals = _without(changed, removed), removed

    # -- residency -------------------------------------------------------------------------------------------

    def evict(self, streams: Iterable[Stream], pinned: Container[Incarnation], count: int) -> None:
        """Forget up to so many of the streams that the catalog has as they are. They are loaded again when they are
        asked for.

        Pinned ones stay, and so do those with messages in memory, which the catalog may not have heard of.
        """
        by_key, by_incarnation, changed, captured = self._by_key, self._by_incarnation, self.changed, self.captured
        for stream in streams:
            if count <= 0:
                return
            incarnation = stream.incarnation
            if (
                stream.hot is not None
                or stream.ahead is not None
                or incarnation in changed
                or incarnation in captured
                or incarnation in pinned
                or by_incarnation.get(incarnation) is not stream
            ):
                continue
            del by_incarnation[incarnation]
            count -= 1
            holder = by_key.pop(stream.key, stream)
            if holder is not stream:
                by_key[stream.key] = holder  # a later stream of that name

    def _admit(self, stream: Stream | None) -> Stream | None:
        """Keep a stream in memory; one that was purged since the catalog last heard of it stays out."""
        if stream is None or self.is_removed(stream.incarnation):
            return None
        self._by_key[stream.key] = stream
        self._by_incarnation[stream.incarnation] = stream
        return stream


def _without(streams: dict[Incarnation, Stream], removed: Container[Incarnation]) -> dict[Incarnation, Stream]:
    return {incarnation: stream for incarnation, stream in streams.items() if incarnation not in removed}
