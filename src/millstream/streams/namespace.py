"""The namespace of a shard: which streams and buckets there are, as of the last applied record.

Streams are in memory or load on demand from where checkpoints put them; what changed since then is kept track of here,
so that the next checkpoint writes exactly that.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from typing import Protocol

from millstream.errors import Gone, NotFound
from millstream.protocol.keys import StreamKey
from millstream.protocol.producers import ProducerState
from millstream.streams.limits import StreamLimits
from millstream.streams.producers import Producers
from millstream.streams.state import Bucket, Stream


class StateSource(Protocol):
    """Where state that is not in memory comes from: the catalog, as of the last checkpoint."""

    def load_key(self, key: StreamKey) -> Stream | None: ...

    def load_incarnation(self, incarnation: int) -> Stream | None: ...

    def load_producer(self, incarnation: int, producer_id: str) -> ProducerState | None: ...

    def producer_count(self, incarnation: int) -> int: ...


class Namespace:
    def __init__(self, source: StateSource, limits: StreamLimits, expiry_ms: Callable[[], int]) -> None:
        self._source = source
        self._expiry_ms = expiry_ms
        self._by_key: dict[StreamKey, Stream] = {}
        self._by_incarnation: dict[int, Stream] = {}
        self.buckets: dict[str, Bucket] = {}
        self.producers = Producers(source, limits)
        # Changes since the last checkpoint, but for streams that only grew: whoever writes checkpoints learns that from
        # their messages. `freezing` are those of a checkpoint being taken.
        self.dirty: dict[int, Stream] = {}
        self.removed: dict[int, StreamKey] = {}
        self.freezing: dict[int, Stream] = {}
        self.removing: dict[int, StreamKey] = {}
        self.before_change: Callable[[Stream], None] = lambda stream: None
        # Streams in a checkpoint that is not yet written: the catalog still shows them as they were, or not at all.
        self.frozen: dict[int, Stream] = {}

    def find(self, key: StreamKey) -> Stream | None:
        """The stream that holds this name, soft-deleted or expired ones included."""
        stream = self._by_key.get(key)
        return stream if stream is not None else self._admit(self._source.load_key(key))

    def by_incarnation(self, incarnation: int) -> Stream | None:
        stream = self._by_incarnation.get(incarnation)
        return stream if stream is not None else self._admit(self._source.load_incarnation(incarnation))

    def get(self, key: StreamKey, now_ms: int) -> Stream:
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

    def producer(self, stream: Stream, producer_id: str, now_ms: int) -> ProducerState | None:
        """What is known of a stream's producer, appends in flight included."""
        if stream.ahead is not None:
            state = stream.ahead.producers.get(producer_id)
            if state is not None:
                return state
        state = self.producers.get(stream.incarnation, producer_id)
        if state is None or not self.producers.is_expired(state, now_ms):
            return state
        return None if self.producers.is_expired(state, self._expiry_ms()) else state  # as with streams

    def is_expired(self, stream: Stream, now_ms: int) -> bool:
        """Whether a stream's time is over, also by the clock that does not jump ahead, which is asked only then."""
        return stream.is_expired(now_ms) and stream.is_expired(self._expiry_ms())

    def resident(self) -> Iterator[Stream]:
        return iter(self._by_incarnation.values())

    def if_resident(self, incarnation: int) -> Stream | None:
        return self._by_incarnation.get(incarnation)

    def peek(self, incarnation: int) -> Stream | None:
        """The same as `by_incarnation` for whoever only looks: what is not in memory stays out of it."""
        stream = self._by_incarnation.get(incarnation)
        if stream is not None or incarnation in self.removed or incarnation in self.removing:
            return stream
        return self._source.load_incarnation(incarnation)

    def peek_key(self, key: StreamKey) -> Stream | None:
        """The same as `find` for whoever only looks."""
        stream = self._by_key.get(key) or self._source.load_key(key)
        if stream is None or stream.incarnation in self.removed or stream.incarnation in self.removing:
            return None
        return stream

    def unsaved(self) -> Iterator[Stream]:
        """Streams that changed since the catalog was last written, and did not only grow; some may not be in it."""
        yield from self.dirty.values()
        for incarnation, stream in self.frozen.items():
            if incarnation not in self.dirty and incarnation not in self.removed:
                yield stream

    def bucket(self, name: str) -> Bucket:
        bucket = self.buckets.get(name)
        if bucket is None:
            raise NotFound(f"bucket {name} does not exist", code="bucket_not_found")
        return bucket

    def evict(self, streams: Iterable[Stream], pinned: Container[int], count: int) -> None:
        """Forget up to so many of the streams that the catalog has as they are. They are loaded again when they are
        asked for.

        Pinned ones stay, and so do those with messages in memory, which the catalog may not have heard of.
        """
        by_key, by_incarnation, dirty, frozen = self._by_key, self._by_incarnation, self.dirty, self.frozen
        for stream in streams:
            if count <= 0:
                return
            incarnation = stream.incarnation
            if (
                stream.hot is not None
                or stream.ahead is not None
                or incarnation in dirty
                or incarnation in frozen
                or incarnation in pinned
                or by_incarnation.get(incarnation) is not stream
            ):
                continue
            del by_incarnation[incarnation]
            count -= 1
            holder = by_key.pop(stream.key, stream)
            if holder is not stream:
                by_key[stream.key] = holder  # a later stream of that name

    def resident_count(self) -> int:
        return len(self._by_incarnation)

    def _admit(self, stream: Stream | None) -> Stream | None:
        """Keep a stream in memory; one that was purged since the catalog last heard of it stays out."""
        if stream is None or stream.incarnation in self.removed or stream.incarnation in self.removing:
            return None
        self._by_key[stream.key] = stream
        self._by_incarnation[stream.incarnation] = stream
        return stream
