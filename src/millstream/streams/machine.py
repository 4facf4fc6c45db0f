"""The state machine of a shard: the effects of records on state.

`apply` alone changes committed state, from records alone, so that replaying the log rebuilds it. Message bytes are not
kept here: state knows where messages lie, the tiers know what they say.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from millstream.errors import Corrupt
from millstream.protocol.expiry import Expiry
from millstream.protocol.keys import StreamKey
from millstream.protocol.producers import ProducerClaim, ProducerState
from millstream.streams.checks import Checks
from millstream.streams.limits import DEFAULT_LIMITS, StreamLimits
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
    StoreClaimed,
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

# Later than anything: who has only one clock goes by that alone.
FOREVER_MS: Final = 1 << 62


class StateMachine(Checks):
    """`expiry_ms` is the time by which streams expire, if that is not simply the present one."""

    def __init__(
        self,
        source: StateSource,
        limits: StreamLimits = DEFAULT_LIMITS,
        expiry_ms: Callable[[], int] = lambda: FOREVER_MS,
    ) -> None:
        super().__init__(source, limits, expiry_ms)
        self.subscriptions = Subscriptions()
        self.secrets: SecretsCreated | None = None
        # The last claim of the object store that this log was part of.
        self.store_claim: StoreClaimed | None = None
        # Where this log went on although the store could not be asked whose it is; None once it was asked.
        self.store_unasked_at: int | None = None
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
        # Whether a record that was set aside is missing among those applied.
        self.has_gaps = False
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
            StoreClaimed: self._store_claimed,
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
        if record.close or record.seq is not None or not record.messages or at_ms < stream.last_access_ms:
            self._change(stream)
        else:
            self._grow(stream)
        if record.offset != stream.tail:
            self._leave_gap(stream, record.offset)
        stream.tail += sum(map(len, record.messages))
        stream.last_write_at_ms = at_ms
        if at_ms > stream.last_access_ms:
            stream.last_access_ms = at_ms
        if record.close:
            stream.closed = True
            stream.closed_by = record.producer
        if record.seq is not None:
            stream.seq = record.seq
        if record.producer is not None:
            self._remember_producer(stream, record.producer, at_ms)
        ahead = stream.ahead
        if ahead is not None and ahead.position <= position:
            stream.ahead = None
        return stream

    def pass_over(self) -> None:
        """A record was set aside: what comes behind it was checked on top of it, and is applied all the same."""
        self.has_gaps = True

    @staticmethod
    def _leave_gap(stream: Stream, offset: int) -> None:
        """What comes after an append that was set aside keeps its offset; readers find nothing in between."""
        if offset < stream.tail:
            raise Corrupt(f"an append at offset {offset} of stream {stream.key}, whose tail is {stream.tail}")
        stream.tail = offset

    def _remember_producer(self, stream: Stream, claim: ProducerClaim, at_ms: int) -> None:
        self.producers.put(stream.incarnation, claim.id, ProducerState(claim.epoch, claim.seq, at_ms))

    def _stream_created(self, record: StreamCreated, position: int) -> Stream:
        key = StreamKey(record.bucket, record.stream)
        expiry = Expiry(record.ttl_seconds, record.expires_at, record.expires_at_ms)
        stream = Stream.created(position, key, record.content_type, record.at_ms, expiry, record.fork)
        stream.tail += sum(map(len, record.messages))
        stream.closed = record.closed
        stream.seq = record.seq
        stream.earliest = record.earliest
        stream.snapshot = record.snapshot
        if record.producer is not None:
            self._remember_producer(stream, record.producer, record.at_ms)
            stream.closed_by = record.producer if record.closed else None
        if record.fork is not None:
            source = self.by_incarnation(record.fork.source)
            if source is not None:
                self._change(source)
                source.forks += 1
        if self.has_gaps:
            self._give_up_name(key)
        bucket = self.buckets.get(record.bucket)
        if bucket is None:  # implicit on /v1/stream
            bucket = self.buckets[record.bucket] = Bucket(record.bucket, record.at_ms, is_implicit=True)
        bucket.streams += 1
        self._admit(stream)
        self._change(stream)
        return stream

    def _give_up_name(self, key: StreamKey) -> None:
        """The record that ended this name's stream was set aside; its successor says that it was there."""
        older = self.find(key)
        if older is not None and not older.soft_deleted:
            self._end(older)

    def _stream_deleted(self, record: StreamDeleted, position: int) -> Stream | None:
        stream = self.by_incarnation(record.stream)
        if stream is None or stream.soft_deleted:
            return None
        self._end(stream)
        return stream

    def _end(self, stream: Stream) -> None:
        self._change(stream)
        stream.deleted = True
        if stream.forks:
            stream.soft_deleted = True
        else:
            self._purge(stream)

    def _purge(self, stream: Stream) -> None:
        """Forget a stream for good, then its source if this was what kept the source's bytes, and so on down the chain.

        In a loop: a data directory may hold chains that are longer than the interpreter's stack.
        """
        last: Stream | None = stream
        while last is not None:
            self._forget(last)
            last = self._released_source(last)

    def _forget(self, stream: Stream) -> None:
        stream.deleted = True
        self.dirty.pop(stream.incarnation, None)
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
        self.purged.append(stream)
        if stream.snapshot is not None:
            self.freed_blobs.append(stream.snapshot.blob)
        self.subscriptions.stream_purged(stream.key.v1_path)

    def _released_source(self, fork: Stream) -> Stream | None:
        """The source of a fork that is gone, if nothing else keeps the source's bytes."""
        source = self.by_incarnation(fork.fork.source) if fork.fork is not None else None
        if source is None:
            return None
        self._change(source)
        source.forks -= 1
        return source if source.soft_deleted and not source.forks else None

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

    def _store_claimed(self, record: StoreClaimed, position: int) -> None:
        if self.store_claim is None or record.claim != self.store_claim.claim:
            self.store_unasked_at = None
        elif self.store_unasked_at is None:
            self.store_unasked_at = position
        self.store_claim = record
        self.records_applied -= 1  # no reason to flush; the log keeps it until something else is one

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
