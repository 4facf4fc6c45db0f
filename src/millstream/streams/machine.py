"""The state machine of a shard: checks that turn commands into records, and the effects of records on state.

Checks look at committed state and at what is in flight (`Stream.ahead`), emit a record and leave committed state
alone. `apply` alone changes committed state, from records alone, so that replaying the log rebuilds it. Message
bytes are not kept here: state knows where messages lie, the tiers know what they say.

Commands that change what a name means (create, delete) run alone on that name: the shard sees to it that nothing
else is in flight there, so their checks need no second view.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from millstream.errors import (
    Conflict,
    Gone,
    InvalidRequest,
    NotFound,
    OffsetTrimmed,
    PreconditionFailed,
    StreamClosed,
)
from millstream.protocol.content_types import OCTET_STREAM, media_type
from millstream.protocol.etags import state_matches
from millstream.protocol.expiry import NEVER, Expiry
from millstream.protocol.json_messages import split_messages
from millstream.protocol.keys import StreamKey
from millstream.protocol.offsets import OFFSET_MAX, format_offset
from millstream.protocol.producers import ProducerState, is_duplicate
from millstream.streams.commands import AppendMessages, AppendOutcome, Created, CreateStream, ForkRequest
from millstream.streams.records import (
    AnyRecord,
    Appended,
    BucketCreated,
    BucketDeleted,
    ForkPoint,
    SecretsCreated,
    SegmentSealed,
    SnapshotPublished,
    StreamCreated,
    StreamDeleted,
    StreamsTouched,
    SubscriptionChanged,
    SubscriptionCreated,
    SubscriptionDeleted,
)
from millstream.streams.state import Ahead, Bucket, Stream
from millstream.streams.subscriptions import Subscriptions


class StateSource(Protocol):
    """Where state that is not in memory comes from: the catalog, as of the last checkpoint."""

    def load_key(self, key: StreamKey) -> Stream | None: ...

    def load_incarnation(self, incarnation: int) -> Stream | None: ...


class ForkResolver(Protocol):
    """Finds the message boundary a fork request means, and the bytes of a message cut in two (tiers know)."""

    def __call__(self, source: Stream, offset: int, sub_offset: int) -> tuple[int, list[bytes]]: ...


class StateMachine:
    def __init__(self, source: StateSource) -> None:
        self._source = source
        self._by_key: dict[StreamKey, Stream] = {}
        self._by_incarnation: dict[int, Stream] = {}
        self.buckets: dict[str, Bucket] = {}
        self.subscriptions = Subscriptions()
        self.secrets: SecretsCreated | None = None
        # Changes since the last checkpoint; `freezing` are those of a checkpoint being taken.
        self.dirty: dict[int, Stream] = {}
        self.removed: dict[int, StreamKey] = {}
        self.freezing: dict[int, Stream] = {}
        self.removing: dict[int, StreamKey] = {}
        self.before_change: Callable[[Stream], None] = lambda stream: None
        # What the records applied last have let go: the shard frees the bytes at once. Blobs go after the next
        # flush: until then the object store alone would still restore a state that refers to them.
        self.purged: list[Stream] = []
        self.freed_blobs: list[str] = []
        # Before this position everything is cold; `sealed` are the segments the catalog does not list yet.
        self.flushed = 1
        self.sealed: list[SegmentSealed] = []
        # Streams in a checkpoint that is not yet written: the catalog still shows them as they were, or not at all.
        self.frozen: dict[int, Stream] = {}
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
        }

    # -- looking things up ---------------------------------------------------------------------------------

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
        if stream.soft_deleted or (stream.forks and stream.is_expired(now_ms)):
            raise Gone(f"stream {key} was deleted; its bytes remain for its forks only")
        if stream.is_expired(now_ms):
            raise NotFound(f"stream {key} has expired", code="stream_expired")
        return stream

    def resident(self) -> Iterator[Stream]:
        return iter(self._by_incarnation.values())

    def if_resident(self, incarnation: int) -> Stream | None:
        return self._by_incarnation.get(incarnation)

    def unsaved(self) -> Iterator[Stream]:
        """Streams that changed since the catalog was last written; some may not be in it at all."""
        yield from self.dirty.values()
        for incarnation, stream in self.frozen.items():
            if incarnation not in self.dirty and incarnation not in self.removed:
                yield stream

    def bucket(self, name: str) -> Bucket:
        bucket = self.buckets.get(name)
        if bucket is None:
            raise NotFound(f"bucket {name} does not exist", code="bucket_not_found")
        return bucket

    def evict(self, stream: Stream) -> bool:
        """Forget a stream that the catalog has as it is; it is loaded again when it is asked for."""
        incarnation = stream.incarnation
        if stream.ahead is not None or incarnation in self.dirty or incarnation in self.frozen:
            return False
        del self._by_incarnation[incarnation]
        if self._by_key.get(stream.key) is stream:
            del self._by_key[stream.key]
        return True

    def resident_count(self) -> int:
        return len(self._by_incarnation)

    def _admit(self, stream: Stream | None) -> Stream | None:
        """Keep a stream in memory; one that was purged since the catalog last heard of it stays out."""
        if stream is None or stream.incarnation in self.removed or stream.incarnation in self.removing:
            return None
        self._by_key[stream.key] = stream
        self._by_incarnation[stream.incarnation] = stream
        return stream

    # -- checks: commands become records ---------------------------------------------------------------------

    def check_append(
        self, stream: Stream, command: AppendMessages, now_ms: int
    ) -> tuple[Appended | None, AppendOutcome]:
        """The record of an append, or None when it repeats one that is already accepted.

        Order of judgement (§5.2): closed, content type, body, producer, precondition, Stream-Seq.
        """
        view = stream.ahead or stream
        claim = command.producer
        if view.closed:
            return None, self._repeated_close(stream, view, command)
        messages = self._messages(stream, command) if command.body else []
        if claim is not None:
            state = stream.producer(claim.id)
            if is_duplicate(state, claim):
                assert state is not None
                return None, AppendOutcome(stream.incarnation, view.tail, view.closed, False, claim.epoch, state.seq)
        if command.if_match is not None:
            self.check_precondition(stream, command.if_match)
        if command.seq is not None and view.seq is not None and command.seq <= view.seq:
            raise Conflict(f"Stream-Seq {command.seq!r} is not greater than {view.seq!r}", code="sequence_conflict")
        tail = view.tail
        record = Appended(stream.incarnation, tail, now_ms, messages, command.close, command.seq, claim)
        for message in messages:
            tail += len(message)
        if tail > OFFSET_MAX:
            raise Conflict(f"stream {stream.key} has reached its greatest offset", code="stream_full")
        if claim is None:
            return record, AppendOutcome(stream.incarnation, tail, command.close, True)
        return record, AppendOutcome(stream.incarnation, tail, command.close, bool(messages), claim.epoch, claim.seq)

    def _messages(self, stream: Stream, command: AppendMessages) -> list[bytes]:
        if command.content_type is None:
            raise InvalidRequest("Content-Type is required with a body", code="missing_content_type")
        if command.content_type != stream.content_type and media_type(command.content_type) != stream.media_type:
            raise Conflict(
                f"the stream holds {stream.content_type}, the request {command.content_type}",
                code="content_type_mismatch",
            )
        if not stream.is_json:
            return [command.body]
        messages = split_messages(command.body)
        if not messages:
            raise InvalidRequest("an append of an empty JSON array has no messages", code="empty_append")
        return messages

    def _repeated_close(self, stream: Stream, view: Stream | Ahead, command: AppendMessages) -> AppendOutcome:
        """A request to a closed stream succeeds only if it repeats a close (§5.2, §5.2.1)."""
        claim = command.producer
        if claim is None:
            if command.close and not command.body:
                return AppendOutcome(stream.incarnation, view.tail, True)
        elif claim == view.closed_by:
            return AppendOutcome(stream.incarnation, view.tail, True, False, claim.epoch, claim.seq)
        else:
            state = stream.producer(claim.id)
            if state is not None and claim.epoch < state.epoch:
                is_duplicate(state, claim)  # raises: a fenced producer learns that first
        raise StreamClosed(f"stream {stream.key} is closed", tail=view.tail)

    def accept(self, stream: Stream, record: Appended, tail: int, position: int) -> None:
        """Let later checks see an append that is on its way to the log."""
        ahead = stream.ahead
        if ahead is None:
            ahead = stream.ahead = Ahead(stream)
        ahead.tail = tail
        ahead.position = position
        if record.close:
            ahead.closed = True
            ahead.closed_by = record.producer
        if record.seq is not None:
            ahead.seq = record.seq
        if record.producer is not None:
            ahead.producers[record.producer.id] = ProducerState(record.producer.epoch, record.producer.seq)

    def check_precondition(self, stream: Stream, if_match: str) -> None:
        view = stream.ahead or stream
        if not state_matches(if_match, stream.incarnation, format_offset(view.tail), view.closed):
            raise PreconditionFailed(
                f"If-Match does not name the present state of stream {stream.key}",
                hint="read the stream or its HEAD again for the current ETag",
            )

    def check_create(
        self, command: CreateStream, now_ms: int, resolve_fork: ForkResolver
    ) -> tuple[list[StreamCreated | StreamDeleted], Created | None]:
        """The records that create a stream; or none and the stream that already matches.

        A stream that has expired gives up its name first, in a record of its own.
        """
        records: list[StreamCreated | StreamDeleted] = []
        if command.bucket_required:
            self.bucket(command.key.bucket)
        existing = self.find(command.key)
        if existing is not None:
            if existing.soft_deleted or (existing.forks and existing.is_expired(now_ms)):
                raise Conflict(
                    f"stream {command.key} was deleted but has forks; its name is free when they are gone",
                    code="stream_has_forks",
                )
            if not existing.is_expired(now_ms):
                if command.only_if_absent:
                    raise PreconditionFailed(f"stream {command.key} exists already")
                if command.if_match is not None:
                    self.check_precondition(existing, command.if_match)
                self._check_same_configuration(existing, command)
                return [], Created(False, existing.incarnation, existing.content_type, existing.tail, existing.closed)
            records.append(StreamDeleted(existing.incarnation, now_ms, existing.key, expired=True))
        if command.if_match is not None:
            raise PreconditionFailed(f"If-Match names a state, but stream {command.key} does not exist")
        if command.producer is not None:
            is_duplicate(None, command.producer)
        content_type, expiry = command.content_type, command.expiry
        prefix: list[bytes] = []
        fork: ForkPoint | None = None
        earliest, snapshot = 0, None
        if command.fork is not None:
            source = self._fork_source(command.fork, content_type, now_ms)
            requested = source.tail if command.fork.offset is None else command.fork.offset
            if requested < source.earliest:
                raise OffsetTrimmed(
                    f"the source {source.key} no longer holds what came before its earliest offset",
                    earliest=source.earliest,
                )
            offset, prefix = resolve_fork(source, requested, command.fork.sub_offset)
            earliest, snapshot = source.earliest, source.snapshot
            fork = ForkPoint(source.incarnation, offset, requested, command.fork.sub_offset)
            content_type = content_type or source.content_type
            expiry = self._inherited_expiry(expiry, source)
        content_type = content_type or OCTET_STREAM
        messages = prefix + self._initial_messages(content_type, command.body)
        records.append(
            StreamCreated(
                command.key.bucket,
                command.key.stream,
                now_ms,
                content_type,
                messages,
                command.closed,
                expiry.ttl_seconds,
                expiry.expires_at,
                expiry.expires_at_ms,
                fork,
                command.seq,
                command.producer,
                earliest,
                snapshot,
            )
        )
        return records, None

    def check_snapshot(
        self, stream: Stream, offset: int, is_boundary: Callable[[Stream, int], bool] | None = None
    ) -> None:
        """Whether a snapshot may be published at this offset (Extensions §2.2); all but the boundary without one."""
        if offset > stream.tail:
            raise Conflict(
                f"the snapshot's offset lies beyond the tail of stream {stream.key}", code="snapshot_beyond_tail"
            )
        if offset < stream.earliest:
            raise OffsetTrimmed(
                f"stream {stream.key} no longer holds what came before its earliest offset", earliest=stream.earliest
            )
        if stream.snapshot is not None and offset < stream.snapshot.offset:
            raise Conflict(f"stream {stream.key} has a newer snapshot", code="snapshot_stale")
        if is_boundary is not None and not is_boundary(stream, offset):
            raise InvalidRequest(
                "the snapshot's offset is not a message boundary",
                code="invalid_offset",
                hint="use a Stream-Next-Offset value returned by the server",
            )

    def check_create_bucket(self, name: str, now_ms: int) -> BucketCreated:
        if name in self.buckets:
            raise Conflict(f"bucket {name} exists already", code="bucket_exists")
        return BucketCreated(name, now_ms)

    def check_delete_bucket(self, name: str, now_ms: int) -> BucketDeleted:
        if self.bucket(name).streams:
            raise Conflict(
                f"bucket {name} holds {self.buckets[name].streams} streams",
                code="bucket_not_empty",
                hint="delete its streams first",
            )
        return BucketDeleted(name, now_ms)

    @staticmethod
    def _initial_messages(content_type: str, body: bytes) -> list[bytes]:
        if not body:
            return []
        return split_messages(body) if media_type(content_type) == "application/json" else [body]

    def _fork_source(self, fork: ForkRequest, content_type: str | None, now_ms: int) -> Stream:
        source = self.find(fork.source)
        if source is None or (source.is_expired(now_ms) and not source.forks):
            raise NotFound(f"the source {fork.source} of the fork does not exist", code="fork_source_not_found")
        if source.soft_deleted or source.is_expired(now_ms):
            raise Conflict(f"the source {fork.source} of the fork was deleted", code="fork_source_deleted")
        if content_type is not None and media_type(content_type) != source.media_type:
            raise Conflict(
                f"the fork asks for {content_type}, its source holds {source.content_type}",
                code="content_type_mismatch",
            )
        return source

    @staticmethod
    def _inherited_expiry(asked: Expiry, source: Stream) -> Expiry:
        return source.expiry if asked.matches(NEVER) else asked

    def _check_same_configuration(self, existing: Stream, command: CreateStream) -> None:
        fork, origin = command.fork, existing.fork
        expiry, content_type = command.expiry, command.content_type
        if fork is None:
            same_fork = origin is None
            content_type = content_type or OCTET_STREAM
        else:
            source = self.find(fork.source)
            same_fork = (
                origin is not None
                and source is not None
                and origin.source == source.incarnation
                and fork.offset in (None, origin.requested_offset)
                and fork.sub_offset == origin.requested_sub_offset
            )
            if source is not None:
                expiry = self._inherited_expiry(expiry, source)
        differs = [
            name
            for name, same in (
                ("content type", content_type is None or media_type(content_type) == existing.media_type),
                ("expiry", expiry.matches(existing.expiry)),
                ("closure", command.closed == existing.closed),
                ("fork", same_fork),
            )
            if not same
        ]
        if differs:
            raise Conflict(
                f"stream {existing.key} already exists with another {' and '.join(differs)}",
                code="stream_exists",
            )

    # -- effects: records change state -----------------------------------------------------------------------

    def apply(self, record: AnyRecord, position: int) -> Stream | None:
        """Make a durable record true. Returns the stream it is about, for those who publish its bytes."""
        return self._effects[type(record)](record, position)

    def _change(self, stream: Stream) -> None:
        if self.freezing and self.freezing.pop(stream.incarnation, None) is not None:
            self.before_change(stream)
        self.dirty[stream.incarnation] = stream

    def _appended(self, record: Appended, position: int) -> Stream | None:
        stream = self.by_incarnation(record.stream)
        if stream is None:
            return None  # purged by an earlier record while this one was in flight
        self._change(stream)
        assert record.offset == stream.tail, "an append must start at the tail"
        for message in record.messages:
            stream.tail += len(message)
        stream.last_write_at_ms = record.at_ms
        if record.at_ms > stream.last_access_ms:
            stream.last_access_ms = record.at_ms
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
        stream = Stream(
            position,
            key,
            record.content_type,
            created_at_ms=record.at_ms,
            expiry=Expiry(record.ttl_seconds, record.expires_at, record.expires_at_ms),
            fork=record.fork,
        )
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

    def _secrets_created(self, record: SecretsCreated, position: int) -> None:
        self.secrets = record

    def _subscription_created(self, record: SubscriptionCreated, position: int) -> None:
        self.subscriptions.created(record)

    def _subscription_deleted(self, record: SubscriptionDeleted, position: int) -> None:
        self.subscriptions.deleted(record)

    def _subscription_changed(self, record: SubscriptionChanged, position: int) -> None:
        self.subscriptions.changed(record)
