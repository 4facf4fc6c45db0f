"""The feed over HTTP: all messages and events of a bucket on one connection, as NDJSON, SSE or Arrow.

A token is a reader's place: `{shard}.{position}` for each shard. Every answer carries the next one in
`Stream-Feed-Token`; over SSE it is the event id, so that an EventSource resumes by itself.
"""

from __future__ import annotations

import re
from base64 import b64encode
from functools import partial
from typing import Any, Final

import msgspec
import pyarrow as arrow

from millstream.errors import InvalidRequest, OffsetTrimmed
from millstream.protocol.content_types import is_json, is_text
from millstream.protocol.offsets import format_offset
from millstream.protocol.sse import encode_event
from millstream.server.api.background import in_background
from millstream.server.api.live import Follower, LiveReaders, LongPoll
from millstream.server.http.messages import Answer, Request, Response, parse_query
from millstream.shard.feed import FeedItem, FeedPage
from millstream.shard.listeners import bucket_topic
from millstream.shard.shard import Shard
from millstream.tiers.segments import SCHEMA as SEGMENT_SCHEMA
from millstream.units import Position

ARROW_TYPE: Final = "application/vnd.apache.arrow.stream"
NDJSON_TYPE: Final = "application/x-ndjson"
SHARD: Final = 0

_ARROW_SCHEMA: Final = arrow.schema(
    [
        *(field for field in SEGMENT_SCHEMA if field.name != "incarnation"),
        arrow.field("event", arrow.string()),
        arrow.field("incarnation", arrow.int64()),  # null for events, which are not messages
    ]
)
_NO_LINE_BREAKS: Final = bytes.maketrans(b"\r\n", b"  ")
_TOKEN: Final = re.compile(r"0\.([0-9]{1,18})")


class FeedApi:
    def __init__(self, shard: Shard, readers: LiveReaders) -> None:
        self._shard = shard
        self._readers = readers

    def read(self, request: Request, bucket: str) -> Answer:
        query = parse_query(request.query)
        live = query.get("live")
        if live not in (None, "long-poll", "sse"):
            raise InvalidRequest(f"live={live[:40]!r} is not a live mode", code="invalid_live", hint="long-poll or sse")
        if live is not None:
            self._readers.measure(request, live)
        prefix = query.get("prefix", "")
        bytes_max = parse_bytes_max(query, self._readers.limits.chunk_bytes_max)
        token = query.get("after")
        if live == "sse":  # a reconnecting EventSource repeats its URL and sends its place in a header
            token = request.header(b"last-event-id") or token
        # A follower of a bucket must learn that the bucket was deleted with its last stream.
        if not token or token == "now":
            self._shard.namespace.bucket(bucket)
        after = self._after(token)
        feed = self._shard.feed
        if live == "sse":
            follower = FeedFollower(self._readers, self._shard, bucket, after, prefix)
            fields = b"content-type: text/event-stream\r\ncache-control: no-cache\r\n"
            return Response(200, fields, follower)

        def answer(_: None = None) -> Answer:
            if feed.is_hot(after):
                return self._page(request, bucket, feed.read(bucket, after, prefix, bytes_max))
            reading = in_background(feed.read_cold(bucket, after, prefix, bytes_max))
            return reading.then(partial(self._page, request, bucket))

        def is_ready() -> bool:
            return not feed.is_hot(after) or bool(feed.read(bucket, after, prefix, 1).items)

        if live == "long-poll" and not is_ready():
            return LongPoll(self._readers, bucket_topic(bucket), is_ready).over.then(answer)
        return answer()

    def _after(self, token: str | None) -> Position:
        if token is None or token == "":
            return self._shard.feed.earliest
        if token == "now":
            return self._shard.feed.latest
        after = position_of(token)
        if after < self._shard.feed.earliest:
            raise OffsetTrimmed(
                "what happened after this token is no longer kept",
                earliest=self._shard.feed.earliest + 1,
                hint="start again without a token",
            )
        if after > self._shard.feed.latest:
            raise InvalidRequest(f"after={token!r} lies in the future of this bucket", code="invalid_token")
        return after

    def _page(self, request: Request, bucket: str, page: FeedPage) -> Response:
        fields = (
            b"stream-feed-token: %b\r\ncache-control: no-store\r\nvary: accept\r\n" % _token(page.position).encode()
        )
        if page.up_to_date and self._shard.is_current():
            fields += b"stream-up-to-date: true\r\n"
        if ARROW_TYPE in (request.header(b"accept") or ""):
            return Response(200, b"content-type: %b\r\n" % ARROW_TYPE.encode() + fields, _arrow(bucket, page.items))
        lines = [msgspec.json.encode(_as_json(bucket, item)) + b"\n" for item in page.items]
        return Response(200, b"content-type: %b\r\n" % NDJSON_TYPE.encode() + fields, b"".join(lines))


class FeedFollower(Follower):
    """The feed as server-sent events."""

    def __init__(self, readers: LiveReaders, shard: Shard, bucket: str, after: Position, prefix: str) -> None:
        super().__init__(readers, bucket_topic(bucket))
        self._shard = shard
        self._bucket = bucket
        self._after = after
        self._prefix = prefix
        self._has_spoken = False

    def _advance(self) -> bool:
        feed, limit = self._shard.feed, self._readers.limits.chunk_bytes_max
        if not feed.is_hot(self._after):
            self._fetch(feed.read_cold(self._bucket, self._after, self._prefix, limit), self._send)
            return False
        return self._send(feed.read(self._bucket, self._after, self._prefix, limit))

    def _send(self, page: FeedPage) -> bool:
        """Send a page; returns whether there may be more."""
        if page.position == self._after and self._has_spoken:
            return False
        self._after = page.position
        if page.items or not page.up_to_date or not self._has_spoken:
            self._has_spoken = True
            events = [self._event(item) for item in page.items]
            self._write(b"".join(events) + self._control(up_to_date=page.up_to_date))
        return not page.up_to_date

    def _event(self, item: FeedItem) -> bytes:
        data = msgspec.json.encode(_as_json(self._bucket, item))
        return encode_event(item.event.encode(), data, _token(item.position).encode())

    def _control(self, *, up_to_date: bool) -> bytes:
        control: dict[str, object] = {"token": _token(self._after)}
        if up_to_date and self._shard.is_current():
            control["upToDate"] = True
        return encode_event(b"control", msgspec.json.encode(control), _token(self._after).encode())


def position_of(token: str) -> Position:
    match = _TOKEN.fullmatch(token)
    if match is None:
        raise InvalidRequest(
            f"after={token[:60]!r} is not a feed token", code="invalid_token", hint="use Stream-Feed-Token, or now"
        )
    return Position(match[1])


def parse_bytes_max(query: dict[str, str], limit: int) -> int:
    """The most bytes that a reader wants: `max_bytes`, or `limit` as its other name."""
    value = query.get("max_bytes", query.get("limit"))
    if value is None:
        return limit
    if not value.isascii() or not value.isdigit() or len(value) > 15 or int(value) == 0:
        raise InvalidRequest(f"{value[:20]!r} is not a number of bytes", code="invalid_limit", hint="1 or more")
    return min(int(value), limit)


def _token(position: int) -> str:
    return f"{SHARD}.{position}"


def _as_json(bucket: str, item: FeedItem) -> dict[str, object]:
    described: dict[str, object] = {
        "event": item.event,
        "bucket": bucket,
        "stream": item.stream,
        "offset": format_offset(item.offset),
        "next_offset": format_offset(item.next_offset),
        "position": item.position,
        "appended_at_ms": item.at_ms,
        "content_type": item.content_type,
    }
    if item.payload is not None:
        described["encoding"], described["payload"] = _payload(item.content_type, item.payload)
    return described


def _payload(content_type: str, payload: bytes) -> tuple[str, object]:
    if is_json(content_type):
        # A line break can only be between JSON tokens here, and NDJSON ends a line with one.
        return "json", msgspec.Raw(payload.translate(_NO_LINE_BREAKS))
    if is_text(content_type):
        try:
            return "text", payload.decode("utf-8")
        except UnicodeDecodeError:
            pass
    return "base64", b64encode(payload).decode()


def _arrow(bucket: str, items: list[FeedItem]) -> bytes:
    """The page as an Arrow IPC stream, with the columns of a cold segment and the event beside them."""
    columns: list[list[Any]] = [
        [bucket] * len(items),
        [item.stream for item in items],
        [item.offset for item in items],
        [item.next_offset for item in items],
        [SHARD] * len(items),
        [item.position for item in items],
        [item.at_ms for item in items],
        [item.content_type for item in items],
        [item.payload for item in items],
        [item.event for item in items],
        [item.incarnation for item in items],
    ]
    arrays = [arrow.array(column, type=field.type) for column, field in zip(columns, _ARROW_SCHEMA, strict=True)]
    batch = arrow.record_batch(arrays, schema=_ARROW_SCHEMA)
    sink = arrow.BufferOutputStream()
    with arrow.ipc.new_stream(sink, _ARROW_SCHEMA) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue())
