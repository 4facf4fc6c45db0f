"""Yjs documents over HTTP (Yjs protocol §5): discovery, snapshots, updates, awareness.

A document is an ordinary stream, so reading and writing it is the base protocol's doing; here is only what Yjs adds:
which stream a request means, when one comes into being, framing, snapshots, and the wish to be compacted.
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
from millstream.server.api.later import reply_later
from millstream.server.api.live import LiveReaders, LongPoll
from millstream.server.api.stream_api import StreamApi
from millstream.server.http.bodies import GeneratedBody
from millstream.server.http.error_map import error_response, yjs_error
from millstream.server.http.limits import ReadLimits
from millstream.server.http.messages import Request, Response, parse_query
from millstream.shard.listeners import bucket_topic
from millstream.shard.shard import Shard
from millstream.streams.commands import CreateStream
from millstream.streams.state import Stream
from millstream.yjs.compaction import CompactionLimits, Compactor
from millstream.yjs.names import AWARENESS_DEFAULT, Document

SNAPSHOT_TOKEN: Final = "snapshot"
SNAPSHOT_SUFFIX: Final = "_snapshot"

# Awareness is of the moment: when a stream of it has grown to the one, all but about the other is given up.
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
        self._readers = readers.with_limits(self._waiting_longer(readers.limits))
        self._streams = StreamApi(shard, self._readers)
        self.compactor = Compactor(shard, settings.compaction)
        self.methods: dict[str, Callable[[Request, Document], None]] = {
            "GET": self.read,
            "POST": self.write,
            "PUT": self.create,
            "HEAD": self.head,
            "DELETE": self.delete,
        }

    def _waiting_longer(self, limits: ReadLimits) -> ReadLimits:
        return replace(limits, long_poll_seconds=self._settings.long_poll_seconds)

    def set_read_limits(self, limits: ReadLimits) -> None:
        self._readers.limits = self._waiting_longer(limits)
        self.compactor.limits = replace(self.compactor.limits, snapshot_bytes_max=limits.snapshot_bytes_max)

    @staticmethod
    def adopt(request: Request) -> None:
        """Make every error that the request is answered with one of this protocol's (§10)."""
        reply = request.reply
        request.reply = lambda response: reply(yjs_error(response) if response.status >= 400 else response)

    # -- reading (§5.1, §5.2, §5.3, §5.5) ----------------------------------------------------------------------

    def read(self, request: Request, document: Document) -> None:
        query = parse_query(request.query)
        if "awareness" in query:
            self._read_awareness(request, document, query)
            return
        offset = query.get("offset")
        if offset == SNAPSHOT_TOKEN:
            self._discover(request, document)
        elif offset is not None and offset.endswith(SNAPSHOT_SUFFIX):
            self._read_snapshot(request, document, offset.removesuffix(SNAPSHOT_SUFFIX))
        else:
            self._read_updates(request, document, query)

    def _discover(self, request: Request, document: Document) -> None:
        stream = self._find(document)
        snapshot = stream.snapshot if stream is not None else None
        token = BEGINNING_TOKEN if snapshot is None else format_offset(snapshot.offset) + SNAPSHOT_SUFFIX
        kept = [pair for pair in request.query.split(b"&") if pair and not pair.startswith(b"offset=")]
        query = b"&".join([b"offset=%b" % token.encode(), *kept])
        location = b"location: %b%b?%b\r\n" % (request.base_url.encode(), request.path, query)
        request.reply(Response(307, location + _CACHE_DISCOVERY))

    def _read_snapshot(self, request: Request, document: Document, token: str) -> None:
        stream = self._find(document)
        snapshot = stream.snapshot if stream is not None else None
        try:
            offset = parse_offset(token)
        except InvalidRequest:
            offset = None  # where no snapshot can be
        if stream is None or snapshot is None or snapshot.offset != offset:
            raise NotFound(
                f"document {document} has no snapshot at {token[:64]!r}",
                code="snapshot_not_found",
                hint="ask for the present one with offset=snapshot",
            )
        self._shard.deadlines.touch(stream)
        # One more than the snapshot's own offset, as clients expect; a read there still returns whole messages, and
        # none is so short that it could be passed over.
        fields = b"content-type: %b\r\nstream-next-offset: %b\r\n" % (
            OCTET_STREAM.encode(),
            format_offset(snapshot.offset + 1).encode(),
        )
        reply_later(
            request,
            self._shard.blobs.open(snapshot, lambda: stream.snapshot == snapshot),
            lambda pieces: Response(200, fields + _CACHE_NEVER, GeneratedBody(pieces), length=snapshot.size),
        )

    def _read_updates(self, request: Request, document: Document, query: dict[str, str]) -> None:
        if query.get("live") == "true":
            query = {**query, "live": "long-poll"}
        if self._find(document) is None:
            self._read_nothing(request, document, query)
        else:
            self._streams.read_query(request, document.key, query)

    def _read_nothing(self, request: Request, document: Document, query: dict[str, str]) -> None:
        """A document that nobody has written to is an empty one (§9.1), for those who do not demand that it exists."""
        token = query.get("offset", BEGINNING_TOKEN)
        if token not in (BEGINNING_TOKEN, NOW_TOKEN):
            parse_offset(token)
        live = query.get("live")
        if live is None:
            request.reply(Response(200, b"content-type: %b\r\n" % OCTET_STREAM.encode() + _EMPTY_FIELDS))
        elif live == "long-poll":
            self._await_document(request, document, query)
        else:
            raise _no_document(document)

    def _await_document(self, request: Request, document: Document, query: dict[str, str]) -> None:
        def is_ready() -> bool:
            stream = self._existing(document.key)
            return stream is not None and stream.tail > 0

        def answer() -> None:
            try:
                if is_ready():
                    self._streams.read_query(request, document.key, {**query, "offset": BEGINNING_TOKEN})
                else:
                    cursor = b"stream-cursor: %d\r\n" % self._readers.interval(query.get("cursor"))
                    request.reply(Response(204, _EMPTY_FIELDS + cursor))
            except MillstreamError as error:
                request.reply(error_response(error))

        request.on_disconnect = LongPoll(self._readers, bucket_topic(document.service), is_ready, answer).cancel

    def _read_awareness(self, request: Request, document: Document, query: dict[str, str]) -> None:
        key = document.awareness_key(query["awareness"])
        if query.get("live") == "true":
            query = {**query, "live": "sse"}
        cursor = parse_cursor(query.get("cursor", ""))
        if cursor is not None and "offset" in query:
            # Awareness streams expire and are made anew; nobody misses what a former one held.
            query = {**query, "cursor": str(cursor.interval)}

        def read() -> None:
            stream = self._existing(key)
            token = query.get("offset")
            if stream is not None and token == BEGINNING_TOKEN and stream.earliest:
                # What was given up is of no interest to anybody.
                self._streams.read_query(request, key, {**query, "offset": format_offset(stream.earliest)})
            else:
                self._streams.read_query(request, key, query)

        self._with_awareness(request, document, key, read)

    # -- writing (§5.4, §5.6) ----------------------------------------------------------------------------------

    def write(self, request: Request, document: Document) -> None:
        says_goodbye = b"stream-closed" in request.headers and not request.body
        _adapt_headers(request)
        name = parse_query(request.query).get("awareness")
        if name is not None:
            self._write_awareness(request, document, name)
            return
        stream = self._find(document)
        if says_goodbye:
            self._say_goodbye(request, stream)
            return
        check_updates(request.body)
        if stream is not None:
            self._check_session(request, stream)
        _after_success(request, partial(self._on_existing, document.key, self.compactor.consider))
        append = partial(self._streams.append, request, document.key)
        if stream is None:
            self._streams.judge_first_append(request, document.key, OCTET_STREAM)
            self._create_then(request, CreateStream(document.key, OCTET_STREAM), append)
        else:
            append()

    @staticmethod
    def _say_goodbye(request: Request, stream: Stream | None) -> None:
        """A client that leaves ends its producer by closing the stream. It does not mean the document."""
        tail = format_offset(stream.tail if stream is not None else START)
        request.reply(Response(204, b"stream-next-offset: %b\r\n" % tail.encode()))

    def _write_awareness(self, request: Request, document: Document, name: str) -> None:
        key = document.awareness_key(name)
        self._check_has_awareness(document)
        if self._existing(key) is None:
            self._streams.judge_first_append(request, key, OCTET_STREAM)
        _after_success(request, partial(self._on_existing, key, self._shorten))
        self._with_awareness(request, document, key, partial(self._streams.append, request, key))

    def _on_existing(self, key: StreamKey, then: Callable[[Stream], None]) -> None:
        stream = self._existing(key)
        if stream is not None:
            then(stream)

    def _shorten(self, stream: Stream) -> None:
        if stream.tail - stream.earliest >= AWARENESS_BYTES_MAX:
            boundary = self._shard.reader.hot_boundary(stream, stream.tail - AWARENESS_BYTES_KEPT)
            if boundary > stream.earliest:
                self._shard.trim(stream, boundary, lambda outcome: None)

    # -- the document itself ---------------------------------------------------------------------------------

    def create(self, request: Request, document: Document) -> None:
        _adapt_headers(request)
        content_type = request.headers[b"content-type"].decode("latin-1")
        if media_type(content_type) != OCTET_STREAM:
            raise InvalidRequest(f"a document holds {OCTET_STREAM}, not {content_type[:80]!r}")
        name = parse_query(request.query).get("awareness")
        if name is None:
            check_updates(request.body)
            self._create_awareness_too(request, document)
            self._streams.create(request, document.key)
            return
        key = document.awareness_key(name)
        if self._existing(document.key) is None:
            raise _no_document(document)
        request.headers[b"stream-ttl"] = b"%d" % self._settings.awareness_ttl_seconds
        self._streams.create(request, key)

    def _create_awareness_too(self, request: Request, document: Document) -> None:
        """Who creates a document finds its default awareness stream there when that is answered."""
        reply = request.reply
        key = document.awareness_key(AWARENESS_DEFAULT)

        def replied(response: Response) -> None:
            if response.status < 300 and self._existing(key) is None:
                self._shard.create(self._awareness(key), lambda outcome: reply(response))
            else:
                reply(response)

        request.reply = replied

    def _awareness(self, key: StreamKey) -> CreateStream:
        return CreateStream(key, OCTET_STREAM, expiry=Expiry(self._settings.awareness_ttl_seconds, None, None))

    def head(self, request: Request, document: Document) -> None:
        self._streams.head(request, self._named(request, document))

    def delete(self, request: Request, document: Document) -> None:
        """Delete a document, and its awareness streams with it; or one of those."""
        key = self._named(request, document)
        if key == document.key:
            _after_success(request, partial(self._delete_awareness, document))
        self._streams.delete(request, key)

    def _delete_awareness(self, document: Document) -> None:
        for stream in list(self._shard.scan_paths(f"{document.service}/{document.awareness_prefix}")):
            if document.owns_awareness(stream.key):
                self._shard.delete(stream.key, lambda outcome: None)

    def _named(self, request: Request, document: Document) -> StreamKey:
        """The stream that a request without a body names: the document's, or one of its awareness streams."""
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
        """A document that does not exist, or no longer, has no awareness streams, and gets none."""
        if self._existing(document.key) is None:
            raise _no_awareness(document)

    def _with_awareness(self, request: Request, document: Document, key: StreamKey, then: Callable[[], None]) -> None:
        """Go on once an awareness stream exists: the first who reads or writes it makes it (§5.6)."""
        self._check_has_awareness(document)
        if self._existing(key) is not None:
            then()
        else:
            self._create_then(request, self._awareness(key), then)

    def _create_then(self, request: Request, command: CreateStream, then: Callable[[], None]) -> None:
        def created(outcome: object) -> None:
            if request.is_disconnected:
                return
            try:
                if isinstance(outcome, MillstreamError) and self._existing(command.key) is None:
                    raise outcome
                then()  # it exists, made by this request or by one that came first
            except MillstreamError as error:
                request.reply(error_response(error))

        self._shard.create(command, created)

    def _check_session(self, request: Request, stream: Stream) -> None:
        """Have a producer that starts over claim a new epoch.

        A client that reconnects counts from 0 again under its old name and epoch: by the base protocol's rule (§5.2.1)
        its updates would pass for repetitions and be dropped. Being told of its old epoch, it takes the next. At worst
        an update is stored twice, which Yjs does not mind.
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
    """Without a content type it is the one that documents have; and documents are never closed."""
    headers = {b"content-type": OCTET_STREAM.encode(), **request.headers}
    headers.pop(b"stream-closed", None)
    request.headers = headers


def _after_success(request: Request, then: Callable[[], None]) -> None:
    reply = request.reply

    def replied(response: Response) -> None:
        reply(response)
        if response.status < 300:
            then()

    request.reply = replied
