"""Buckets: create, inspect, delete, list (Extensions §1)."""

from __future__ import annotations

from typing import Final

import msgspec

from millstream.errors import InvalidRequest
from millstream.server.api.responses import JSON_FIELDS, as_json, no_content
from millstream.server.http.messages import Answer, Request, Response, parse_query
from millstream.shard.shard import Shard
from millstream.streams.state import Stream

PAGE_STREAMS_MAX: Final = 1000


class BucketApi:
    def __init__(self, shard: Shard) -> None:
        self._shard = shard

    def create(self, request: Request, bucket: str) -> Answer:
        def created(_: None) -> Response:
            location = b"location: %b/%b\r\n" % (request.base_url.encode(), bucket.encode())
            return Response(201, location + JSON_FIELDS, self._description(bucket))

        return self._shard.create_bucket(bucket).then(created)

    def get(self, request: Request, bucket: str) -> Answer:
        self._shard.namespace.bucket(bucket)
        return Response(200, JSON_FIELDS, self._description(bucket))

    def _description(self, name: str) -> bytes:
        bucket = self._shard.namespace.bucket(name)
        return msgspec.json.encode(
            {"bucket_id": name, "streams": bucket.streams, "created_at_ms": bucket.created_at_ms}
        )

    def delete(self, request: Request, bucket: str) -> Answer:
        return self._shard.delete_bucket(bucket).then(no_content)

    def list_streams(self, request: Request, bucket: str) -> Answer:
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
        return as_json(body)


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
