"""Yjs documents over HTTP (Yjs protocol §5): discovery, snapshots, updates, awareness.

A document is an ordinary stream, so the base protocol's handlers read and write it. This module has only what Yjs adds:
which stream a request means, when it is created, framing, snapshots, and queueing for compaction.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from millstream.errors import InvalidRequest, MillstreamError, NotFound, ProducerFenced
from millstream.protocol.content_types import OCTET_STREAM, media_type
from millstream.protocol.cursors import parse_cursor
from millstream.protocol.expiry import Expiry
from millstream.protocol.keys import StreamKey
from millstream.protocol.lib0 import check_updates
from millstream.protocol.offsets import BEGINNING_TOKEN, NOW_TOKEN, START, format_offset, parse_offset
from millstream.server.api.background import in_background
from millstream.server.api.live import LiveReaders, LongPoll
from millstream.server.api.responses import then
from millstream.server.api.stream_api import StreamApi
from millstream.server.http.bodies import GeneratedBody
from millstream.server.http.limits import ReadLimits
from millstream.server.http.messages import Answer, Request, Response, parse_query
from millstream.shard.listeners import bucket_topic
from millstream.shard.shard import Shard
from millstream.streams.commands import Created, CreateStream
from millstream.streams.state import Stream
from millstream.units import Offset
from millstream.yjs.compaction import CompactionLimits, Compactor
from millstream.yjs.names import AWARENESS_DEFAULT, Document

SNAPSHOT_TOKEN: Final = "snapshot"
SNAPSHOT_SUFFIX: Final = "_snapshot"

# Awareness is short-lived: when its stream has grown to the first size, all but about the second is trimmed.
AWARENESS_BYTES_MAX: Final = 1 << 20
AWARENESS_BYTES_KEPT: Final = 64 << 10

_CACHE_DISCOVERY: Final = b"cache-control: private, max-age=5\r\n"
_CACHE_NEVER: Final = b"cache-control: no-store\r\n"
_EMPTY_FIELDS: Final = (
    b"stream-next-offset: %b\r\nstream-up-to-date: true\r\n" % format_offset(START).encode() + _CACHE_NEVER
)


@dataclass(frozen=True, slots=True)
class YjsSettings:
    implicit_create: bool = True
    awareness_ttl_seconds: int = 3600
    long_poll_seconds: float = 60.0
    compaction: CompactionLimits = CompactionLimits()


class YjsApi:
    def __init__(self, shard: Shard, readers: LiveReaders, settings: YjsSettings) -> None:
        self._shard = shard
        self._settings = settings
        self._readers = readers.with_limits(self._with_longer_polls(readers.limits))
        self._streams = StreamApi(shard, self._readers)
        self.compactor = Compactor(shard, settings.compaction)
        self.methods: dict[str, Callable[[Request, Document], Answer]] = {
            "GET": self.read,
            "POST": self.write,
            "PUT": self.create,
            "HEAD": self.head,
            "DELETE": self.delete,
        }

    def _with_longer_polls(self, limits: ReadLimits) -> ReadLimits:
        return replace(limits, long_poll_seconds=self._settings.long_poll_seconds)

    def set_read_limits(self, limits: ReadLimits) -> None:
        self._readers.limits = self._with_longer_polls(limits)
        self.compactor.limits = replace(self.compactor.limits, snapshot_bytes_max=limits.snapshot_bytes_max)

    # -- reading (§5.1, §5.2, §5.3, §5.5) ----------------------------------------------------------------------

    def read(self, request: Request, document: Document) -> Answer:
        query = parse_query(request.query)
        if "awareness" in query:
            return self._read_awareness(request, document, query)
        offset = query.get("offset")
        if offset == SNAPSHOT_TOKEN:
            return self._discover(request, document)
        if offset is not None and offset.endswith(SNAPSHOT_SUFFIX):
            return self._read_snapshot(document, offset.removesuffix(SNAPSHOT_SUFFIX))
        return self._read_updates(request, document, query)

    def _discover(self, request: Request, document: Document) -> Response:
        stream = self._find(document)
        snapshot = stream.snapshot if stream is not None else None
        token = BEGINNING_TOKEN if snapshot is None else format_offset(snapshot.offset) + SNAPSHOT_SUFFIX
        kept = [pair for pair in request.query.split(b"&") if pair and not pair.startswith(b"offset=")]
        query = b"&".join([b"offset=%b" % token.encode(), *kept])
        location = b"location: %b%b?%b\r\n" % (request.base_url.encode(), request.path, query)
        return Response(307, location + _CACHE_DISCOVERY)

    def _read_snapshot(self, document: Document, token: str) -> Answer:
        stream = self._find(document)
        snapshot = stream.snapshot if stream is not None else None
        try:
            offset = parse_offset(token)
        except InvalidRequest:
            offset = None  # no snapshot can be there
        if stream is None or snapshot is None or snapshot.offset != offset:
            raise NotFound(
                f"document {document} has no snapshot at {token[:64]!r}",
                code="snapshot_not_found",
                hint="ask for the present one with offset=snapshot",
            )
        self._shard.deadlines.touch(stream)
        # One more than the snapshot's own offset, as clients expect. A read there still returns whole messages, because
        # none is short enough to be skipped.
        fields = b"content-type: %b\r\nstream-next-offset: %b\r\n" % (
            OCTET_STREAM.encode(),
            format_offset(snapshot.offset + 1).encode(),
        )
        opened = in_background(self._shard.blobs.open(snapshot, lambda: stream.snapshot == snapshot))
        return opened.then(
            lambda pieces: Response(200, fields + _CACHE_NEVER, GeneratedBody(pieces), length=snapshot.size)
        )

    def _read_updates(self, request: Request, document: Document, query: dict[str, str]) -> Answer:
        if query.get("live") == "true":
            query = {**query, "live": "long-poll"}
        if self._find(document) is None:
            return self._read_nothing(request, document, query)
        return self._streams.read_query(request, document.key, query)

    def _read_nothing(self, request: Request, document: Document, query: dict[str, str]) -> Answer:
        """A document without updates reads as empty (§9.1), unless the request demands that it exists."""
        token = query.get("offset", BEGINNING_TOKEN)
        if token not in (BEGINNING_TOKEN, NOW_TOKEN):
            parse_offset(token)
        live = query.get("live")
        if live is None:
            return Response(200, b"content-type: %b\r\n" % OCTET_STREAM.encode() + _EMPTY_FIELDS)
        if live == "long-poll":
            return self._await_document(request, document, query)
        raise _no_document(document)

    def _await_document(self, request: Request, document: Document, query: dict[str, str]) -> Answer:
        def is_ready() -> bool:
            stream = self._existing(document.key)
            return stream is not None and stream.tail > 0

        def answer(_: None) -> Answer:
            if is_ready():
                return self._streams.read_query(request, document.key, {**query, "offset": BEGINNING_TOKEN})
            cursor = b"stream-cursor: %d\r\n" % self._readers.interval(query.get("cursor"))
            return Response(204, _EMPTY_FIELDS + cursor)

        return LongPoll(self._readers, bucket_topic(document.service), is_ready).over.then(answer)

    def _read_awareness(self, request: Request, document: Document, query: dict[str, str]) -> Answer:
        key = document.awareness_key(query["awareness"])
        if query.get("live") == "true":
            query = {**query, "live": "sse"}
        cursor = parse_cursor(query.get("cursor", ""))
        if cursor is not None and "offset" in query:
            # Awareness streams expire and are created again; the content of an earlier one is not needed.
            query = {**query, "cursor": str(cursor.interval)}

        def read() -> Answer:
            stream = self._existing(key)
            token = query.get("offset")
            if stream is not None and token == BEGINNING_TOKEN and stream.earliest:
                # Trimmed awareness is not needed.
                return self._streams.read_query(request, key, {**query, "offset": format_offset(stream.earliest)})
            return self._streams.read_query(request, key, query)

        return self._with_awareness(document, key, read)

    # -- writing (§5.4, §5.6) ----------------------------------------------------------------------------------

    def write(self, request: Request, document: Document) -> Answer:
        says_goodbye = b"stream-closed" in request.headers and not request.body
        _adapt_headers(request)
        name = parse_query(request.query).get("awareness")
        if name is not None:
            return self._write_awareness(request, document, name)
        stream = self._find(document)
        if says_goodbye:
            return self._answer_close(stream)
        check_updates(request.body)
        append = partial(self._streams.append, request, document.key)
        if stream is None:
            self._streams.judge_first_append(request, document.key, OCTET_STREAM)
            answer = self._create_then(CreateStream(document.key, OCTET_STREAM), append)
        else:
            self._check_session(request, stream)
            answer = append()
        return _after_success(answer, partial(self._on_existing, document.key, self.compactor.consider))

    @staticmethod
    def _answer_close(stream: Stream | None) -> Response:
        """Answer a client that ends its producer by closing the stream: the document stays open."""
        tail = format_offset(stream.tail if stream is not None else START)
        return Response(204, b"stream-next-offset: %b\r\n" % tail.encode())

    def _write_awareness(self, request: Request, document: Document, name: str) -> Answer:
        key = document.awareness_key(name)
        self._check_has_awareness(document)
        if self._existing(key) is None:
            self._streams.judge_first_append(request, key, OCTET_STREAM)
        answer = self._with_awareness(document, key, partial(self._streams.append, request, key))
        return _after_success(answer, partial(self._on_existing, key, self._shorten))

    def _on_existing(self, key: StreamKey, then: Callable[[Stream], None]) -> None:
        stream = self._existing(key)
        if stream is not None:
            then(stream)

    def _shorten(self, stream: Stream) -> None:
        if stream.tail - stream.earliest >= AWARENESS_BYTES_MAX:
            boundary = self._shard.reader.hot_boundary(stream, Offset(stream.tail - AWARENESS_BYTES_KEPT))
            if boundary > stream.earliest:
                self._shard.trim(stream, boundary)

    # -- the document itself ---------------------------------------------------------------------------------

    def create(self, request: Request, document: Document) -> Answer:
        _adapt_headers(request)
        content_type = request.headers[b"content-type"].decode("latin-1")
        if media_type(content_type) != OCTET_STREAM:
            raise InvalidRequest(f"a document holds {OCTET_STREAM}, not {content_type[:80]!r}")
        name = parse_query(request.query).get("awareness")
        if name is None:
            check_updates(request.body)
            return then(self._streams.create(request, document.key), partial(self._create_awareness_too, document))
        key = document.awareness_key(name)
        if self._existing(document.key) is None:
            raise _no_document(document)
        request.headers[b"stream-ttl"] = b"%d" % self._settings.awareness_ttl_seconds
        return self._streams.create(request, key)

    def _create_awareness_too(self, document: Document, response: Response) -> Answer:
        """Create the default awareness stream together with the document, before the answer."""
        key = document.awareness_key(AWARENESS_DEFAULT)
        if response.status >= 300 or self._existing(key) is not None:
            return response
        # Also if that fails: the first reader or writer creates it.
        return self._shard.create(self._awareness(key)).then_either(lambda _: response)

    def _awareness(self, key: StreamKey) -> CreateStream:
        return CreateStream(key, OCTET_STREAM, expiry=Expiry(self._settings.awareness_ttl_seconds, None, None))

    def head(self, request: Request, document: Document) -> Answer:
        return self._streams.head(request, self._named(request, document))

    def delete(self, request: Request, document: Document) -> Answer:
        """Delete a document with its awareness streams; or one awareness stream."""
        key = self._named(request, document)
        answer = self._streams.delete(request, key)
        return _after_success(answer, partial(self._delete_awareness, document)) if key == document.key else answer

    def _delete_awareness(self, document: Document) -> None:
        for stream in list(self._shard.scan_paths(f"{document.service}/{document.awareness_prefix}")):
            if document.owns_awareness(stream.key):
                self._shard.delete(stream.key)

    def _named(self, request: Request, document: Document) -> StreamKey:
        """The stream that a request names in its query: the document's, or one of its awareness streams."""
        name = parse_query(request.query).get("awareness")
        if name is None:
            return document.key
        key = document.awareness_key(name)
        self._check_has_awareness(document)
        if self._existing(key) is None:
            raise _no_awareness(document)
        return key

    # -- what exists -----------------------------------------------------------------------------------------

    def _existing(self, key: StreamKey) -> Stream | None:
        try:
            return self._shard.get(key)
        except MillstreamError:
            return None

    def _find(self, document: Document) -> Stream | None:
        """The document's stream; None if it does not exist and need not."""
        self._check_document(document)
        return self._existing(document.key)

    def _check_document(self, document: Document) -> None:
        if not self._settings.implicit_create and self._existing(document.key) is None:
            raise _no_document(document)

    def _check_has_awareness(self, document: Document) -> None:
        """A document that does not exist or is deleted has no awareness streams, and none are created."""
        if self._existing(document.key) is None:
            raise _no_awareness(document)

    def _with_awareness(self, document: Document, key: StreamKey, action: Callable[[], Answer]) -> Answer:
        """Continue once an awareness stream exists: its first reader or writer creates it (§5.6)."""
        self._check_has_awareness(document)
        return action() if self._existing(key) is not None else self._create_then(self._awareness(key), action)

    def _create_then(self, command: CreateStream, action: Callable[[], Answer]) -> Answer:
        """Continue once a stream exists, created by this request or by an earlier one."""

        def created(outcome: Created | MillstreamError) -> Answer:
            if isinstance(outcome, MillstreamError) and self._existing(command.key) is None:
                raise outcome
            return action()

        return self._shard.create(command).then_either(created)

    def _check_session(self, request: Request, stream: Stream) -> None:
        """Make a producer that restarts its sequence claim a new epoch.

        A client that reconnects counts from 0 again under its old name and epoch. By the base protocol's rule (§5.2.1)
        its updates would be taken for repeats and dropped. The error tells it its old epoch, and it takes the next one.
        At worst an update is stored twice, which is harmless in Yjs.
        """
        producer_id = request.header(b"producer-id")
        if producer_id is None or request.header(b"producer-seq") != "0":
            return
        state = self._shard.namespace.producer(stream, producer_id, self._shard.clock.now_ms())
        if state is not None and request.header(b"producer-epoch") == str(state.epoch):
            raise ProducerFenced(
                f"producer {producer_id!r} has written in epoch {state.epoch} already", current_epoch=state.epoch
            )


def _no_document(document: Document) -> NotFound:
    return NotFound(f"document {document} does not exist", hint="create it with PUT")


def _no_awareness(document: Document) -> NotFound:
    return NotFound(
        f"document {document} has no such awareness stream",
        code="awareness_not_found",
        hint="create the document, then write to the awareness stream or read it",
    )


def _adapt_headers(request: Request) -> None:
    """The default content type is that of documents, and a request never closes a document."""
    headers = {b"content-type": OCTET_STREAM.encode(), **request.headers}
    headers.pop(b"stream-closed", None)
    request.headers = headers


def _after_success(answer: Answer, action: Callable[[], None]) -> Answer:
    def answered(response: Response) -> Response:
        if response.status < 300:
            action()
        return response

    return then(answer, answered)
