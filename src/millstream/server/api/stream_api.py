"""The base protocol on one stream: create, append, read, inspect, delete (§5).

Parses headers and queries into commands, and turns outcomes into responses. `streams/` decides what is allowed, and
`error_map` decides how a refusal looks.
"""

from __future__ import annotations

from functools import partial
from typing import Final
from urllib.parse import urlsplit

from millstream.errors import Gone, InvalidRequest, NotFound
from millstream.protocol.content_types import checked_content_type
from millstream.protocol.cursors import Cursor, parse_cursor
from millstream.protocol.etags import continues_another, format_etag, none_match
from millstream.protocol.expiry import parse_expiry
from millstream.protocol.json_messages import join_messages
from millstream.protocol.keys import RESERVED_STREAMS, StreamKey, stream_key_of
from millstream.protocol.offsets import BEGINNING_TOKEN, NOW_TOKEN, START, format_offset, parse_offset
from millstream.protocol.producers import ProducerClaim, parse_claim
from millstream.protocol.sse import is_base64
from millstream.server.api.background import in_background
from millstream.server.api.feed_api import parse_bytes_max
from millstream.server.api.live import LiveReaders, LongPoll, StreamFollower
from millstream.server.api.responses import no_content
from millstream.server.http.messages import SANDBOX, Answer, Request, Response, parse_query
from millstream.shard.reader import ReadResult
from millstream.shard.shard import Shard
from millstream.streams.commands import AppendMessages, AppendOutcome, Created, CreateStream, ForkRequest
from millstream.streams.state import Stream
from millstream.units import Incarnation, Offset

STREAM_SEQ_BYTES_MAX: Final = 256

# A full chunk never changes. A chunk that ends at the tail of an open stream grows, so caches must revalidate (§8.1).
# If reading needs a token, `caching.py` restricts this to the holder's own cache.
_CACHE_CHUNK: Final = b"cache-control: public, max-age=60, stale-while-revalidate=300\r\n"
_CACHE_TAIL: Final = b"cache-control: public, no-cache\r\n"
_CACHE_NEVER: Final = b"cache-control: no-store\r\n"
_UP_TO_DATE: Final = b"stream-up-to-date: true\r\n"
_CLOSED: Final = b"stream-closed: true\r\n"


class StreamApi:
    def __init__(self, shard: Shard, readers: LiveReaders) -> None:
        self._shard = shard
        self._readers = readers
        self.methods = {
            "POST": self.append,
            "GET": self.read,
            "PUT": self.create,
            "HEAD": self.head,
            "DELETE": self.delete,
        }

    # -- PUT (§5.1) ------------------------------------------------------------------------------------------

    def create(self, request: Request, key: StreamKey) -> Answer:
        if key.stream in RESERVED_STREAMS:
            raise InvalidRequest(f"the stream name {key.stream!r} is reserved", code="invalid_path")
        header = request.header
        content_type = header(b"content-type")
        command = CreateStream(
            key=key,
            content_type=checked_content_type(content_type.strip()) if content_type else None,
            body=request.body,
            closed=_is_true(request.headers.get(b"stream-closed")),
            expiry=parse_expiry(header(b"stream-ttl"), header(b"stream-expires-at")),
            fork=self._fork(request),
            seq=_stream_seq(request),
            producer=_producer(request),
            if_match=header(b"if-match"),
            only_if_absent=header(b"if-none-match") == "*",
            bucket_required=not request.path.startswith(b"/v1/"),
        )
        return self._shard.create(command).then(partial(self._created, request))

    @staticmethod
    def _fork(request: Request) -> ForkRequest | None:
        header = request.header
        source, offset, sub_offset = (
            header(b"stream-forked-from"),
            header(b"stream-fork-offset"),
            header(b"stream-fork-sub-offset"),
        )
        if source is None:
            if offset is not None or sub_offset is not None:
                raise InvalidRequest(
                    "Stream-Fork-Offset and Stream-Fork-Sub-Offset need Stream-Forked-From",
                    code="invalid_fork",
                )
            return None
        if sub_offset is not None and (
            not sub_offset.isascii()
            or not sub_offset.isdigit()
            or len(sub_offset) > 16
            or str(int(sub_offset)) != sub_offset
        ):
            raise InvalidRequest(
                f"Stream-Fork-Sub-Offset {sub_offset[:40]!r} is not a plain non-negative integer",
                code="invalid_fork_offset",
            )
        return ForkRequest(
            source_key(source),
            parse_offset(offset) if offset is not None else None,
            int(sub_offset) if sub_offset is not None else 0,
        )

    @staticmethod
    def _created(request: Request, outcome: Created) -> Response:
        fields = b"content-type: %b\r\nstream-next-offset: %b\r\netag: %b\r\n" % (
            outcome.content_type.encode("latin-1"),
            format_offset(outcome.tail).encode(),
            _state_etag(outcome.incarnation, outcome.tail, outcome.closed),
        )
        if outcome.closed:
            fields += _CLOSED
        claim = _producer(request)
        if claim is not None:
            fields += b"producer-epoch: %d\r\nproducer-seq: %d\r\n" % (claim.epoch, claim.seq)
        if outcome.is_new:
            fields += b"location: %b%b\r\n" % (request.base_url.encode(), request.path)
        return Response(201 if outcome.is_new else 200, fields)

    # -- POST (§5.2, §5.3) -----------------------------------------------------------------------------------

    def append(self, request: Request, key: StreamKey) -> Answer:
        return self._shard.append(append_command(request, key)).then(_appended)

    def judge_first_append(self, request: Request, key: StreamKey, content_type: str) -> None:
        """Raise the error that an append would get on a stream that had just been created."""
        now_ms = self._shard.clock.now_ms()
        fresh = Stream.created(Incarnation(0), key, content_type, now_ms)
        self._shard.checks.check_append(fresh, append_command(request, key), now_ms)

    # -- GET (§5.6, §5.7, §5.8) ------------------------------------------------------------------------------

    def read(self, request: Request, key: StreamKey) -> Answer:
        return self.read_query(request, key, parse_query(request.query))

    def read_query(self, request: Request, key: StreamKey, query: dict[str, str]) -> Answer:
        token = start_token(request, query)
        live = query.get("live")
        if live is not None and live not in ("long-poll", "sse"):
            raise InvalidRequest(f"live={live[:40]!r} is not a live mode", code="invalid_live", hint="long-poll or sse")
        if live is not None:
            self._readers.measure(request, live)
        if live is not None and token is None:
            raise InvalidRequest(
                "a live read needs an offset",
                code="missing_offset",
                hint="offset=-1 is the beginning, offset=now the end; or a Stream-Next-Offset",
            )
        offset = None if token == NOW_TOKEN else _start_offset(token)
        bytes_max = parse_bytes_max(query, self._readers.limits.chunk_bytes_max)
        stream = self._shard.get(key)
        self._shard.deadlines.touch(stream)
        if offset is not None:
            self._shard.check_retained(stream, offset)
            _check_incarnation(request, query, stream, offset)
        if live == "sse":
            return self._follow(request, query, stream, stream.tail if offset is None else offset)
        if live == "long-poll":
            return self._long_poll(request, query, stream, token or BEGINNING_TOKEN, offset, bytes_max)
        if offset is None:
            return self._read_now(stream)
        return self._chunk(request, stream, token or BEGINNING_TOKEN, offset, bytes_max)

    def _chunk(
        self, request: Request, stream: Stream, token: str, offset: Offset, bytes_max: int, interval: int | None = None
    ) -> Answer:
        if self._shard.is_hot(stream, offset):
            return self._render(request, stream, token, interval, self._shard.read(stream, offset, bytes_max))
        reading = in_background(self._shard.reader.read_cold(stream, offset, bytes_max))
        return reading.then(partial(self._render, request, stream, token, interval))

    def _render(
        self, request: Request, stream: Stream, token: str, interval: int | None, result: ReadResult
    ) -> Response:
        next_offset = format_offset(result.next_offset)
        etag = format_etag(stream.incarnation, token, next_offset, result.closed)
        condition = request.header(b"if-none-match")
        if condition is not None and none_match(condition, etag):
            return Response(304, b"etag: %b\r\n" % etag.encode())
        fields = b"content-type: %b\r\nstream-next-offset: %b\r\netag: %b\r\n%b" % (
            stream.content_type.encode("latin-1"),
            next_offset.encode(),
            etag.encode(),
            SANDBOX,
        )
        if result.up_to_date:
            fields += self._freshness()
        if not result.pieces:
            fields += _CACHE_NEVER
        else:
            fields += _CACHE_CHUNK if result.closed or not result.up_to_date else _CACHE_TAIL
        if result.closed:
            fields += _CLOSED
        body = join_messages(result.pieces) if stream.is_json else b"".join(result.pieces)
        if interval is not None:
            fields += _cursor_field(interval, stream, result.next_offset)
        return Response(200, fields, body)

    def _read_now(self, stream: Stream) -> Response:
        fields = b"content-type: %b\r\nstream-next-offset: %b\r\n" % (
            stream.content_type.encode("latin-1"),
            format_offset(stream.tail).encode(),
        )
        fields += self._freshness() + _CACHE_NEVER
        if stream.closed:
            fields += _CLOSED
        return Response(200, fields, b"[]" if stream.is_json else b"")

    def _freshness(self) -> bytes:
        """A follower node says "up to date" only when it knows that it has caught up."""
        return _UP_TO_DATE if self._shard.is_current() else b""

    def _long_poll(
        self, request: Request, query: dict[str, str], stream: Stream, token: str, offset: Offset | None, bytes_max: int
    ) -> Answer:
        start = stream.tail if offset is None else min(offset, stream.tail)
        if offset is None:
            token = format_offset(start)
        echoed = query.get("cursor")

        def answer(_: None = None) -> Answer:
            if stream.deleted:
                raise NotFound(f"stream {stream.key} was deleted")
            interval = self._readers.interval(echoed)
            if stream.tail > start:
                return self._chunk(request, stream, token, start, bytes_max, interval)
            fields = b"stream-next-offset: %b\r\n" % format_offset(stream.tail).encode()
            fields += self._freshness() + _CACHE_NEVER
            fields += _CLOSED if stream.closed else _cursor_field(interval, stream, stream.tail)
            return Response(204, fields)

        def is_ready() -> bool:
            return stream.tail > start or stream.closed or stream.deleted

        if is_ready():
            return answer()
        return LongPoll(self._readers, stream.incarnation, is_ready).over.then(answer)

    def _follow(self, request: Request, query: dict[str, str], stream: Stream, offset: Offset) -> Response:
        if stream.closed and offset >= stream.tail and request.headers.get(b"last-event-id"):
            # The reader has everything. An EventSource reconnects after any other end of the answer.
            fields = b"stream-next-offset: %b\r\n" % format_offset(stream.tail).encode()
            return Response(204, fields + _CLOSED + _CACHE_NEVER)
        fields = b"content-type: text/event-stream\r\ncache-control: no-cache\r\n"
        if is_base64(stream.content_type):
            fields += b"stream-sse-data-encoding: base64\r\n"
        return Response(200, fields, StreamFollower(self._readers, stream, offset, query.get("cursor")))

    # -- HEAD and DELETE (§5.4, §5.5) ------------------------------------------------------------------------

    def head(self, request: Request, key: StreamKey) -> Answer:
        stream = self._shard.get(key)
        etag = _state_etag(stream.incarnation, stream.tail, stream.closed)
        condition = request.header(b"if-none-match")
        if condition is not None and none_match(condition, etag.decode()):
            return Response(304, b"etag: %b\r\n" % etag)
        fields = b"content-type: %b\r\nstream-next-offset: %b\r\netag: %b\r\n" % (
            stream.content_type.encode("latin-1"),
            format_offset(stream.tail).encode(),
            etag,
        )
        fields += _CACHE_NEVER
        if stream.closed:
            fields += _CLOSED
        if stream.snapshot is not None:
            fields += b"stream-snapshot-offset: %b\r\n" % format_offset(stream.snapshot.offset).encode()
        if stream.earliest:
            fields += b"stream-earliest-offset: %b\r\n" % format_offset(stream.earliest).encode()
        if stream.expiry.ttl_seconds is not None:
            fields += b"stream-ttl: %d\r\n" % stream.expiry.ttl_seconds
        if stream.expiry.expires_at is not None:
            fields += b"stream-expires-at: %b\r\n" % stream.expiry.expires_at.encode()
        return Response(200, fields)

    def delete(self, request: Request, key: StreamKey) -> Answer:
        return self._shard.delete(key).then(no_content)


def append_command(request: Request, key: StreamKey) -> AppendMessages:
    """The command in a POST (§5.2)."""
    headers = request.headers
    content_type = headers.get(b"content-type")
    close = b"stream-closed" in headers and _is_true(headers[b"stream-closed"])
    if not request.body:
        if not close:
            raise InvalidRequest("an append needs a body, or Stream-Closed: true", code="empty_body")
    elif not content_type:
        raise InvalidRequest("Content-Type is required with a body", code="missing_content_type")
    return AppendMessages(
        key,
        content_type.decode("latin-1") if content_type is not None else None,
        request.body,
        close,
        _stream_seq(request) if b"stream-seq" in headers else None,
        _producer(request),
        request.header(b"if-match") if b"if-match" in headers else None,
    )


def _appended(outcome: AppendOutcome) -> Response:
    tail = outcome.tail
    fields = b'stream-next-offset: 0000000000000000_%016d\r\netag: "%x:-1:0000000000000000_%016d%b"\r\n' % (
        tail,
        outcome.incarnation,
        tail,
        b":c" if outcome.closed else b"",
    )
    status = 204
    if outcome.closed:
        fields += _CLOSED
    if outcome.producer_epoch is not None and outcome.producer_seq is not None:
        fields += b"producer-epoch: %d\r\nproducer-seq: %d\r\n" % (outcome.producer_epoch, outcome.producer_seq)
        if outcome.is_new_data:
            status = 200
    return Response(status, fields)


def _state_etag(incarnation: int, tail: int, closed: bool) -> bytes:
    return b'"%x:-1:0000000000000000_%016d%b"' % (incarnation, tail, b":c" if closed else b"")


def _is_true(value: bytes | None) -> bool:
    """Only `true`, in any case, closes; other values count as absent (§4.1)."""
    return value is not None and value.lower() == b"true"


def start_token(request: Request, query: dict[str, str]) -> str | None:
    """The offset at which a read continues.

    A reconnecting EventSource repeats its URL and gives its place in `Last-Event-ID`. A cursor can replace the offset
    if it contains an offset or is one.
    """
    if query.get("live") == "sse":
        seen = request.header(b"last-event-id")
        if seen:
            return seen
    token = query.get("offset")
    if token is None and "cursor" in query:
        return _offset_of_cursor(query["cursor"])
    return token


def _offset_of_cursor(text: str) -> str:
    cursor = parse_cursor(text)
    if cursor is None:
        return text  # an offset, or refused as an invalid one
    if cursor.offset is None:
        raise InvalidRequest(
            f"cursor={text[:40]!r} does not say where to read",
            code="invalid_cursor",
            hint="send offset with it, or a whole Stream-Cursor",
        )
    return format_offset(cursor.offset)


def _check_incarnation(request: Request, query: dict[str, str], stream: Stream, offset: int) -> None:
    """Refuse to continue with an offset of another stream that had the same name: it has no meaning in this one."""
    if offset == START:
        return  # no offset is skipped
    echoed, condition = query.get("cursor"), request.header(b"if-none-match")
    cursor = parse_cursor(echoed) if echoed is not None else None
    if (cursor is not None and cursor.incarnation not in (None, stream.incarnation)) or (
        condition is not None and continues_another(condition, stream.incarnation, format_offset(offset))
    ):
        raise Gone(
            f"stream {stream.key} was deleted and created again since",
            code="stream_recreated",
            hint="start again with offset=-1",
        )


def _cursor_field(interval: int, stream: Stream, offset: int) -> bytes:
    return b"stream-cursor: %b\r\n" % str(Cursor(interval, stream.incarnation, Offset(offset))).encode()


def _start_offset(token: str | None) -> Offset:
    return START if token is None or token == BEGINNING_TOKEN else parse_offset(token)


def _stream_seq(request: Request) -> str | None:
    value = request.header(b"stream-seq")
    if value is not None and len(value) > STREAM_SEQ_BYTES_MAX:
        raise InvalidRequest(f"Stream-Seq is longer than {STREAM_SEQ_BYTES_MAX} bytes", code="invalid_stream_seq")
    return value


def _producer(request: Request) -> ProducerClaim | None:
    headers = request.headers
    if b"producer-id" not in headers and b"producer-epoch" not in headers and b"producer-seq" not in headers:
        return None
    return parse_claim(
        request.header(b"producer-id"), request.header(b"producer-epoch"), request.header(b"producer-seq")
    )


def source_key(value: str) -> StreamKey:
    """The stream that a Stream-Forked-From header names: a path on this server."""
    try:
        return stream_key_of(urlsplit(value).path.encode("latin-1"))
    except (InvalidRequest, ValueError):
        raise InvalidRequest(
            f"Stream-Forked-From {value[:80]!r} is not the path of a stream on this server", code="invalid_fork"
        ) from None
