"""Compactions over HTTP: a job proposes a replacement of segments and learns whether it is now in force.

POST /cluster/compactions   {"replace": [path, …], "segments": [{"path": …, "size": …, …}, …]}
"""

from __future__ import annotations

import msgspec

from millstream.errors import InvalidRequest
from millstream.server.api.background import in_background
from millstream.server.api.responses import as_json
from millstream.server.http.messages import Answer, Request
from millstream.shard.compaction import Proposal
from millstream.shard.shard import Shard
from millstream.streams.records import SegmentRef
from millstream.tiers.cold import bucket_of_path


class ProposedSegment(msgspec.Struct, forbid_unknown_fields=True):
    """A `SegmentRef` by the names of its fields."""

    path: str
    bucket: str
    size: int
    checksum: int
    rows: int
    payload_bytes: int
    first_position: int
    last_position: int
    first_at_ms: int
    last_at_ms: int
    footer_bytes: int
    footer_checksum: int


class ProposalBody(msgspec.Struct, forbid_unknown_fields=True):
    replace: list[str]
    segments: list[ProposedSegment]


def bucket_of_proposal(request: Request) -> str | None:
    """The bucket whose segments a proposal replaces; None if the body does not say, and will be refused."""
    try:
        body = msgspec.json.decode(request.body, type=ProposalBody)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    if body.segments:
        return body.segments[0].bucket
    return bucket_of_path(body.replace[0]) if body.replace else None


class CompactionApi:
    def __init__(self, shard: Shard) -> None:
        self._compaction = shard.compaction

    def commit(self, request: Request) -> Answer:
        try:
            body = msgspec.json.decode(request.body, type=ProposalBody)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise InvalidRequest(
                f"the proposal cannot be read: {error}", code="invalid_compaction", hint="see docs/api.md"
            ) from None
        segments = [SegmentRef(*msgspec.structs.astuple(segment)) for segment in body.segments]
        committed = in_background(self._compaction.commit(Proposal(body.replace, segments)))
        return committed.then(lambda compacted: as_json(compacted._asdict()))
