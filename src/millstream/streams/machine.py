"""The state machine of a shard: the effects of records on state.

`apply` alone changes committed state, from records alone, so that replaying the log rebuilds it. Message bytes are not
kept here: state knows where messages lie, the tiers know what they say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from millstream.errors import Corrupt
from millstream.protocol.expiry import Expiry
from millstream.protocol.keys import StreamKey
from millstream.protocol.producers import ProducerState
from millstream.streams.namespace import Namespace
from millstream.streams.records import (
    AnyRecord,
    Appended,
    BucketCreated,
    BucketDeleted,
    LeaderStarted,
    SecretsCreated,
    SegmentRef,
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
from millstream.streams.subscriptions import Subscription, Subscriptions
from millstream.units import Incarnation, Offset, Position


class StateMachine:
    def __init__(self, namespace: Namespace) -> None:
        self.namespace = namespace
        self.subscriptions = Subscriptions()
        self.secrets: SecretsCreated | None = None
        # The last claim of the object store that this log was part of.
        self.store_claim: StoreClaimed | None = None
        # Where this log went on although the store could not be asked whose it is; None once it was asked.
        self.store_unasked_at: Position | None = None
        # Streams that the records applied last have purged: the shard frees their messages at once.
        self.purged: list[Stream] = []
        # Before this position everything is cold; `sealed` are the flushes the catalog does not list yet.
        self.flushed = Position(1)
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

    def apply(self, record: AnyRecord, position: Position) -> Stream | None:
        """Make a durable record true. Returns the stream it is about, for those who publish its bytes."""
        self.records_applied += 1
        return self._effects[type(record)](record, position)

    def _appended(self, record: Appended, position: Position) -> Stream | None:
        namespace = self.namespace
        stream = namespace.by_incarnation(record.stream)
        if stream is None:
            return None  # purged by an earlier record while this one was in flight
        at_ms = record.at_ms
        if record.close or record.seq is not None or not record.messages or at_ms < stream.last_access_ms:
            namespace.change(stream)
        elif namespace.unencoded:  # `grow` does nothing otherwise, and most appends spare the call
            namespace.grow(stream)
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
        claim = record.producer
        if claim is not None:
            namespace.producers.put(record.stream, claim.id, ProducerState(claim.epoch, claim.seq, at_ms))
        ahead = stream.ahead
        if ahead is not None and ahead.position <= position:
            stream.ahead = None
        return stream

    def restore(
        self,
        position: Position,
        buckets: Iterable[Bucket],
        subscriptions: Iterable[Subscription],
        secrets: SecretsCreated | None,
        store_claim: StoreClaimed | None,
    ) -> None:
        """Begin with the state at a position, as a checkpoint stored what is always in memory."""
        self.flushed = position
        self.namespace.buckets.update({bucket.name: bucket for bucket in buckets})
        for subscription in subscriptions:
            self.subscriptions.restore(subscription)
        self.secrets = secrets
        self.store_claim = store_claim

    def take_purged(self) -> list[Stream]:
        """The streams that were purged since this was last asked."""
        purged, self.purged = self.purged, []
        return purged

    def forget_sealed(self, through: Position) -> None:
        """The catalog lists the segments of the flush up to a position, or whoever moves it there has their index."""
        self.sealed = [record for record in self.sealed if record.through != through]

    def forget_replaced(self, settled: Iterable[tuple[list[str], list[SegmentRef]]]) -> None:
        """The catalog reflects these compactions: the paths they replaced, and the segments they brought."""
        known = list(settled)
        self.replaced = [record for record in self.replaced if (record.replaced, record.segments) not in known]

    def pass_over(self) -> None:
        """A record was set aside: what comes behind it was checked on top of it, and is applied all the same."""
        self.has_gaps = True

    @staticmethod
    def _leave_gap(stream: Stream, offset: Offset) -> None:
        """What comes after an append that was set aside keeps its offset; readers find nothing in between."""
        if offset < stream.tail:
            raise Corrupt(f"an append at offset {offset} of stream {stream.key}, whose tail is {stream.tail}")
        stream.tail = offset

    def _stream_created(self, record: StreamCreated, position: Position) -> Stream:
        incarnation = Incarnation(position)
        key = StreamKey(record.bucket, record.stream)
        expiry = Expiry(record.ttl_seconds, record.expires_at, record.expires_at_ms)
        stream = Stream.created(incarnation, key, record.content_type, record.at_ms, expiry, record.fork)
        stream.tail += sum(map(len, record.messages))
        stream.closed = record.closed
        stream.seq = record.seq
        stream.earliest = record.earliest
        stream.snapshot = record.snapshot
        claim = record.producer
        if claim is not None:
            self.namespace.producers.put(incarnation, claim.id, ProducerState(claim.epoch, claim.seq, record.at_ms))
            stream.closed_by = claim if record.closed else None
        if record.fork is not None:
            source = self.namespace.by_incarnation(record.fork.source)
            if source is not None:
                self.namespace.change(source)
                source.forks += 1
        if self.has_gaps:
            self._give_up_name(key)
        self.namespace.add(stream)
        return stream

    def _give_up_name(self, key: StreamKey) -> None:
        """The record that ended this name's stream was set aside; its successor says that it was there."""
        older = self.namespace.find(key)
        if older is not None and not older.soft_deleted:
            self._end(older)

    def _stream_deleted(self, record: StreamDeleted, position: Position) -> Stream | None:
        stream = self.namespace.by_incarnation(record.stream)
        if stream is None or stream.soft_deleted:
            return None
        self._end(stream)
        return stream

    def _end(self, stream: Stream) -> None:
        self.namespace.change(stream)
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
        self.namespace.remove(stream)
        self.purged.append(stream)
        if stream.snapshot is not None:
            self.namespace.freed_blobs.append(stream.snapshot.blob)
        self.subscriptions.stream_purged(stream.key.v1_path)

    def _released_source(self, fork: Stream) -> Stream | None:
        """The source of a fork that is gone, if nothing else keeps the source's bytes."""
        source = self.namespace.by_incarnation(fork.fork.source) if fork.fork is not None else None
        if source is None:
            return None
        self.namespace.change(source)
        source.forks -= 1
        return source if source.soft_deleted and not source.forks else None

    def _snapshot_published(self, record: SnapshotPublished, position: Position) -> Stream | None:
        stream = self.namespace.by_incarnation(record.stream)
        if stream is None:
            self.namespace.freed_blobs.append(record.snapshot.blob)
            return None
        self.namespace.change(stream)
        if stream.snapshot is not None:
            self.namespace.freed_blobs.append(stream.snapshot.blob)
        stream.snapshot = record.snapshot
        if record.trims:
            stream.earliest = record.snapshot.offset
        stream.last_write_at_ms = record.at_ms
        stream.last_access_ms = max(stream.last_access_ms, record.at_ms)
        return stream

    def _stream_trimmed(self, record: StreamTrimmed, position: Position) -> Stream | None:
        stream = self.namespace.by_incarnation(record.stream)
        if stream is not None and record.earliest > stream.earliest:
            self.namespace.change(stream)
            stream.earliest = record.earliest
        return stream

    def _streams_touched(self, record: StreamsTouched, position: Position) -> None:
        for incarnation, at_ms in record.accessed.items():
            stream = self.namespace.by_incarnation(incarnation)
            if stream is not None:
                self.namespace.change(stream)
                stream.last_access_ms = max(stream.last_access_ms, at_ms)

    def _bucket_created(self, record: BucketCreated, position: Position) -> None:
        self.namespace.buckets.setdefault(record.bucket, Bucket(record.bucket, record.at_ms))

    def _bucket_deleted(self, record: BucketDeleted, position: Position) -> None:
        self.namespace.buckets.pop(record.bucket, None)

    def _segment_sealed(self, record: SegmentSealed, position: Position) -> None:
        self.flushed = record.through
        self.sealed.append(record)
        self.records_applied -= 1  # it tells of changes that are stored, and is none itself

    def _leader_started(self, record: LeaderStarted, position: Position) -> None:
        self.records_applied -= 1  # it fences the log and changes no state

    def _store_claimed(self, record: StoreClaimed, position: Position) -> None:
        if self.store_claim is None or record.claim != self.store_claim.claim:
            self.store_unasked_at = None
        elif self.store_unasked_at is None:
            self.store_unasked_at = position
        self.store_claim = record
        self.records_applied -= 1  # no reason to flush; the log keeps it until something else is one

    def _segments_replaced(self, record: SegmentsReplaced, position: Position) -> None:
        self.replaced.append(record)

    def _secrets_created(self, record: SecretsCreated, position: Position) -> None:
        self.secrets = record

    def _subscription_created(self, record: SubscriptionCreated, position: Position) -> None:
        self.subscriptions.created(record)

    def _subscription_deleted(self, record: SubscriptionDeleted, position: Position) -> None:
        self.subscriptions.deleted(record)

    def _subscription_changed(self, record: SubscriptionChanged, position: Position) -> None:
        self.subscriptions.changed(record)
