"""Where a bucket's cold data is, for readers that fetch segments from the object store themselves.

`GET /{bucket}/streams/cold` returns the store (never its credentials), the bucket's segments and two positions of the
same moment: everything through `flushed` is in those segments, everything after it through `latest` is in the feed.
Segments may hold rows of deleted streams; `POST` to the same path says which incarnations exist, and from which offset.
A segment holds streams of the whole bucket, so all of this needs `read` on the whole bucket.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Annotated, Any, Final, NamedTuple

import msgspec

from millstream.errors import InvalidRequest, PayloadTooLarge
from millstream.server.api.background import in_background
from millstream.server.api.feed_api import SHARD, position_of
from millstream.server.api.responses import as_json
from millstream.server.http.messages import Answer, Request, Response, parse_query
from millstream.shard.shard import Shard
from millstream.streams.records import SegmentRef
from millstream.tiers.objects import ObjectStoreSettings
from millstream.units import Incarnation, Position

INCARNATIONS_MAX: Final = 100_000
POSITION_MAX: Final = 2**63 - 1
# Names of credentials. All other settings of the store may be shown to readers of the bucket.
SECRET_OPTIONS: Final = ("access_key_id", "secret_access_key", "session_token", "service_account", "account_key")


class _Question(msgspec.Struct, forbid_unknown_fields=True):
    incarnations: list[Annotated[Incarnation, msgspec.Meta(ge=0, le=POSITION_MAX)]]


_QUESTION: Final = msgspec.json.Decoder(_Question)


class _Segments(NamedTuple):
    flushed: int
    segments: list[SegmentRef]


class ColdApi:
    def __init__(self, shard: Shard, store: ObjectStoreSettings) -> None:
        self._shard = shard
        self._store = {
            "backend": store.backend,
            "path": str(store.path.absolute() if store.backend == "fs" else store.path),
            "options": {name: value for name, value in store.options.items() if value and name not in SECRET_OPTIONS},
        }

    def describe(self, request: Request, bucket: str) -> Answer:
        after = parse_query(request.query).get("after")
        position = position_of(after) if after else Position(-1)
        self._shard.namespace.bucket(bucket)
        return in_background(self._segments(bucket, position)).then(partial(self._description, bucket))

    async def _segments(self, bucket: str, after: Position) -> _Segments:
        position, segments = await asyncio.to_thread(self._shard.cold_segments, bucket, after)
        return _Segments(position - 1, segments)

    def _description(self, bucket: str, found: _Segments) -> Response:
        shard = self._shard
        body = {
            "bucket": bucket,
            "store": self._store,
            "shards": [
                {
                    "shard": SHARD,
                    "earliest": shard.feed.earliest,
                    "flushed": found.flushed,
                    "latest": shard.feed.latest,
                    "unflushed_bytes": shard.hot.backlog_bytes,
                    "segments": [msgspec.structs.asdict(segment) for segment in found.segments],
                }
            ],
        }
        return as_json(body)

    def describe_all(self, request: Request) -> Answer:
        """The same for the whole server, for maintenance jobs: without segments, because the manifests list them."""
        return as_json(self.overview())

    def overview(self) -> dict[str, Any]:
        return {
            "store": self._store,
            "flushed": self._shard.machine.flushed - 1,
            "latest": self._shard.feed.latest,
            "buckets": sorted(self._shard.namespace.buckets),
        }

    def ask_alive(self, request: Request, bucket: str) -> Answer:
        self._shard.namespace.bucket(bucket)
        try:
            question = _QUESTION.decode(request.body)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise InvalidRequest(
                f"the body is not a question about incarnations: {error}",
                code="invalid_body",
                hint='send {"incarnations": [17, 42]}',
            ) from None
        if len(question.incarnations) > INCARNATIONS_MAX:
            raise PayloadTooLarge(
                f"{len(question.incarnations)} incarnations are too many at once", hint=f"ask for {INCARNATIONS_MAX:,}"
            )

        alive = in_background(self._shard.alive(bucket, question.incarnations))
        return alive.then(lambda found: as_json({"alive": found}))
