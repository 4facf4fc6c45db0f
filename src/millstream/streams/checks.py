"""Checks: commands become records, or refusals.

A check looks at the namespace and at what is in flight (`Stream.ahead`), and leaves committed state alone. Commands
that change what a name means (create, delete) run alone on that name: the shard sees to it that nothing else is in
flight there, so their checks need no second view.
"""

from __future__ import annotations

from typing import Protocol

from millstream.errors import (
    Conflict,
    InvalidRequest,
    NotFound,
    OffsetTrimmed,
    PreconditionFailed,
    StreamClosed,
)
from millstream.protocol.content_types import JSON, OCTET_STREAM, media_type
from millstream.protocol.etags import state_matches
from millstream.protocol.expiry import NEVER, Expiry
from millstream.protocol.json_messages import split_messages
from millstream.protocol.offsets import OFFSET_MAX, START, format_offset
from millstream.protocol.producers import ProducerState, is_duplicate
from millstream.streams.commands import AppendMessages, AppendOutcome, Created, CreateStream, ForkRequest
from millstream.streams.namespace import Namespace
from millstream.streams.records import (
    Appended,
    BucketCreated,
    BucketDeleted,
    ForkPoint,
    SnapshotRef,
    StreamCreated,
    StreamDeleted,
)
from millstream.streams.state import NO_PRODUCERS, Ahead, Stream
from millstream.units import Milliseconds, Offset, Position


class ForkResolver(Protocol):
    """Finds the message boundary a fork request means, and the bytes of a message cut in two (tiers know)."""

    def __call__(self, source: Stream, offset: Offset, sub_offset: int) -> tuple[Offset, list[bytes]]: ...


class Checks:
    def __init__(self, namespace: Namespace) -> None:
        self._namespace = namespace
        self._limits = namespace.limits

    def check_append(
        self, stream: Stream, command: AppendMessages, now_ms: Milliseconds
    ) -> tuple[Appended | None, AppendOutcome]:
        """The record of an append, or None when it repeats one that is already accepted.

        Order of judgement (§5.2): closed, content type, body, producer, precondition, Stream-Seq.
        """
        view = stream.ahead or stream
        claim = command.producer
        if view.closed:
            return None, self._repeated_close(stream, view, command, now_ms)
        messages = self._messages(stream, command) if command.body else []
        if claim is not None:
            state = self._namespace.producer(stream, claim.id, now_ms)
            if is_duplicate(state, claim):
                assert state is not None
                return None, AppendOutcome(stream.incarnation, view.tail, view.closed, False, claim.epoch, state.seq)
        if command.if_match is not None:
            self.check_precondition(stream, command.if_match)
        if command.seq is not None and view.seq is not None and command.seq <= view.seq:
            raise Conflict(f"Stream-Seq {command.seq!r} is not greater than {view.seq!r}", code="sequence_conflict")
        tail = view.tail
        record = Appended(stream.incarnation, tail, now_ms, messages, command.close, command.seq, claim)
        tail += sum(map(len, messages))
        if tail > OFFSET_MAX:
            raise Conflict(f"stream {stream.key} has reached its greatest offset", code="stream_full")
        if claim is None:
            return record, AppendOutcome(stream.incarnation, tail, command.close, True)
        if state is None:
            in_flight = len(stream.ahead.producers) if stream.ahead is not None else 0
            self._namespace.producers.check_room(stream.incarnation, claim.id, in_flight)
        return record, AppendOutcome(stream.incarnation, tail, command.close, bool(messages), claim.epoch, claim.seq)

    def _messages(self, stream: Stream, command: AppendMessages) -> list[bytes]:
        if command.content_type is None:
            raise InvalidRequest("Content-Type is required with a body", code="missing_content_type")
        if command.content_type != stream.content_type and media_type(command.content_type) != stream.media_type:
            raise Conflict(
                f"the stream holds {stream.content_type}, the request {command.content_type}",
                code="content_type_mismatch",
                hint=f"send Content-Type: {stream.content_type}",
            )
        if not stream.is_json:
            return [command.body]
        messages = self._split(command)
        if not messages:
            raise InvalidRequest("an append of an empty JSON array has no messages", code="empty_append")
        return messages

    def _repeated_close(
        self, stream: Stream, view: Stream | Ahead, command: AppendMessages, now_ms: Milliseconds
    ) -> AppendOutcome:
        """A request to a closed stream succeeds only if it repeats a close (§5.2, §5.2.1)."""
        claim = command.producer
        if claim is None:
            if command.close and not command.body:
                return AppendOutcome(stream.incarnation, view.tail, True)
        elif claim == view.closed_by:
            return AppendOutcome(stream.incarnation, view.tail, True, False, claim.epoch, claim.seq)
        else:
            state = self._namespace.producer(stream, claim.id, now_ms)
            if state is not None and claim.epoch < state.epoch:
                is_duplicate(state, claim)  # raises: a fenced producer learns that first
        raise StreamClosed(f"stream {stream.key} is closed", tail=view.tail)

    def accept(self, stream: Stream, record: Appended, tail: Offset, position: Position) -> None:
        """Let later checks see an append that is on its way to the log."""
        ahead = stream.ahead
        if ahead is None:
            ahead = stream.ahead = Ahead(stream.tail, stream.closed, stream.closed_by, stream.seq, NO_PRODUCERS)
        ahead.tail = tail
        ahead.position = position
        if record.close:
            ahead.closed = True
            ahead.closed_by = record.producer
        if record.seq is not None:
            ahead.seq = record.seq
        if record.producer is not None:
            if not ahead.producers:
                ahead.producers = {}
            ahead.producers[record.producer.id] = ProducerState(
                record.producer.epoch, record.producer.seq, record.at_ms
            )

    def check_precondition(self, stream: Stream, if_match: str) -> None:
        view = stream.ahead or stream
        if not state_matches(if_match, stream.incarnation, format_offset(view.tail), view.closed):
            raise PreconditionFailed(
                f"If-Match does not name the present state of stream {stream.key}",
                hint="read the stream or its HEAD again for the current ETag",
            )

    def check_create(
        self, command: CreateStream, now_ms: Milliseconds, resolve_fork: ForkResolver
    ) -> tuple[list[StreamCreated | StreamDeleted], Created | None]:
        """The records that create a stream; or none and the stream that already matches.

        A stream that has expired gives up its name first, in a record of its own.
        """
        records: list[StreamCreated | StreamDeleted] = []
        if command.bucket_required:
            self._namespace.bucket(command.key.bucket)
        existing = self._namespace.find(command.key)
        if existing is not None:
            if existing.soft_deleted or (existing.forks and self._namespace.is_expired(existing, now_ms)):
                raise Conflict(
                    f"stream {command.key} was deleted but has forks; its name is free when they are gone",
                    code="stream_has_forks",
                )
            if not self._namespace.is_expired(existing, now_ms):
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
        earliest, snapshot = START, None
        if command.fork is not None:
            source = self._fork_source(command.fork, content_type, now_ms)
            requested = source.tail if command.fork.offset is None else command.fork.offset
            if requested < source.earliest:
                raise OffsetTrimmed(
                    f"the source {source.key} no longer holds what came before its earliest offset",
                    earliest=source.earliest,
                )
            offset, prefix = resolve_fork(source, requested, command.fork.sub_offset)
            earliest, snapshot = source.earliest, self._inherited_snapshot(source, offset)
            fork = ForkPoint(source.incarnation, offset, requested, command.fork.sub_offset)
            content_type = content_type or source.content_type
            expiry = self._inherited_expiry(expiry, source)
        content_type = content_type or OCTET_STREAM
        messages = prefix + self._initial_messages(content_type, command)
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

    def check_snapshot(self, stream: Stream, offset: Offset, *, is_boundary: bool = True) -> None:
        """Whether a snapshot may be published at this offset (Extensions §2.2)."""
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
        if not is_boundary:
            raise InvalidRequest(
                "the snapshot's offset is not a message boundary",
                code="invalid_offset",
                hint="use a Stream-Next-Offset value returned by the server",
            )

    def check_create_bucket(self, name: str, now_ms: Milliseconds) -> BucketCreated:
        if name in self._namespace.buckets:
            raise Conflict(f"bucket {name} exists already", code="bucket_exists")
        return BucketCreated(name, now_ms)

    def check_delete_bucket(self, name: str, now_ms: Milliseconds) -> BucketDeleted:
        if self._namespace.bucket(name).streams:
            raise Conflict(
                f"bucket {name} holds {self._namespace.buckets[name].streams} streams",
                code="bucket_not_empty",
                hint="delete its streams first",
            )
        return BucketDeleted(name, now_ms)

    def _initial_messages(self, content_type: str, command: CreateStream) -> list[bytes]:
        if not command.body:
            return []
        return self._split(command) if media_type(content_type) == JSON else [command.body]

    def _split(self, command: AppendMessages | CreateStream) -> list[bytes]:
        """The messages of a JSON body, or what is wrong with it; a large one was looked at before."""
        split = command.split
        if split is None:
            return split_messages(command.body, self._limits.append_messages_max)
        if isinstance(split, InvalidRequest):
            raise split
        return split

    def _fork_source(self, fork: ForkRequest, content_type: str | None, now_ms: Milliseconds) -> Stream:
        source = self._namespace.find(fork.source)
        is_expired = source is not None and self._namespace.is_expired(source, now_ms)
        if source is None or (is_expired and not source.forks):
            raise NotFound(f"the source {fork.source} of the fork does not exist", code="fork_source_not_found")
        if source.soft_deleted or is_expired:
            raise Conflict(f"the source {fork.source} of the fork was deleted", code="fork_source_deleted")
        if content_type is not None and media_type(content_type) != source.media_type:
            raise Conflict(
                f"the fork asks for {content_type}, its source holds {source.content_type}",
                code="content_type_mismatch",
            )
        self._check_depth(source)
        return source

    def _check_depth(self, source: Stream) -> None:
        """Refuse a fork whose bytes would be found only at the end of a long chain of sources."""
        stream, depth_max = source, self._limits.fork_depth_max
        for _ in range(depth_max):
            below = self._namespace.peek(stream.fork.source) if stream.fork is not None else None
            if below is None:
                return
            stream = below
        raise Conflict(
            f"stream {source.key} is itself a fork of a fork, {depth_max} deep; deeper is not allowed",
            code="fork_too_deep",
            hint="fork a stream nearer to the first source, or copy the messages into a new stream;"
            " streams.fork_depth_max is the limit",
        )

    @staticmethod
    def _inherited_snapshot(source: Stream, offset: Offset) -> SnapshotRef | None:
        """The source's snapshot, unless it tells of what comes after the fork point; trimmed history needs one."""
        snapshot = source.snapshot
        if snapshot is None or snapshot.offset <= offset:
            return snapshot
        if source.earliest:
            raise OffsetTrimmed(
                f"the source {source.key} no longer holds its beginning, and its snapshot lies beyond the fork point",
                earliest=snapshot.offset,
            )
        return None

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
            source = self._namespace.find(fork.source)
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
