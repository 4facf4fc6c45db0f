"""The state machine of a shard: the effects of records on state.

`apply` alone changes committed state, from records alone, so that replaying the log rebuilds it. Message bytes are not
kept here: state knows where messages lie, the tiers know what they say.
"""

from __future__ import annotations

from collections.abc import Callable

from millstream.protocol.expiry import Expiry
from millstream.protocol.keys import StreamKey
from millstream.protocol.producers import ProducerState
from millstream.streams.checks import Checks
from millstream.streams.namespace import StateSource
from millstream.streams.records import (
    AnyRecord,
    Appended,
    BucketCreated,
    BucketDeleted,
    LeaderStarted,
    SecretsCreated,
    SegmentSealed,
    SegmentsReplaced,
    SnapshotPublished,
    StreamCreated,
    StreamDeleted,
    StreamsTouched,
    StreamTrimmed,
    SubscriptionChanged,
    SubscriptionCreated,
    SubscriptionDeleted,
)
from millstream.streams.state import Bucket, Stream
from millstream.streams.subscriptions import Subscriptions


class StateMachine(Checks):
    def __init__(self, source: StateSource) -> None:
        super().__init__(source)
        self.subscriptions = Subscriptions()
        self.secrets: SecretsCreated | None = None
        # What the records applied last have let go: the shard frees the bytes at once. Blobs go after the next
        # flush: until then the object store alone would still restore a state that refers to them.
        self.purged: list[Stream] = []
        self.freed_blobs: list[str] = []
        # Before this position everything is cold; `sealed` are the segments the catalog does not list yet.
        self.flushed = 1
        self.sealed: list[SegmentSealed] = []
        # Compactions the catalog does not reflect yet.
        self.replaced: list[SegmentsReplaced] = []
        self.records_applied = 0
        self._effects: dict[type[AnyRecord], Callable[..., Stream | None]] = {
            Appended: self._appended,
            StreamCreated: self._stream_created,
            StreamDeleted: self._stream_deleted,
            StreamsTouched: self._streams_touched,
            BucketCreated: self._bucket_created,
            BucketDeleted: self._bucket_deleted,
            SecretsCreated: self._secrets_created,
            SubscriptionCreated: self._subscription_created,
            SubscriptionDeleted: self._subscription_deleted,
            SubscriptionChanged: self._subscription_changed,
            SnapshotPublished: self._snapshot_published,
            SegmentSealed: self._segment_sealed,
            LeaderStarted: self._leader_started,
            SegmentsReplaced: self._segments_replaced,
            StreamTrimmed: self._stream_trimmed,
        }

    def apply(self, record: AnyRecord, position: int) -> Stream | None:
        """Make a durable record true. Returns the stream it is about, for those who publish its bytes."""
        self.records_applied += 1
        return self._effects[type(record)](record, position)

    def _change(self, stream: Stream) -> None:
        self._grow(stream)
        self.dirty[stream.incarnation] = stream

    def _grow(self, stream: Stream) -> None:
        """The stream gets messages, and nothing about it changes but what these tell: its tail, and when it was last
        written to and accessed."""
        if self.freezing and self.freezing.pop(stream.incarnation, None) is not None:
            self.before_change(stream)

    def _appended(self, record: Appended, position: int) -> Stream | None:
        stream = self.by_incarnation(record.stream)
        if stream is None:
            return None  # purged by an earlier record while this one was in flight
        at_ms = record.at_ms
        if record.close or record.seq is not None or record.producer is not None or at_ms < stream.last_access_ms:
            self._change(stream)
        else:
            self._grow(stream)
        assert record.offset == stream.tail, "an append must start at the tail"
        for message in record.messages:
            stream.tail += len(message)
        stream.last_write_at_ms = at_ms
        if at_ms > stream.last_access_ms:
            stream.last_access_ms = at_ms
        if record.close:
            stream.closed = True
            stream.closed_by = record.producer
        if record.seq is not None:
            stream.seq = record.seq
        if record.producer is not None:
            self._remember_producer(stream, record.producer.id, record.producer.epoch, record.producer.seq)
        ahead = stream.ahead
        if ahead is not None and ahead.position <= position:
            stream.ahead = None
        return stream

    @staticmethod
    def _remember_producer(stream: Stream, producer_id: str, epoch: int, seq: int) -> None:
        if not stream.producers:
            stream.producers = {}
        stream.producers[producer_id] = ProducerState(epoch, seq)

    def _stream_created(self, record: StreamCreated, position: int) -> Stream:
        key = StreamKey(record.bucket, record.stream)
        expiry = Expiry(record.ttl_seconds, record.expires_at, record.expires_at_ms)
        stream = Stream.created(position, key, record.content_type, record.at_ms, expiry, record.fork)
        for message in record.messages:
            stream.tail += len(message)
        stream.closed = record.closed
        stream.seq = record.seq
        stream.earliest = record.earliest
        stream.snapshot = record.snapshot
        if record.producer is not None:
            self._remember_producer(stream, record.producer.id, record.producer.epoch, record.producer.seq)
            stream.closed_by = record.producer if record.closed else None
        if record.fork is not None:
            source = self.by_incarnation(record.fork.source)
            if source is not None:
                self._change(source)
                source.forks += 1
        bucket = self.buckets.get(record.bucket)
        if bucket is None:  # implicit on /v1/stream
            bucket = self.buckets[record.bucket] = Bucket(record.bucket, record.at_ms)
        bucket.streams += 1
        self._admit(stream)
        self._change(stream)
        return stream

    def _stream_deleted(self, record: StreamDeleted, position: int) -> Stream | None:
        stream = self.by_incarnation(record.stream)
        if stream is None or stream.soft_deleted:
            return None
        self._change(stream)
        stream.deleted = True
        if stream.forks:
            stream.soft_deleted = True
        else:
            self._purge(stream)
        return stream

    def _purge(self, stream: Stream) -> None:
        """Forget a stream for good, and its source with it if this was what kept the source's bytes."""
        stream.deleted = True
        self.dirty.pop(stream.incarnation, None)
        self._by_incarnation.pop(stream.incarnation, None)
        if self._by_key.get(stream.key) is stream:
            del self._by_key[stream.key]
        self.removed[stream.incarnation] = stream.key
        bucket = self.buckets.get(stream.key.bucket)
        if bucket is not None:
            bucket.streams -= 1
        self.purged.append(stream)
        if stream.snapshot is not None:
            self.freed_blobs.append(stream.snapshot.blob)
        self.subscriptions.stream_purged(stream.key.v1_path)
        if stream.fork is not None:
            source = self.by_incarnation(stream.fork.source)
            if source is not None:
                self._change(source)
                source.forks -= 1
                if source.soft_deleted and not source.forks:
                    self._purge(source)

    def _snapshot_published(self, record: SnapshotPublished, position: int) -> Stream | None:
        stream = self.by_incarnation(record.stream)
        if stream is None:
            self.freed_blobs.append(record.snapshot.blob)
            return None
        self._change(stream)
        if stream.snapshot is not None:
            self.freed_blobs.append(stream.snapshot.blob)
        stream.snapshot = record.snapshot
        if record.trims:
            stream.earliest = record.snapshot.offset
        stream.last_write_at_ms = record.at_ms
        stream.last_access_ms = max(stream.last_access_ms, record.at_ms)
        return stream

    def _stream_trimmed(self, record: StreamTrimmed, position: int) -> Stream | None:
        stream = self.by_incarnation(record.stream)
        if stream is not None and record.earliest > stream.earliest:
            self._change(stream)
            stream.earliest = record.earliest
        return stream

    def _streams_touched(self, record: StreamsTouched, position: int) -> None:
        for incarnation, at_ms in record.accessed.items():
            stream = self.by_incarnation(incarnation)
            if stream is not None:
                self._change(stream)
                stream.last_access_ms = max(stream.last_access_ms, at_ms)

    def _bucket_created(self, record: BucketCreated, position: int) -> None:
        self.buckets.setdefault(record.bucket, Bucket(record.bucket, record.at_ms))

    def _bucket_deleted(self, record: BucketDeleted, position: int) -> None:
        self.buckets.pop(record.bucket, None)

    def _segment_sealed(self, record: SegmentSealed, position: int) -> None:
        self.flushed = record.through
        self.sealed.append(record)
        self.records_applied -= 1  # it tells of changes that are stored, and is none itself

    def _leader_started(self, record: LeaderStarted, position: int) -> None:
        self.records_applied -= 1  # it fences the log and changes no state

    def _segments_replaced(self, record: SegmentsReplaced, position: int) -> None:
        self.replaced.append(record)

    def _secrets_created(self, record: SecretsCreated, position: int) -> None:
        self.secrets = record

    def _subscription_created(self, record: SubscriptionCreated, position: int) -> None:
        self.subscriptions.created(record)

    def _subscription_deleted(self, record: SubscriptionDeleted, position: int) -> None:
        self.subscriptions.deleted(record)

    def _subscription_changed(self, record: SubscriptionChanged, position: int) -> None:
        self.subscriptions.changed(record)
