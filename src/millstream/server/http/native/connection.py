"""One client's connection: handles its requests one after the other and answers them in order.

Between the reader (`reading`) and the writer (`writing`) is a queue of complete requests. The connection moves a
request from the queue to the application, and the answer from the application to the writer; its states, and the
reader's, are drawn in `states`. It owns the transport, and so decides when to read on and when to close:

- Reading pauses while the queue is full, by number of requests or by their bytes.
- A large piece of input is processed in slices, and other connections get a turn of the loop after each piece.
- Input that no handler has yet, incomplete bodies and queued requests, is limited to `incoming_bytes_max` over all
  connections.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final, cast

from millstream.clock import monotonic_seconds
from millstream.errors import MillstreamError
from millstream.pending import Pending
from millstream.server.http.error_map import problem
from millstream.server.http.messages import BodyStream, Request, Response
from millstream.server.http.native.reading import CUT_OFF, EXPECTING, RequestReader
from millstream.server.http.native.shared import Shared
from millstream.server.http.native.states import Answering
from millstream.server.http.native.writing import ResponseWriter

LARGE_PIECE_BYTES: Final = 64 << 10
SLICE_BYTES: Final = 16 << 10

# Globals, because looking up a member in its class costs more, and this is done several times for every request.
READY, BLOCKED, SCHEDULED, HANDLING, STREAMING, CLOSING, CLOSED = Answering

_TOO_MUCH_INCOMING: Final = problem(
    503, "too_much_incoming", "the server is taking in as many request bodies as it may; try again later"
)
_TOO_LATE: Final = problem(408, "request_timeout", "the request took too long to arrive")


class Connection(asyncio.Protocol):
    """The protocol of one transport, and the `Client` of its requests."""

    __slots__ = (
        "_body",
        "_held",
        "_incoming_bytes",
        "_loop",
        "_pending",
        "_reader",
        "_refusal",
        "_request",
        "_shared",
        "_transport",
        "_waiting",
        "_waiting_bytes",
        "_writer",
        "address",
        "state",
    )

    # Set before any other call.
    _transport: asyncio.Transport
    _writer: ResponseWriter

    def __init__(self, shared: Shared, loop: asyncio.AbstractEventLoop) -> None:
        self.address = ""
        self.state = READY
        self._shared = shared
        self._loop = loop
        self._reader = RequestReader(self, shared)
        self._held = b""  # input that is not parsed yet
        self._waiting: deque[tuple[Request, bool, str]] = deque()  # the queue: request, keep-alive, version
        self._waiting_bytes = 0  # body bytes in the queue
        self._incoming_bytes = 0  # the queue and the arriving body, as counted in `shared`
        self._request: Request | None = None  # the request that is being handled
        self._pending: Pending[Response] | None = None  # its pending answer
        self._body: BodyStream | None = None  # the streamed body of its answer
        self._refusal: Response | None = None  # the refusal to send after the queued requests

    def request_id(self) -> bytes:
        return self._writer.request_id()

    # -- the transport's side ------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast("asyncio.Transport", transport)
        transport.set_write_buffer_limits(high=self._shared.limits.write_buffer_bytes_max)
        self._writer = ResponseWriter(transport, self._shared)
        peer = transport.get_extra_info("peername")
        self.address = peer[0] if peer else ""
        refusal = self._shared.join(self)
        if refusal is not None:
            self._refuse(refusal)

    def data_received(self, data: bytes) -> None:
        if len(data) < LARGE_PIECE_BYTES and not self._held:
            self._feed(data)
        else:
            self._feed_slowly(self._held + data)

    def eof_received(self) -> bool:
        """The client sends no more. It may still read answers, but a live read is ended."""
        if self._is_idle() or self.state is CLOSING or self._is_live_read():
            return False
        self._stop_reading()
        if not self._is_followed():
            self._writer.make_last()
        return True

    def connection_lost(self, error: Exception | None) -> None:
        self._shared.leave(self)
        self.state = CLOSED
        for request, _, _ in self._waiting:
            if request.upload is not None:
                request.upload.discard()
        self._waiting.clear()
        self._waiting_bytes = 0
        self._stop_reading()
        self._reader.release()
        self._writer.release()
        if self._body is not None:
            self._body.cancel()
            self._body = None
        self._request = None
        if self._pending is not None:
            self._pending.abandon()
            self._pending = None

    def pause_writing(self) -> None:
        self._writer.pause()
        if self.state is READY:
            self.state = BLOCKED
        self._shared.paused(self, self._transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        self._writer.resume()
        self._shared.resumed(self)
        if self._body is not None:
            self._body.resume()
        elif self.state is BLOCKED:
            self.state = READY
            if self._waiting:
                self._schedule()

    # -- reading -------------------------------------------------------------------------------------------

    def _feed(self, data: bytes) -> None:
        reader = self._reader
        refusal = reader.feed(data)
        if refusal is not None:
            self._refuse(refusal)
        elif reader.body or self._waiting or self._incoming_bytes:
            self._count_incoming()
            if self._incoming_bytes and self._shared.incoming_bytes > self._shared.limits.incoming_bytes_max:
                self._refuse(_TOO_MUCH_INCOMING)

    def _feed_slowly(self, data: bytes) -> None:
        """Process a large piece of input up to the limits of the queue. Then let other connections run: the loop would
        read more at once, up to 32 such pieces, each of which may be full of tiny chunks or requests."""
        at = 0
        while at < len(data) and self._reader.is_open:
            self._feed(data[at : at + SLICE_BYTES])
            at += SLICE_BYTES
            if self._has_enough():
                break
        if self._reader.is_open:
            self._held = data[at:]
            self._transport.pause_reading()
            self._loop.call_soon(self._read_on)

    def _read_on(self) -> None:
        if self._has_enough() or self._transport.is_closing():
            return
        if self._held:
            held, self._held = self._held, b""
            self._feed_slowly(held)
        else:
            self._transport.resume_reading()

    def _has_enough(self) -> bool:
        """Whether the queue is full, by number of requests or by their bytes."""
        limits = self._shared.limits
        return len(self._waiting) >= limits.pipelined_requests_max or self._waiting_bytes >= limits.body_bytes_max

    def _count_incoming(self) -> None:
        incoming_bytes = len(self._reader.body) + self._waiting_bytes
        self._shared.incoming_bytes += incoming_bytes - self._incoming_bytes
        self._incoming_bytes = incoming_bytes

    def _stop_reading(self) -> None:
        """Discard the incomplete request and all further input. Queued requests stay."""
        self._reader.close()
        self._held = b""
        self._count_incoming()

    # -- requests ------------------------------------------------------------------------------------------

    def take(self, request: Request, keep_alive: bool, version: str) -> None:
        """Pass a request to the application, or queue it."""
        if self.state is not READY:
            self._waiting.append((request, keep_alive, version))
            self._waiting_bytes += len(request.body)
            if self._has_enough():
                self._transport.pause_reading()
            return
        shared = self._shared
        number = self._writer.begin(keep_alive and not shared.is_stopping, version)
        if not number & shared.untimed:
            request.started = monotonic_seconds()
        self._request = request
        self.state = HANDLING
        answer = shared.app.handle(request)
        if isinstance(answer, Response):
            self._respond(answer)
        else:
            self._pending = answer
            answer.when_settled(self._respond)

    def expects_continue(self) -> None:
        if self._is_idle():
            self._send_continue()

    def _send_continue(self) -> None:
        self._writer.write_continue()
        self._reader.continue_sent()

    def _schedule(self) -> None:
        """Begin the next request in a new turn of the loop, so that a long pipeline does not become a deep stack."""
        self.state = SCHEDULED
        self._loop.call_soon(self._begin_next)

    def _begin_next(self) -> None:
        if self.state is not SCHEDULED:
            return
        request, keep_alive, version = self._waiting.popleft()
        self._waiting_bytes -= len(request.body)
        self._count_incoming()
        if self._held:
            self._loop.call_soon(self._read_on)
        elif not self._has_enough():
            self._transport.resume_reading()
        self.state = READY
        self.take(request, keep_alive and (self._reader.is_open or self._is_followed()), version)

    def _is_idle(self) -> bool:
        """Whether everything that has arrived is answered."""
        return (self.state is READY or self.state is BLOCKED) and not self._waiting

    def _is_followed(self) -> bool:
        """Whether the queue, or a refusal after it, is still to be answered after the current request."""
        return bool(self._waiting) or self._refusal is not None

    # -- the application's side ----------------------------------------------------------------------------

    def _is_live_read(self) -> bool:
        """Whether the current request is a live read, which has no effect and can be cancelled."""
        return self._body is not None or (self._pending is not None and self._pending.is_abandonable)

    def _respond(self, outcome: Response | MillstreamError) -> None:
        """Answer the current request."""
        request = self._request
        if request is None:
            return  # the client disconnected while the request was handled
        self._pending = None
        response = self._shared.app.answered(request, outcome)
        body = response.body
        if isinstance(body, bytes):
            self._writer.write_whole(request, response, body)
            self._end()
        elif request.method == "HEAD":
            self._writer.write_whole(request, response, b"")
            self._end()
        else:
            self.state = STREAMING
            self._body = body
            body.start(self._writer.start_body(request, response, self._end))

    # -- after an answer -----------------------------------------------------------------------------------

    def _end(self) -> None:
        """The answer is written: begin the next request, or close."""
        if self._request is None:
            return  # the connection was lost before the body ended
        writer, reader = self._writer, self._reader
        self._request = self._body = None
        if not writer.keep_alive:
            self._close()
            return
        self.state = BLOCKED if writer.is_paused else READY
        if self._waiting:
            if self.state is READY:
                self._schedule()
        elif self._refusal is not None:
            self._refuse(self._refusal)
        else:
            if reader.state is EXPECTING:
                self._send_continue()
            reader.await_next()

    def _refuse(self, response: Response) -> None:
        """Refuse input that is not a valid request, after the answers to those before it, and close."""
        self._stop_reading()
        if self.state is CLOSING:
            return  # in the same packet as the connection's last request
        if not self._is_idle():
            self._refusal = response
            return
        app = self._shared.app
        response = app.format_refusal(self._reader.target, response)
        app.metrics.unrouted.statuses[response.status] += 1
        self._writer.write_refusal(response)
        self._close()

    def _close(self) -> None:
        self.state = CLOSING
        self._stop_reading()
        if self._shared.is_secure and self._reader.state is not CUT_OFF:
            self._transport.close()  # TLS sends its close alert itself, after the remaining data
        else:
            self._writer.linger(self._loop)

    # -- limits --------------------------------------------------------------------------------------------

    def check(self, now: float) -> None:
        """Called at every tick: end the connection if it has waited too long."""
        if self._writer.is_stuck(now):
            self._transport.abort()  # closing would wait for a client that does not read
        elif self._is_idle() and self._reader.is_open and self._reader.is_overdue(now):
            if self._reader.is_receiving:
                self._refuse(_TOO_LATE)
            else:
                self._transport.close()

    def retire(self) -> None:
        """The server is stopping: close now, or after the current answer."""
        self._writer.make_last()
        if self._request is None and self.state is not SCHEDULED:
            self._transport.close()

    def abort(self) -> None:
        self._transport.abort()
