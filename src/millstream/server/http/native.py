"""The native adapter: HTTP/1.1 on httptools and the event loop's own transports.

One `Connection` per client. Requests of a connection are handled one after the other, pipelined ones included,
because a later one may read what an earlier one writes; and the next begins only when the client reads the answers to
those before it. Every wait has a limit: `Connection.check` is called every half second and cuts off what took too long.
What is unsent is bounded twice: a connection with more than `write_buffer_bytes_max` is paused, and of all paused ones
those that read least recently are cut off when together they hold more than `unsent_bytes_max`. What has come and no
handler has yet, incomplete bodies and requests that wait, is at most `incoming_bytes_max` of all connections together.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections import Counter, deque
from email.utils import formatdate
from itertools import count
from typing import Any, cast

import httptools

from millstream.access.addresses import is_loopback, network_of
from millstream.clock import monotonic_seconds
from millstream.errors import InvalidRequest
from millstream.server.http.application import Application
from millstream.server.http.error_map import error_response, problem
from millstream.server.http.limits import HttpLimits
from millstream.server.http.messages import (
    COMMON_FIELDS,
    STATUS_LINES,
    BodyStream,
    Request,
    Response,
    Upload,
    base_url_of,
    given_id,
    new_id,
)
from millstream.tasks import end

logger = logging.getLogger("millstream.server")

LINGER_SECONDS = 2.0
CHECK_SECONDS = 0.5
BODY_BYTES_TRUSTED_MAX = 64 << 10
BACKLOG = 4096
LARGE_PIECE_BYTES = 64 << 10
SLICE_BYTES = 16 << 10

_METHODS = {method.encode(): method for method in ("GET", "HEAD", "PUT", "POST", "DELETE", "OPTIONS", "PATCH", "TRACE")}


class NativeServer:
    """Accepts connections and keeps what they share."""

    def __init__(
        self,
        app: Application,
        limits: HttpLimits,
        *,
        public_url: str | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.app = app
        self.limits = limits
        self.public_url = public_url
        self.tls = tls
        self.connections: set[Connection] = set()
        self.by_address: Counter[str] = Counter()
        # Connections whose client does not read, the longest first, each with what is unsent.
        self._paused: dict[Connection, int] = {}
        # Of all connections: incomplete bodies, and those of requests that wait.
        self.incoming_bytes = 0
        self.id = new_id()
        self.numbers = count(1)
        self.untimed = 0  # a request is timed if its number has none of these bits
        self._counted = (0, 0.0)
        self.fields = self.fields_and_id = b""
        self.is_stopping = False
        # The loop's time as of the last tick: deadlines are seconds away, and asking is not free.
        self.now = 0.0
        self._server: asyncio.Server | None = None
        self._ticker: asyncio.Task[None] | None = None

    async def start(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        self._refresh()
        # Two sockets may be bound to one address, and the first that listens has it. uvloop does not report that: it
        # closes the other and goes on without.
        listening.listen(BACKLOG)
        handshake_seconds = self.limits.header_timeout_seconds if self.tls is not None else None
        self._server = await loop.create_server(
            lambda: Connection(self, loop),
            sock=listening,
            backlog=BACKLOG,
            ssl=self.tls,
            ssl_handshake_timeout=handshake_seconds,
            ssl_shutdown_timeout=LINGER_SECONDS if self.tls is not None else None,
        )
        self._ticker = self.app.supervisor.start("timeouts", self._tick, is_vital=True)

    async def _tick(self) -> None:
        while True:
            # A loop that was held up has not read what its clients sent: its own delay is not held against them.
            due = self.now + CHECK_SECONDS
            await asyncio.sleep(CHECK_SECONDS)
            self._refresh()
            self._pace()
            for connection in tuple(self.connections):
                connection.check(due)

    def _pace(self) -> None:
        """Time all requests, or some of them when there are many."""
        number = next(self.numbers)
        before, at = self._counted
        self._counted = (number, self.now)
        metrics = self.app.metrics
        metrics.pace((number - before) / max(self.now - at, CHECK_SECONDS), times_all=self.app.logs_access)
        self.untimed = metrics.timed_one_in - 1

    def paused(self, connection: Connection, unsent_bytes: int) -> None:
        """A client does not read what it asked for. If they are too many, those who have not read for longest go."""
        self._paused[connection] = unsent_bytes
        metrics = self.app.metrics
        metrics.unsent_bytes += unsent_bytes
        while metrics.unsent_bytes > self.limits.unsent_bytes_max:
            slowest = next(iter(self._paused))
            self.resumed(slowest)
            metrics.slow_readers_dropped += 1
            # Not at once: it may be the one that is being written to.
            asyncio.get_running_loop().call_soon(slowest.abort)

    def resumed(self, connection: Connection) -> None:
        self.app.metrics.unsent_bytes -= self._paused.pop(connection, 0)

    def is_counted(self, address: str) -> bool:
        """Whether the connections of an address are limited in number."""
        limits = self.limits
        if not limits.address_connections_max or address in limits.trusted_proxies:
            return False
        return not (limits.exempt_loopback and is_loopback(address))

    def _refresh(self) -> None:
        self.now = asyncio.get_running_loop().time()
        self.fields = COMMON_FIELDS + b"date: %b\r\n" % formatdate(usegmt=True).encode()
        self.fields_and_id = self.fields + b"x-request-id: %b-" % self.id

    async def stop(self, grace_seconds: float) -> None:
        """Stop accepting, let requests finish, end live reads; then close what is left."""
        self.is_stopping = True
        if self._server is not None:
            self._server.close()
        for connection in tuple(self.connections):
            connection.retire()
        self.app.live_reads.end_all()
        deadline = asyncio.get_running_loop().time() + grace_seconds
        while self.connections and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.01)
        for connection in tuple(self.connections):
            connection.abort()
        await end(self._ticker)


class Connection(asyncio.Protocol):
    __slots__ = (
        "_body",
        "_body_bytes",
        "_body_bytes_max",
        "_body_since",
        "_counted_as",
        "_current",
        "_deadline",
        "_discards",
        "_has_hung_up",
        "_header_bytes",
        "_headers",
        "_held",
        "_in_headers",
        "_incoming_bytes",
        "_is_last",
        "_is_receiving",
        "_is_write_paused",
        "_keep_alive",
        "_known_host",
        "_lingering",
        "_loop",
        "_number",
        "_owes_continue",
        "_parser",
        "_piece_bytes",
        "_received",
        "_refusal",
        "_server",
        "_streaming",
        "_transport",
        "_unsent",
        "_unsent_since",
        "_upload",
        "_url",
        "_version",
        "_waiting",
        "_waiting_bytes",
        "address",
    )

    def __init__(self, server: NativeServer, loop: asyncio.AbstractEventLoop) -> None:
        self._server = server
        self._loop = loop
        self._parser: Any = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport = None  # type: ignore[assignment]  # set before any other call
        self._current: Request | None = None
        self._waiting: deque[tuple[Request, bool, str]] = deque()
        self._waiting_bytes = 0  # of their bodies
        self._incoming_bytes = 0  # these and the body that is coming, as the server has counted them
        self._held = b""  # what has come and is not parsed yet, because enough requests wait
        self._counted_as = ""  # the address as it is counted, if it is
        self._body_since = server.now
        self._streaming: BodyStream | None = None
        self._is_last = False  # no request will follow those that have arrived
        self._discards = False  # a final answer was sent; what still arrives is thrown away
        self._refusal: Response | None = None  # the answer to what came after the requests in line
        self._is_write_paused = False
        self.address = ""
        self._number = 0  # of the request that is being answered, among all of the server's
        self._deadline = server.now + server.limits.header_timeout_seconds
        self._keep_alive = True
        self._version = "1.1"
        self._is_receiving = self._in_headers = False
        self._upload: Upload | None = None
        self._owes_continue = False  # the request being received expects a 100, once those before it are answered
        self._has_hung_up = False  # the last answer is written
        self._lingering: asyncio.TimerHandle | None = None
        self._known_host = b""  # the Host header that was last found good
        self._piece_bytes = 0
        self._received = 0  # requests, the one that is arriving included
        self._unsent = 0
        self._unsent_since = server.now
        self._reset()

    def _reset(self) -> None:
        self._url = b""
        self._headers: dict[bytes, bytes] = {}
        self._header_bytes = 0
        self._body: bytes | bytearray = b""
        self._body_bytes = 0
        self._body_bytes_max = self._server.limits.body_bytes_max
        self._drop_upload()

    def _drop_upload(self) -> None:
        """Discard a body that did not become a request."""
        if self._upload is not None:
            self._upload.discard()
            self._upload = None

    # -- the transport's side ------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast("asyncio.Transport", transport)
        transport.set_write_buffer_limits(high=self._server.limits.write_buffer_bytes_max)
        connections = self._server.connections
        connections.add(self)
        self._server.app.metrics.connections += 1
        peer = transport.get_extra_info("peername")
        self.address = peer[0] if peer else ""
        if len(connections) > self._server.limits.connections_max:
            self._refuse(problem(503, "too_many_connections", "the server has as many connections as it takes"))
        elif self._server.is_counted(self.address):
            self._count()

    def _count(self) -> None:
        """Refuse one of too many from an address; without a word if there are as many again that were told."""
        server = self._server
        self._counted_as = name = network_of(self.address)
        server.by_address[name] += 1
        limit = server.limits.address_connections_max
        if server.by_address[name] > limit:
            server.app.metrics.rate_limited["address_connections"] += 1
            if server.by_address[name] > 2 * limit:
                self._transport.abort()
            else:
                self._refuse(problem(429, "too_many_connections", "this address has as many connections as it may"))

    def data_received(self, data: bytes) -> None:
        if len(data) < LARGE_PIECE_BYTES and not self._held:
            self._feed(data)
        else:
            self._feed_slowly(self._held + data)

    def _feed_slowly(self, data: bytes) -> None:
        """Take in a large piece, but no more requests than may wait. Then it is others' turn: there is more, and the
        loop would read it at once, up to 32 such pieces, each of which may be full of tiny chunks or requests."""
        at = 0
        while at < len(data) and not self._discards:
            self._feed(data[at : at + SLICE_BYTES])
            at += SLICE_BYTES
            if self._has_enough():
                break
        self._held = data[at:]
        if not self._discards:
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

    def _feed(self, data: bytes) -> None:
        if self._discards:
            return
        # What arrives within one request and adds nothing to its body is headers, trailers or chunk framing. (A piece
        # that also ends the request before is mostly that one's; its headers are measured when they are complete.)
        received, body_bytes = self._received - self._is_receiving, self._body_bytes
        self._piece_bytes = len(data)
        try:
            self._parser.feed_data(data)
            if self._is_receiving and self._received == received + 1 and self._body_bytes in (0, body_bytes):
                self._header_bytes += len(data)
                if self._header_bytes > self._server.limits.header_bytes_max:
                    self._refuse(_HEADERS_TOO_LARGE)
            if self._body or self._waiting or self._incoming_bytes:
                self._count_incoming()
                if self._incoming_bytes and self._server.incoming_bytes > self._server.limits.incoming_bytes_max:
                    self._refuse(_TOO_MUCH_INCOMING)
        except httptools.HttpParserUpgrade as upgrade:
            # An upgrade that we do not offer is ignored (RFC 9110 §7.8): what follows is HTTP/1.1 as before.
            self._parser = httptools.HttpRequestParser(self)
            rest = data[upgrade.args[0] :]
            if rest:
                self._feed(rest)
        except _Refused as refused:
            self._refuse(refused.response)
        except httptools.HttpParserCallbackError as error:
            # Not kept in a local: the exception's frames hold the request, and this frame would close the circle.
            if not isinstance(error.__context__, _Refused):
                raise
            self._refuse(error.__context__.response)
        except httptools.HttpParserError as error:
            self._refuse(problem(400, "malformed_request", f"this is not HTTP/1.1: {error}"))

    def _count_incoming(self) -> None:
        incoming = len(self._body) + self._waiting_bytes
        self._server.incoming_bytes += incoming - self._incoming_bytes
        self._incoming_bytes = incoming

    def eof_received(self) -> bool:
        """The client sends no more. It may still read the answer, but a live read has lost its reader."""
        if self._current is None:
            if not self._waiting:
                return False
        elif self._streaming is not None or self._current.on_disconnect is not None:
            return False
        self._is_last = self._discards = True
        self._keep_alive = self._keep_alive and bool(self._waiting)
        return True

    def connection_lost(self, error: Exception | None) -> None:
        server = self._server
        server.connections.discard(self)
        server.app.metrics.connections -= 1
        server.resumed(self)
        if self._counted_as:
            server.by_address[self._counted_as] -= 1
            if not server.by_address[self._counted_as]:
                del server.by_address[self._counted_as]
        self._drop_upload()
        for request, _, _ in self._waiting:
            if request.upload is not None:
                request.upload.discard()
        self._waiting.clear()
        self._held = self._body = b""
        self._waiting_bytes = 0
        self._count_incoming()
        # The parser and its callbacks are a cycle, and a collection may be far away.
        self._parser = None
        self._reset()
        if self._lingering is not None:
            self._lingering.cancel()
        if self._streaming is not None:
            self._streaming.cancel()
            self._streaming = None
        if self._current is not None:
            self._current.disconnect()
            self._current = None

    def pause_writing(self) -> None:
        self._is_write_paused = True
        self._server.paused(self, self._transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        self._is_write_paused = False
        self._server.resumed(self)
        if self._streaming is not None:
            self._streaming.resume()
        elif self._current is None and self._waiting:
            self._begin_waiting()

    # -- the parser's side ---------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._reset()
        self._received += 1
        self._is_receiving = self._in_headers = True
        self._deadline = self._server.now + self._server.limits.header_timeout_seconds

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_headers:
            # A trailer. None of our fields may come as one (RFC 9110 §6.5.1), but it costs room.
            self._header_bytes += len(name) + len(value)
            if self._header_bytes > self._server.limits.header_bytes_max:
                raise _Refused(_HEADERS_TOO_LARGE)
            return
        name = name.lower()
        headers = self._headers
        headers[name] = value if name not in headers else headers[name] + b", " + value

    def on_headers_complete(self) -> None:
        self._in_headers = False
        self._header_bytes = 0
        headers, parser, limits = self._headers, self._parser, self._server.limits
        self._version = parser.get_http_version()
        if not self._url.startswith(b"/"):
            self._take_absolute_target()
        # Most requests are like the last one of their connection; only what is different is looked at closely.
        if (
            headers.get(b"host") != self._known_host
            or self._version != "1.1"
            or self._piece_bytes > limits.header_bytes_max
            or b"transfer-encoding" in headers
            or parser.should_upgrade()
        ):
            self._check_head()
        if parser.get_method() == b"PUT":
            self._upload, self._body_bytes_max = self._server.app.upload_for("PUT", self._url, limits.body_bytes_max)
        length = headers.get(b"content-length")
        if length is not None and int(length) > self._body_bytes_max:
            raise _Refused(_body_too_large(self._body_bytes_max))
        if self._server.app.judges_heads and (
            self._upload is not None
            or b"expect" in headers
            or b"transfer-encoding" in headers
            or (length is not None and int(length) > BODY_BYTES_TRUSTED_MAX)
        ):
            self._check_allowed()
        if b"expect" in headers:
            self._answer_expectation(headers[b"expect"])
        self._body_since = self._server.now
        self._deadline = self._body_since + limits.body_timeout_seconds

    def _take_absolute_target(self) -> None:
        """A target in absolute form names the host too, and then the Host header does not count (RFC 9112 §3.2.2)."""
        authority, self._url = _split_absolute(self._url)
        if authority is not None and b"host" in self._headers:
            self._headers[b"host"] = authority

    def _check_head(self) -> None:
        """Refuse what is too large, of another protocol, or addressed to nobody."""
        headers, parser = self._headers, self._parser
        size = sum(map(len, headers)) + sum(map(len, headers.values())) + len(self._url)
        if size > self._server.limits.header_bytes_max:
            raise _Refused(_HEADERS_TOO_LARGE)
        if self._version not in ("1.0", "1.1"):
            raise _Refused(problem(505, "version_not_supported", "this server speaks HTTP/1.1"))
        if b"transfer-encoding" in headers:
            self._check_coding(headers[b"transfer-encoding"])
        if parser.should_upgrade() and (
            b"content-length" in headers or b"transfer-encoding" in headers or parser.get_method() == b"CONNECT"
        ):
            # The parser hands over at the end of the headers, so the body could not be told from what follows.
            raise _Refused(problem(501, "upgrade_not_supported", "this server speaks HTTP/1.1 only"))
        host = headers.get(b"host")
        if host is not None:
            try:
                base_url_of("http", host)
            except InvalidRequest as error:
                raise _Refused(error_response(error)) from None
            self._known_host = host
        elif self._version == "1.1":
            raise _Refused(problem(400, "missing_host", "an HTTP/1.1 request needs a Host header"))

    def _check_coding(self, coding: bytes) -> None:
        """Whoever else reads this request must find the same end of its body (RFC 9112 §6.1)."""
        if self._version == "1.0":
            raise _Refused(problem(400, "malformed_request", "HTTP/1.0 has no Transfer-Encoding"))
        *others, last = (one.strip().lower() for one in coding.split(b","))
        if last != b"chunked" or b"chunked" in others:
            raise _Refused(problem(400, "malformed_request", "chunked must come last in Transfer-Encoding, and once"))
        if others:
            raise _Refused(problem(501, "coding_not_supported", "the only Transfer-Encoding known is chunked"))

    def _check_allowed(self) -> None:
        """Refuse a large body before it is taken in, if its request would be refused anyway."""
        path, _, query = self._url.partition(b"?")
        method = _METHODS.get(self._parser.get_method(), "OTHER")
        head = Request(method, path, query, self._headers, b"", lambda response: None, client=self)
        refusal = self._server.app.refusal_of_head(head)
        if refusal is not None:
            raise _Refused(refusal)

    def _answer_expectation(self, expectation: bytes) -> None:
        if expectation.lower() != b"100-continue":
            raise _Refused(problem(417, "expectation_failed", "the only expectation known is 100-continue"))
        if self._version != "1.0":
            if self._current is None and not self._waiting:
                self._transport.write(_CONTINUE)
            else:
                self._owes_continue = True

    def on_body(self, chunk: bytes) -> None:
        self._body_bytes += len(chunk)
        if self._body_bytes > self._body_bytes_max:
            raise _Refused(_body_too_large(self._body_bytes_max))
        body = self._body
        if self._upload is not None:
            try:
                self._upload.write(chunk)
            except OSError as error:
                raise _Refused(problem(503, "disk_error", f"the body could not be stored: {error.strerror}")) from None
        elif isinstance(body, bytearray):
            body += chunk
        else:
            # Most come in one piece. A list of pieces would take many times their bytes where those are tiny.
            self._body = bytearray(body) + chunk if body else chunk
        self._deadline = self._server.now + self._server.limits.body_timeout_seconds

    def on_message_complete(self) -> None:
        body = self._body
        path, _, query = self._url.partition(b"?")
        request = Request(
            _METHODS.get(self._parser.get_method(), "OTHER"),
            path,
            query,
            self._headers,
            bytes(body),
            self._respond,
            self._server.public_url if self._server.tls is None else self._secure_base_url(),
            self,
        )
        self._body = b""  # the request's now: an idle connection holds nothing
        self._headers = {}
        keep_alive = self._parser.should_keep_alive()
        self._is_receiving = self._owes_continue = False
        request.upload, self._upload = self._upload, None
        if self._current is None and not self._is_write_paused:
            self._begin(request, keep_alive, self._version)
        else:
            self._waiting.append((request, keep_alive, self._version))
            self._waiting_bytes += len(request.body)
            if self._has_enough():
                self._transport.pause_reading()

    def _has_enough(self) -> bool:
        """Whether as many requests wait as may, or as much in them."""
        limits = self._server.limits
        return len(self._waiting) >= limits.pipelined_requests_max or self._waiting_bytes >= limits.body_bytes_max

    def _secure_base_url(self) -> str:
        return self._server.public_url or base_url_of("https", self._headers.get(b"host", b"localhost"))

    # -- answering -----------------------------------------------------------------------------------------

    def _begin(self, request: Request, keep_alive: bool, version: str) -> None:
        self._current = request
        server = self._server
        self._number = number = next(server.numbers)
        if not number & server.untimed:
            request.started = monotonic_seconds()
        self._keep_alive = keep_alive and not server.is_stopping and (not self._is_last or bool(self._waiting))
        self._version = version
        server.app.handle(request)

    def _respond(self, response: Response) -> None:
        """Answer the current request; they are handled one at a time, so there is no other."""
        request = self._current
        if request is None:
            return  # the client went away while we worked
        response = self._server.app.answered(request, response)
        body = response.body
        if isinstance(body, bytes):
            self._write_whole(request, response, body)
            self._end()
        elif request.method == "HEAD":
            self._write_whole(request, response, b"")
            self._end()
        else:
            chunked = self._version != "1.0" and response.length is None
            self._keep_alive = self._keep_alive and (chunked or response.length is not None)
            framing = b"transfer-encoding: chunked\r\n" if chunked else b""
            if response.length is not None:
                framing = b"content-length: %d\r\n" % response.length
            self._transport.write(self._head(response, request.headers) + framing + b"\r\n")
            self._streaming = body
            request.on_disconnect = None
            body.start(_StreamedBody(self, chunked))

    def request_id(self) -> bytes:
        return b"%b-%x" % (self._server.id, self._number)

    def _head(self, response: Response, headers: dict[bytes, bytes]) -> bytes:
        server = self._server
        if b"x-request-id" in headers and (given := given_id(headers)) is not None:
            head = b"%b%bx-request-id: %b\r\n%b" % (
                STATUS_LINES[response.status],
                server.fields,
                given,
                response.fields,
            )
        else:
            head = b"%b%b%x\r\n%b" % (
                STATUS_LINES[response.status],
                server.fields_and_id,
                self._number,
                response.fields,
            )
        if not self._keep_alive:
            head += b"connection: close\r\n"
        elif self._version == "1.0":
            head += b"connection: keep-alive\r\n"
        return head

    def _write_whole(self, request: Request, response: Response, body: bytes) -> None:
        head = self._head(response, request.headers)
        if request.method == "HEAD" or response.status in (204, 304):
            self._transport.write(head + b"\r\n")
        elif len(body) < 65_536:
            self._transport.write(b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body))
        else:
            self._transport.writelines((b"%bcontent-length: %d\r\n\r\n" % (head, len(body)), body))

    def _end(self) -> None:
        """The answer is written: on to the next request, if there is to be one."""
        self._current = None
        self._streaming = None
        if not self._keep_alive:
            self._linger()
        elif self._waiting:
            if not self._is_write_paused:  # else it goes on when the client has read
                self._begin_waiting()
        elif self._refusal is not None:
            self._refuse(self._refusal)
        else:
            limits = self._server.limits
            if self._owes_continue:
                self._owes_continue = False
                self._transport.write(_CONTINUE)
            waits = limits.body_timeout_seconds if self._is_receiving else limits.idle_timeout_seconds
            self._body_since, self._deadline = self._server.now, self._server.now + waits

    def _begin_waiting(self) -> None:
        request, keep_alive, version = self._waiting.popleft()
        self._waiting_bytes -= len(request.body)
        self._count_incoming()
        if self._held:
            self._loop.call_soon(self._read_on)
        elif not self._has_enough():
            self._transport.resume_reading()
        # Not from within the previous answer: a long pipeline must not become a deep stack.
        self._current = request
        self._loop.call_soon(self._begin_next, request, keep_alive, version)

    def _begin_next(self, request: Request, keep_alive: bool, version: str) -> None:
        if self._current is request:
            self._begin(request, keep_alive, version)

    def _refuse(self, response: Response) -> None:
        """Answer what could not become a request, and hang up."""
        self._drop_upload()
        self._body = b""
        self._count_incoming()
        self._discards = True
        if self._has_hung_up:
            return  # in the same packet as a request that was the last
        if self._current is not None or self._waiting:
            self._refusal = response  # after the requests before it
            return
        self._keep_alive = False
        response = self._server.app.worded(self._url, response)
        body = response.body
        assert isinstance(body, bytes)
        self._server.app.metrics.unrouted.statuses[response.status] += 1
        self._number = next(self._server.numbers)
        head = self._head(response, {})
        self._transport.write(b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body))
        self._linger()

    def _linger(self) -> None:
        """Close, but give the client time to read: closing at once with unread input would reset the connection."""
        self._discards = self._has_hung_up = True
        if self._server.tls is not None and not self._is_receiving:
            self._transport.close()  # TLS says goodbye itself, after what is still to be sent
            return
        if self._transport.can_write_eof():
            with contextlib.suppress(OSError):
                self._transport.write_eof()
        self._deadline = self._server.now + LINGER_SECONDS
        self._lingering = self._loop.call_later(LINGER_SECONDS, self._transport.close)

    # -- limits --------------------------------------------------------------------------------------------

    def check(self, now: float) -> None:
        """Called at every tick: end what has waited too long."""
        unsent = self._transport.get_write_buffer_size()
        if unsent != self._unsent:
            self._unsent, self._unsent_since = unsent, now
        if unsent and now - self._unsent_since > self._server.limits.send_timeout_seconds:
            self._transport.abort()  # closing would wait for the client to read what it never will
        elif (
            self._current is None
            and not self._waiting
            and not self._discards
            and (now > self._deadline or self._is_too_slow(now))
        ):
            if self._is_receiving:
                self._refuse(problem(408, "request_timeout", "the request took too long to arrive"))
            else:
                self._transport.close()

    def _is_too_slow(self, now: float) -> bool:
        """Whether a body comes too slowly on the whole, however short its pauses are."""
        limits = self._server.limits
        if not self._is_receiving or self._in_headers or not limits.body_bytes_per_second_min:
            return False
        earned = limits.body_timeout_seconds + self._body_bytes / limits.body_bytes_per_second_min
        return now > self._body_since + earned

    def retire(self) -> None:
        """The server is stopping: end live reads, close once idle."""
        self._keep_alive = False
        if self._current is None:
            self._transport.close()

    def abort(self) -> None:
        self._transport.abort()


class _StreamedBody:
    """The sink of a streamed body: chunked framing, and the transport's own buffer as the limit."""

    __slots__ = ("_chunked", "_connection")

    def __init__(self, connection: Connection, chunked: bool) -> None:
        self._connection = connection
        self._chunked = chunked

    def write(self, data: bytes) -> bool:
        connection = self._connection
        connection._server.app.metrics.sent_bytes += len(data)
        if not self._chunked:
            connection._transport.write(data)
        elif len(data) >= 65_536:
            connection._transport.writelines((b"%x\r\n" % len(data), data, b"\r\n"))
        elif data:
            connection._transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return not connection._is_write_paused

    def finish(self) -> None:
        if self._chunked:
            self._connection._transport.write(b"0\r\n\r\n")
        self._connection._end()

    def abort(self) -> None:
        self._connection._transport.abort()


class _Refused(Exception):
    """Raised inside a parser callback to stop parsing with an answer."""

    def __init__(self, response: Response) -> None:
        self.response = response


_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_TOO_MUCH_INCOMING = problem(
    503, "too_much_incoming", "the server is taking in as many request bodies as it may; try again later"
)
_HEADERS_TOO_LARGE = problem(431, "headers_too_large", "the request line and headers are too large")


def _body_too_large(limit: int) -> Response:
    return problem(413, "payload_too_large", f"the request body is larger than {limit} bytes")


def _split_absolute(target: bytes) -> tuple[bytes | None, bytes]:
    """The authority, path and query of a target in absolute form (`http://host/path?query`); `*` is the server."""
    scheme, separator, rest = target.partition(b"://")
    if not separator or scheme.lower() not in (b"http", b"https"):
        return None, b"/"
    ends = [at for at in (rest.find(b"/"), rest.find(b"?")) if at >= 0]
    end = min(ends, default=len(rest))
    path = rest[end:]
    return rest[:end], path if path.startswith(b"/") else b"/" + path
