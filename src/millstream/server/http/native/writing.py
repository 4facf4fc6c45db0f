"""Writing: sends answers as bytes on one client's transport.

The writer frames answers (length, chunks, or the end of the connection), decides the `connection` field, and knows
whether the client reads. It writes one answer at a time and does not know which request comes next.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final

from millstream.server.http.messages import STATUS_LINES, Request, Response, given_id
from millstream.server.http.native.shared import Shared

# How long a client may take to read the last answer and close.
LINGER_SECONDS: Final = 2.0
# A body of at least this size is written separately instead of being copied behind its head.
LARGE_BODY_BYTES: Final = 64 << 10

_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"


class ResponseWriter:
    """Writes the answers of a connection. `number` is the current request's number among all requests of the server."""

    __slots__ = (
        "_lingering",
        "_shared",
        "_transport",
        "_unsent_bytes",
        "_unsent_since",
        "_version",
        "is_paused",
        "keep_alive",
        "number",
    )

    def __init__(self, transport: asyncio.Transport, shared: Shared) -> None:
        self._transport = transport
        self._shared = shared
        self._version = "1.1"  # of the request that is being answered
        self.number = 0
        self.keep_alive = True  # whether another answer may follow the current one
        self.is_paused = False  # whether the client does not keep up with reading
        self._unsent_bytes = 0
        self._unsent_since = shared.now
        self._lingering: asyncio.TimerHandle | None = None

    def begin(self, keep_alive: bool, version: str) -> int:
        """A request begins; the next answer written is its answer."""
        self.keep_alive = keep_alive
        self._version = version
        self.number = number = next(self._shared.numbers)
        return number

    def request_id(self) -> bytes:
        return b"%b-%x" % (self._shared.id, self.number)

    def make_last(self) -> None:
        """Close the connection after the current answer."""
        self.keep_alive = False

    def pause(self) -> None:
        self.is_paused = True

    def resume(self) -> None:
        self.is_paused = False

    def write_whole(self, request: Request, response: Response, body: bytes) -> None:
        head = self._head(response, request.headers)
        if request.method == "HEAD" or response.status in (204, 304):
            self._transport.write(head + b"\r\n")
        elif len(body) < LARGE_BODY_BYTES:
            self._transport.write(b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body))
        else:
            self._transport.writelines((b"%bcontent-length: %d\r\n\r\n" % (head, len(body)), body))

    def start_body(self, request: Request, response: Response, finished: Callable[[], None]) -> StreamedBody:
        """Write the head of an answer with a streamed body. Without length or chunks the body ends with the
        connection."""
        is_chunked = response.length is None and self._version != "1.0"
        if response.length is not None:
            framing = b"content-length: %d\r\n" % response.length
        else:
            framing = b"transfer-encoding: chunked\r\n" if is_chunked else b""
            self.keep_alive = self.keep_alive and is_chunked
        self._transport.write(self._head(response, request.headers) + framing + b"\r\n")
        return StreamedBody(self, self._transport, self._shared, is_chunked, finished)

    def write_continue(self) -> None:
        self._transport.write(_CONTINUE)

    def write_refusal(self, response: Response) -> None:
        """Write the refusal of invalid input; it is the last answer."""
        self.keep_alive = False
        self.number = next(self._shared.numbers)
        body = response.body
        assert isinstance(body, bytes)
        self._transport.write(b"%bcontent-length: %d\r\n\r\n%b" % (self._head(response, {}), len(body), body))

    def _head(self, response: Response, headers: dict[bytes, bytes]) -> bytes:
        shared = self._shared
        if b"x-request-id" in headers and (given := given_id(headers)) is not None:
            head = b"%b%bx-request-id: %b\r\n%b" % (
                STATUS_LINES[response.status],
                shared.fields,
                given,
                response.fields,
            )
        else:
            head = b"%b%b%x\r\n%b" % (
                STATUS_LINES[response.status],
                shared.fields_and_id,
                self.number,
                response.fields,
            )
        if not self.keep_alive:
            head += b"connection: close\r\n"
        elif self._version == "1.0":
            head += b"connection: keep-alive\r\n"
        return head

    # -- the end -------------------------------------------------------------------------------------------

    def linger(self, loop: asyncio.AbstractEventLoop) -> None:
        """End our side and leave the client time to read: closing at once with unread input would reset the connection,
        and the client could lose the answer."""
        if self._transport.can_write_eof():
            with contextlib.suppress(OSError):
                self._transport.write_eof()
        self._lingering = loop.call_later(LINGER_SECONDS, self._transport.close)

    def release(self) -> None:
        """The connection is closed."""
        if self._lingering is not None:
            self._lingering.cancel()

    def is_stuck(self, now: float) -> bool:
        """Whether the client has read nothing for too long. Must be called regularly."""
        unsent_bytes = self._transport.get_write_buffer_size()
        if unsent_bytes != self._unsent_bytes:
            self._unsent_bytes, self._unsent_since = unsent_bytes, now
        return unsent_bytes > 0 and now - self._unsent_since > self._shared.limits.send_timeout_seconds


class StreamedBody:
    """The sink of a streamed body: chunked framing; the transport's buffer is the limit."""

    __slots__ = ("_finished", "_is_chunked", "_metrics", "_transport", "_writer")

    def __init__(
        self,
        writer: ResponseWriter,
        transport: asyncio.Transport,
        shared: Shared,
        is_chunked: bool,
        finished: Callable[[], None],
    ) -> None:
        self._writer = writer
        self._transport = transport
        self._metrics = shared.app.metrics
        self._is_chunked = is_chunked
        self._finished = finished

    def write(self, data: bytes) -> bool:
        self._metrics.sent_bytes += len(data)
        if not self._is_chunked:
            self._transport.write(data)
        elif len(data) >= LARGE_BODY_BYTES:
            self._transport.writelines((b"%x\r\n" % len(data), data, b"\r\n"))
        elif data:
            self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return not self._writer.is_paused

    def finish(self) -> None:
        if self._is_chunked:
            self._transport.write(b"0\r\n\r\n")
        self._finished()

    def abort(self) -> None:
        self._transport.abort()
