"""Snapshots and bootstrap: the fast way into a long stream (Extensions §2, §3)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Final, cast

from millstream.errors import Conflict, InvalidRequest, NotFound
from millstream.protocol.content_types import OCTET_STREAM, checked_content_type
from millstream.protocol.keys import StreamKey
from millstream.protocol.multipart import boundary_from, closing, encode_parts, part_head
from millstream.protocol.offsets import format_offset, parse_offset
from millstream.server.api.background import in_background
from millstream.server.http.bodies import GeneratedBody
from millstream.server.http.messages import SANDBOX, Answer, Request, Response, parse_query
from millstream.shard.reader import ColdPiece
from millstream.shard.shard import Shard
from millstream.streams.records import SnapshotRef
from millstream.streams.state import Stream
from millstream.tiers.blobs import Upload
from millstream.tiers.hot import Messages
from millstream.units import Incarnation

PIECE_BYTES: Final = 256 << 10

_NEVER_CACHED: Final = b"cache-control: no-store\r\n"


class SnapshotApi:
    def __init__(self, shard: Shard, snapshot_bytes_max: int) -> None:
        self._shard = shard
        self.snapshot_bytes_max = snapshot_bytes_max

    def begin_upload(self) -> Upload:
        return self._shard.blobs.begin(self._shard.clock.random_bytes(16))

    def publish(self, request: Request, key: StreamKey, token: str) -> Answer:
        upload = cast("Upload | None", request.upload)
        if upload is None:
            raise InvalidRequest("a snapshot needs a body", code="empty_body")
        offset = parse_offset(token)
        content_type = checked_content_type((request.header(b"content-type") or OCTET_STREAM).strip())
        incarnation = _incarnation(request.header(b"stream-incarnation"))

        def published(stream: Stream) -> Response:
            fields = b"stream-next-offset: %b\r\nstream-snapshot-offset: %b\r\n" % (
                format_offset(stream.tail).encode(),
                format_offset(offset).encode(),
            )
            return Response(204, fields)

        publishing = self._shard.publish_snapshot(key, offset, content_type, upload, incarnation=incarnation)
        return publishing.then(published)

    def latest(self, request: Request, key: StreamKey) -> Answer:
        stream = self._shard.get(key)
        snapshot = self._snapshot(stream)
        location = f"{request.base_url}{request.path.decode('latin-1')}/{format_offset(snapshot.offset)}"
        fields = b"location: %b\r\n" % location.encode("latin-1")
        return Response(307, fields + self._fields(stream, snapshot) + _NEVER_CACHED)

    def read(self, request: Request, key: StreamKey, token: str) -> Answer:
        stream = self._shard.get(key)
        self._shard.deadlines.touch(stream)
        snapshot = self._snapshot(stream, parse_offset(token))
        fields = b"content-type: %b\r\n%b" % (snapshot.content_type.encode("latin-1"), SANDBOX)
        fields += self._fields(stream, snapshot)
        return in_background(self._open(stream, snapshot)).then(
            lambda pieces: Response(200, fields + _NEVER_CACHED, GeneratedBody(pieces), length=snapshot.size)
        )

    async def _open(self, stream: Stream, snapshot: SnapshotRef) -> AsyncIterator[bytes]:
        """The snapshot's bytes, verified against their checksum before any of them is sent."""
        return await self._shard.blobs.open(snapshot, lambda: stream.snapshot == snapshot)

    def delete(self, request: Request, key: StreamKey, token: str) -> Answer:
        self._snapshot(self._shard.get(key), parse_offset(token))
        raise Conflict(
            "the latest snapshot cannot be deleted: bootstrap needs it",
            code="snapshot_in_use",
            hint="publish a snapshot at a later offset; it replaces this one",
        )

    @staticmethod
    def _snapshot(stream: Stream, offset: int | None = None) -> SnapshotRef:
        snapshot = stream.snapshot
        if snapshot is None or offset not in (None, snapshot.offset):
            raise NotFound(f"stream {stream.key} has no such snapshot", code="snapshot_not_found")
        return snapshot

    @staticmethod
    def _fields(stream: Stream, snapshot: SnapshotRef) -> bytes:
        token = format_offset(snapshot.offset).encode()
        is_at_tail = snapshot.offset == stream.tail
        fields = b"stream-snapshot-offset: %b\r\nstream-next-offset: %b\r\nstream-up-to-date: %b\r\n" % (
            token,
            token,
            b"true" if is_at_tail else b"false",
        )
        return fields + b"stream-closed: true\r\n" if stream.closed and is_at_tail else fields

    # -- bootstrap -----------------------------------------------------------------------------------------

    def bootstrap(self, request: Request, key: StreamKey) -> Answer:
        if "live" in parse_query(request.query):
            raise InvalidRequest(
                "bootstrap is not live",
                code="invalid_live",
                hint="follow with GET and live=sse from Stream-Next-Offset",
            )
        stream = self._shard.get(key)
        self._shard.deadlines.touch(stream)
        snapshot = stream.snapshot
        boundary = boundary_from(self._shard.clock.random_bytes(16))
        fields = (
            b"content-type: multipart/mixed; boundary=%b\r\nstream-snapshot-offset: %b\r\nstream-next-offset: %b\r\n"
            b"stream-up-to-date: true\r\n"
        ) % (
            boundary.encode(),
            format_offset(snapshot.offset).encode() if snapshot is not None else b"-1",
            format_offset(stream.tail).encode(),
        )
        if stream.closed:
            fields += b"stream-closed: true\r\n"
        # One consistent cut: the messages from here to the current tail.
        start = snapshot.offset if snapshot is not None else stream.earliest
        cut = self._shard.reader.cut(stream, start, stream.tail)
        if snapshot is None:
            pieces = self._pieces(boundary, None, None, stream.content_type, cut)
            return Response(200, fields + _NEVER_CACHED, GeneratedBody(pieces))

        def render(opened: AsyncIterator[bytes]) -> Response:
            pieces = self._pieces(boundary, snapshot, opened, stream.content_type, cut)
            return Response(200, fields + _NEVER_CACHED, GeneratedBody(pieces))

        return in_background(self._open(stream, snapshot)).then(render)

    async def _pieces(
        self,
        boundary: str,
        snapshot: SnapshotRef | None,
        opened: AsyncIterator[bytes] | None,
        content_type: str,
        cut: list[Messages | ColdPiece],
    ) -> AsyncIterator[bytes]:
        yield part_head(boundary, snapshot.content_type if snapshot is not None else OCTET_STREAM, is_first=True)
        if opened is not None:
            async for piece in opened:
                yield piece
        for place in cut:
            for messages in _pieces_of(await self._shard.reader.fetch(place)):
                yield encode_parts(boundary, content_type, messages)
        yield closing(boundary)


def _incarnation(header: str | None) -> Incarnation | None:
    """The incarnation that a snapshot is of, as feeds and segments give it; streams may have had this name before."""
    if header is None:
        return None
    if not header.isascii() or not header.isdigit() or len(header) > 18:
        raise InvalidRequest(
            f"Stream-Incarnation is {header[:80]!r}",
            code="invalid_incarnation",
            hint="send the number that the feed gives",
        )
    return Incarnation(header)


def _pieces_of(messages: Messages) -> Iterator[Messages]:
    """Messages in runs of about the size of a piece."""
    start = size = 0
    for index, message in enumerate(messages, 1):
        size += len(message)
        if size >= PIECE_BYTES or index == len(messages):
            yield messages[start:index]
            start, size = index, 0
