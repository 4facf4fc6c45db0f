"""Following a stream or a bucket, as a conversation that resumes by itself.

Nothing is emitted before the server has said at which offset reading continues after it. So a connection that breaks in
between costs repeated bytes on the wire, but the caller never gets anything twice.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Callable
from functools import partial
from typing import Any, Final, Literal, TypeAlias

import msgspec

from millstream.client import calls
from millstream.client.conversation import Conversation, Emit, Open, Pause, Receive, Send, Settings, ask, converse
from millstream.client.errors import BadAnswer, BadRequest, ClientError, ConnectionFailed, Unavailable, error_of
from millstream.client.events import Event, EventParser
from millstream.client.messages import Request, Response
from millstream.client.results import Chunk, FeedItem, FeedPage
from millstream.client.retries import Attempts
from millstream.protocol.content_types import JSON, OCTET_STREAM, is_json, is_text, media_type
from millstream.protocol.offsets import BEGINNING_TOKEN, NOW_TOKEN

Mode: TypeAlias = Literal["auto", "sse", "long-poll"]
MODES: Final = ("auto", "sse", "long-poll")
EVENT_STREAM: Final = "text/event-stream"
SENTINELS: Final = (BEGINNING_TOKEN, NOW_TOKEN)


class Position:
    """The place of a follower."""

    def __init__(self, offset: str) -> None:
        self.offset = offset
        self.cursor: str | None = None  # identifies the incarnation, in case the stream is deleted and created again
        self.up_to_date = False
        self.closed = False


def chosen_mode(mode: Mode, content_type: str) -> Mode:
    """SSE turns every line ending of a text into LF; long-poll carries bytes as they are (§5.8)."""
    if mode not in MODES:
        raise BadRequest(f"{mode!r} is not a way to follow", hint=f"one of {', '.join(MODES)}")
    if mode == "auto":
        return "long-poll" if is_text(content_type) and not is_json(content_type) else "sse"
    return mode


def follow(
    path: str,
    position: Position,
    mode: Mode,
    content_type: str | None,
    settings: Settings,
    *,
    until_up_to_date: bool = False,
) -> Conversation[None]:
    """Emits the chunks of a stream from a position on, until the stream is closed, or has been read to its end."""
    if not position.offset:
        raise BadRequest("an offset is empty", hint="-1 is the beginning of a stream, now its end")
    attempts = Attempts(settings.patient_policy, settings.clock)
    if content_type is None and mode != "long-poll":  # events do not tell it
        chunk = yield from converse(calls.read(path, position.offset), settings, attempts)
        content_type = chunk.content_type
        yield from _catch_up(position, chunk, attempts)
    mode = chosen_mode(mode, content_type or OCTET_STREAM)
    while not _is_last(position, until_up_to_date):
        request = Request("GET", calls.with_query(path, offset=position.offset, live=mode, cursor=position.cursor))
        answer = yield from _ask(request, mode, settings)
        ending: ClientError | None = None
        if isinstance(answer, ClientError):
            ending = answer
        else:
            position.cursor = answer.headers.get("stream-cursor", position.cursor)
            if mode == "sse":
                is_last = partial(_is_last, position, until_up_to_date)
                ending = yield from _events(answer, position, content_type or OCTET_STREAM, attempts, is_last)
            else:
                ending = yield from _answer(answer, position, attempts)
        if ending is not None:
            yield Pause(attempts.pause_after(ending))


def _is_last(position: Position, until_up_to_date: bool) -> bool:
    return position.closed or (until_up_to_date and position.up_to_date)


def _catch_up(position: Position, chunk: Chunk, attempts: Attempts) -> Conversation[None]:
    """What was stored before the live read began."""
    wrong = yield from _advance(position, chunk, attempts)
    if wrong is not None:
        yield Pause(attempts.pause_after(wrong))


def _ask(request: Request, mode: Mode, settings: Settings) -> Conversation[Response | ClientError]:
    """One live request: the head of an event stream, or the whole answer to a long-poll."""
    answer = yield from ask(request, settings, Open if mode == "sse" else Send, is_live=True)
    if isinstance(answer, ClientError):
        return answer
    if answer.status >= 400:
        return error_of(request, answer)
    if mode == "sse" and media_type(answer.headers.get("content-type", "")) != EVENT_STREAM:
        return BadAnswer("the answer is no event stream", hint="follow with long-poll if a proxy stands in the way")
    return answer


def _answer(answer: Response, position: Position, attempts: Attempts) -> Conversation[ClientError | None]:
    chunk = calls.chunk_of(answer)
    if chunk.cursor is None and not chunk.closed:
        # Without a cursor, a shared cache could answer the next request with this same answer, for ever (§8.1).
        return BadAnswer("a live answer has no Stream-Cursor", hint="does a proxy leave it out?", status=answer.status)
    return (yield from _advance(position, chunk, attempts))


def _advance(position: Position, chunk: Chunk, attempts: Attempts) -> Conversation[ClientError | None]:
    """Emit a chunk; returns the error if its next offset goes backwards."""
    if position.offset not in SENTINELS and chunk.next_offset < position.offset:
        return Unavailable(
            f"the server's stream ends at {chunk.next_offset}, before {position.offset}, to which it was read",
            code="server_behind",
            hint="the server has fallen behind, or was restored from a backup",
        )
    attempts.succeeded()
    position.offset, position.up_to_date, position.closed = chunk.next_offset, chunk.up_to_date, chunk.closed
    if chunk.data and not (is_json(chunk.content_type) and chunk.data == b"[]"):
        yield Emit(chunk)
    return None


def _events(
    answer: Response, position: Position, content_type: str, attempts: Attempts, is_last: Callable[[], bool]
) -> Conversation[ClientError | None]:
    """Emit what one connection delivers; returns why it ended, None if only its time was up."""
    is_base64 = answer.headers.get("stream-sse-data-encoding") == "base64"
    parser = EventParser()
    payloads: list[bytes] = []
    has_heard = False
    while True:
        received = yield Receive()
        if isinstance(received, ClientError):
            return received
        if not received:
            return None if has_heard else _silence()
        for event in parser.feed(received):
            if event.type == "data":
                payloads.append(_decoded_base64(event.data) if is_base64 else event.data)
            elif event.type == "control":
                control = _decoded(event)
                chunk = _controlled(payloads, content_type, control)
                position.cursor = chunk.cursor or position.cursor
                payloads = []
                has_heard = True
                wrong = yield from _advance(position, chunk, attempts)
                if wrong is not None or is_last():
                    return wrong


def _silence() -> ConnectionFailed:
    return ConnectionFailed("the live connection ended before anything was said", was_sent=True)


def _controlled(payloads: list[bytes], content_type: str, control: dict[str, Any]) -> Chunk:
    """The chunk that a control event completes."""
    data = payloads[0] if len(payloads) == 1 else _joined(payloads, content_type)
    closed = bool(control.get("streamClosed"))
    up_to_date = bool(control.get("upToDate")) or closed
    offset, cursor = control.get("streamNextOffset"), control.get("streamCursor")
    if not isinstance(offset, str) or not isinstance(cursor, str | None):
        raise BadAnswer(f"a control event says nothing of where to go on: {str(control)[:200]}")
    return Chunk(data, content_type, offset, up_to_date, closed, cursor)


def _decoded_base64(data: bytes) -> bytes:
    """The bytes of a data event, whose text may be cut into lines anywhere (§5.8)."""
    try:
        return b64decode(data.translate(None, b"\r\n"), validate=True)
    except ValueError as error:
        raise BadAnswer(f"a data event is not base64: {error}") from None


def _joined(payloads: list[bytes], content_type: str) -> bytes:
    if not is_json(content_type):
        return b"".join(payloads)
    arrays = [payload.strip() for payload in payloads]
    if not all(array.startswith(b"[") and array.endswith(b"]") for array in arrays):
        raise BadAnswer("a data event of a JSON stream is not an array")
    inner = (array[1:-1] for array in arrays)
    return b"[" + b",".join(elements for elements in inner if elements.strip()) + b"]"


def _decoded(event: Event) -> dict[str, Any]:
    try:
        return msgspec.json.decode(event.data, type=dict[str, Any])
    except msgspec.DecodeError:
        raise BadAnswer(f"an event is not a JSON object: {event.data[:200]!r}") from None


# -- a bucket's feed ---------------------------------------------------------------------------------------------


class _Item(msgspec.Struct):
    event: str
    bucket: str
    stream: str
    offset: str
    next_offset: str
    position: int
    appended_at_ms: int
    content_type: str
    encoding: str | None = None
    payload: msgspec.Raw = msgspec.Raw()


_ITEM: Final = msgspec.json.Decoder(_Item)


def feed_items(body: bytes) -> list[FeedItem]:
    """The items of an NDJSON page."""
    return [_item(line) for line in body.splitlines() if line]


def _item(line: bytes) -> FeedItem:
    try:
        found = _ITEM.decode(line)
        payload = bytes(found.payload)
        decoded: bytes | None = payload
        if found.encoding is None:
            decoded = None
        elif found.encoding == "text":
            decoded = msgspec.json.decode(payload, type=str).encode()
        elif found.encoding == "base64":
            decoded = b64decode(msgspec.json.decode(payload, type=str))
    except (msgspec.DecodeError, ValueError) as error:
        raise BadAnswer(f"an item of the feed is malformed: {error}") from None
    return FeedItem(
        found.event,
        found.bucket,
        found.stream,
        found.offset,
        found.next_offset,
        found.position,
        found.appended_at_ms,
        found.content_type,
        decoded,
    )


def follow_feed(bucket: str, position: Position, prefix: str, mode: Mode, settings: Settings) -> Conversation[None]:
    """Emits the pages of a bucket's feed, for ever."""
    attempts = Attempts(settings.patient_policy, settings.clock)
    mode = chosen_mode(mode, JSON)
    while True:
        call = calls.feed_page(bucket, position.offset or None, prefix, None, calls.NDJSON, mode)
        answer = yield from _ask(call.request, mode, settings)
        ending: ClientError | None = None
        if isinstance(answer, ClientError):
            ending = answer
        elif mode == "sse":
            ending = yield from _feed_events(position, attempts)
        else:
            page = call.parse(answer)
            attempts.succeeded()
            yield from _turn(position, FeedPage(feed_items(page.body), page.token, page.up_to_date))
        if ending is not None:
            yield Pause(attempts.pause_after(ending))


def _feed_events(position: Position, attempts: Attempts) -> Conversation[ClientError | None]:
    parser = EventParser()
    items: list[FeedItem] = []
    has_heard = False
    while True:
        received = yield Receive()
        if isinstance(received, ClientError):
            return received
        if not received:
            return None if has_heard else _silence()
        for event in parser.feed(received):
            if event.type != "control":
                items.append(_item(event.data))
                continue
            control = _decoded(event)
            has_heard = True
            attempts.succeeded()
            page = FeedPage(items, str(control.get("token", event.id)), bool(control.get("upToDate")))
            items = []
            yield from _turn(position, page)


def _turn(position: Position, page: FeedPage) -> Conversation[None]:
    position.offset, position.up_to_date = page.token, page.up_to_date
    if page.items:
        yield Emit(page)
