"""Buckets: create, inspect, delete, list (Extensions §1)."""

from __future__ import annotations

from typing import Final

import msgspec

from millstream.errors import InvalidRequest, MillstreamError
from millstream.server.http.error_map import error_response
from millstream.server.http.messages import Request, Response, parse_query
from millstream.shard.shard import Shard
from millstream.streams.state import Stream

PAGE_STREAMS_MAX: Final = 1000
_JSON: Final = b"content-type: application/json\r\ncache-control: no-store\r\n"


class BucketApi:
    def __init__(self, shard: Shard) -> None:
        self._shard = shard

    def create(self, request: Request, bucket: str) -> None:
        def created(outcome: object) -> None:
            if isinstance(outcome, MillstreamError):
                request.reply(error_response(outcome))
                return
            location = b"location: %b/%b\r\n" % (request.base_url.encode(), bucket.encode())
            request.reply(Response(201, location + _JSON, self._description(bucket)))

        self._shard.create_bucket(bucket, created)

    def get(self, request: Request, bucket: str) -> None:
        self._shard.namespace.bucket(bucket)
        request.reply(Response(200, _JSON, self._description(bucket)))

    def _description(self, name: str) -> bytes:
        bucket = self._shard.namespace.bucket(name)
        return msgspec.json.encode(
            {"bucket_id": name, "streams": bucket.streams, "created_at_ms": bucket.created_at_ms}
        )

    def delete(self, request: Request, bucket: str) -> None:
        self._shard.delete_bucket(
            bucket,
            lambda outcome: request.reply(
                error_response(outcome) if isinstance(outcome, MillstreamError) else Response(204)
            ),
        )

    def list_streams(self, request: Request, bucket: str) -> None:
        query = parse_query(request.query)
        prefix, after = query.get("prefix", ""), query.get("after", "")
        limit = _limit(query.get("limit"))
        self._shard.namespace.bucket(bucket)
        page = self._shard.listing.page(bucket, prefix, after, limit, self._shard.clock.now_ms())
        body = {
            "bucket_id": bucket,
            "prefix": prefix,
            "stream_count": len(page.streams),
            "streams": [_describe(stream) for stream in page.streams],
            "next_cursor": page.streams[-1].key.stream if page.streams else None,
            "has_more": page.has_more,
        }
        request.reply(Response(200, _JSON, msgspec.json.encode(body)))


def _describe(stream: Stream) -> dict[str, object]:
    return {
        "stream_id": stream.key.stream,
        "status": "Closed" if stream.closed else "Open",
        "content_type": stream.content_type,
        "tail_offset": stream.tail,
        "created_at_ms": stream.created_at_ms,
        "last_write_at_ms": stream.last_write_at_ms,
    }


def _limit(value: str | None) -> int:
    if value is None:
        return PAGE_STREAMS_MAX
    if not value.isascii() or not value.isdigit() or len(value) > 4 or not 1 <= int(value) <= PAGE_STREAMS_MAX:
        raise InvalidRequest(f"limit={value[:20]!r} is not a number from 1 to {PAGE_STREAMS_MAX}", code="invalid_limit")
    return int(value)
