"""Reading: turns the bytes of one client into requests, within the limits on heads and bodies.

The reader parses its input and passes complete requests to its recipient. It owns the request that is arriving: the
state (`Reading`), headers, body or upload, and the deadline. It writes nothing and knows no transport: it returns a
refusal, and its owner sends it.
"""

from __future__ import annotations

from typing import Any, Final, Protocol

import httptools

from millstream.server.http.error_map import problem
from millstream.server.http.messages import Client, Request, Response, Upload, base_url_of
from millstream.server.http.native.heads import (
    HEADERS_TOO_LARGE,
    Refused,
    body_too_large,
    check_coding,
    check_expectation,
    check_host,
    check_size,
    check_upgrade,
    check_version,
    split_absolute,
)
from millstream.server.http.native.shared import Shared
from millstream.server.http.native.states import Reading

# A body up to this size is received before its request is judged.
BODY_BYTES_TRUSTED_MAX: Final = 64 << 10

_METHODS: Final = {
    method.encode(): method for method in ("GET", "HEAD", "PUT", "POST", "DELETE", "OPTIONS", "PATCH", "TRACE")
}
# Globals, because looking up a member in its class costs more, and this is done several times for every request.
IDLE, HEAD, EXPECTING, BODY, ENDED, CUT_OFF = Reading


class Recipient(Client, Protocol):
    """The owner of the reader, which gets its requests."""

    def take(self, request: Request, keep_alive: bool, version: str) -> None:
        """Take a complete request, to be answered in order."""
        ...

    def expects_continue(self) -> None:
        """The client waits for a 100 Continue before it sends the body."""
        ...


class RequestReader:
    __slots__ = (
        "_body_bytes",
        "_body_bytes_max",
        "_body_since",
        "_completed",
        "_header_bytes",
        "_headers",
        "_known_host",
        "_method",
        "_parser",
        "_piece_bytes",
        "_recipient",
        "_shared",
        "_since",
        "_upload",
        "_version",
        "body",
        "state",
        "target",
    )

    def __init__(self, recipient: Recipient, shared: Shared) -> None:
        self.state = IDLE
        self.target = b""  # of the arriving request, or of the last one
        self.body: bytes | bytearray = b""  # the part of the body that has arrived
        self._recipient: Recipient = recipient
        self._shared = shared
        self._parser: Any = httptools.HttpRequestParser(self)
        self._completed = 0  # number of complete requests
        self._piece_bytes = 0  # size of the piece that is being parsed
        self._known_host = b""  # the last Host header that was found valid
        self._method = "GET"
        self._version = "1.1"
        self._headers: dict[bytes, bytes] = {}
        self._header_bytes = 0
        self._body_bytes = 0  # including bytes that went into the upload
        self._body_bytes_max = 0
        self._upload: Upload | None = None
        # Since when the reader waits for the client: in the current state, and for the whole body.
        self._since = self._body_since = shared.now

    @property
    def is_open(self) -> bool:
        return self.state is not ENDED and self.state is not CUT_OFF

    @property
    def is_receiving(self) -> bool:
        """Whether a request has begun to arrive and is not complete."""
        return self.state is HEAD or self.state is EXPECTING or self.state is BODY

    def feed(self, data: bytes) -> Response | None:
        """Parse input. Returns a refusal if it is not a valid request."""
        if self.state is ENDED or self.state is CUT_OFF:
            return None
        completed, body_bytes = self._completed, self._body_bytes
        self._piece_bytes = len(data)
        rest = data
        try:
            while rest:
                try:
                    self._parser.feed_data(rest)
                    break
                except httptools.HttpParserUpgrade as upgrade:
                    rest = rest[upgrade.args[0] :]
                # An upgrade is ignored (RFC 9110 §7.8): what follows is HTTP/1.1 as before.
                self._parser = httptools.HttpRequestParser(self)
        except httptools.HttpParserCallbackError as error:
            # Not kept in a local variable: the exception's frames hold the request, and this frame would complete a
            # cycle.
            if not isinstance(error.__context__, Refused):
                raise
            return error.__context__.response
        except httptools.HttpParserError as error:
            return problem(400, "malformed_request", f"this is not HTTP/1.1: {error}")
        # Input within one request that adds nothing to its body is headers, trailers or chunk framing. (A piece that
        # also ends the previous request mostly belongs to that one; headers are measured again when they are complete.)
        if self._completed == completed and self.state is not IDLE and self._body_bytes in (0, body_bytes):
            self._header_bytes += len(data)
            if self._header_bytes > self._shared.limits.header_bytes_max:
                return HEADERS_TOO_LARGE
        return None

    def continue_sent(self) -> None:
        """100 Continue has been sent."""
        self.state = BODY

    def close(self) -> None:
        """Accept no more input, and drop the incomplete request."""
        if self.is_open:
            self.state = ENDED if self.state is IDLE else CUT_OFF
        self.body = b""
        if self._upload is not None:
            self._upload.discard()
            self._upload = None

    def release(self) -> None:
        """The connection is closed. Breaks the cycle of the parser and its callbacks, without waiting for a
        collection."""
        self.close()
        self._headers = {}
        self._parser = None
        del self._recipient

    # -- time ----------------------------------------------------------------------------------------------

    def await_next(self) -> None:
        """Everything before is answered: from now on the time counts against the client."""
        self._since = self._body_since = self._shared.now

    def is_overdue(self, now: float) -> bool:
        """Whether the client has taken too long in the current state."""
        limits = self._shared.limits
        if self.state is BODY or self.state is EXPECTING:
            return now > self._since + limits.body_timeout_seconds or self._is_too_slow(now)
        if self.state is HEAD or self._completed == 0:
            return now > self._since + limits.header_timeout_seconds
        return now > self._since + limits.idle_timeout_seconds

    def _is_too_slow(self, now: float) -> bool:
        """Whether the body's average rate is too low, however short its pauses are."""
        limits = self._shared.limits
        if not limits.body_bytes_per_second_min:
            return False
        earned = limits.body_timeout_seconds + self._body_bytes / limits.body_bytes_per_second_min
        return now > self._body_since + earned

    # -- the parser's callbacks ----------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self.state is not IDLE:
            raise Refused(None)  # the request before it, in the same piece, was the connection's last
        shared = self._shared
        self.state = HEAD
        self.target = b""
        self._header_bytes = self._body_bytes = 0
        self._body_bytes_max = shared.limits.body_bytes_max
        self._since = shared.now

    def on_url(self, url: bytes) -> None:
        self.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.state is not HEAD:
            # A trailer. None of our fields may be sent as a trailer (RFC 9110 §6.5.1), but its size counts.
            self._header_bytes += len(name) + len(value)
            if self._header_bytes > self._shared.limits.header_bytes_max:
                raise Refused(HEADERS_TOO_LARGE)
            return
        name = name.lower()
        headers = self._headers
        headers[name] = value if name not in headers else headers[name] + b", " + value

    def on_headers_complete(self) -> None:
        self.state = BODY
        self._header_bytes = 0
        headers, parser, shared = self._headers, self._parser, self._shared
        limits, app = shared.limits, shared.app
        self._method = _METHODS.get(parser.get_method(), "OTHER")
        self._version = parser.get_http_version()
        if not self.target.startswith(b"/"):
            self._take_absolute_target()
        # Most requests resemble the last one on their connection, so only what differs is checked in full.
        if (
            headers.get(b"host") != self._known_host
            or self._version != "1.1"
            or self._piece_bytes > limits.header_bytes_max
            or b"transfer-encoding" in headers
            or parser.should_upgrade()
        ):
            self._check_head()
        if self._method == "PUT":
            self._upload, self._body_bytes_max = app.upload_for("PUT", self.target, limits.body_bytes_max)
        length = headers.get(b"content-length")
        if length is not None and int(length) > self._body_bytes_max:
            raise body_too_large(self._body_bytes_max)
        if app.judges_heads and (
            self._upload is not None
            or b"expect" in headers
            or b"transfer-encoding" in headers
            or (length is not None and int(length) > BODY_BYTES_TRUSTED_MAX)
        ):
            self._check_allowed()
        if b"expect" in headers:
            check_expectation(headers[b"expect"])
            if self._version != "1.0":
                self.state = EXPECTING
                self._recipient.expects_continue()
        self._since = self._body_since = shared.now

    def on_body(self, chunk: bytes) -> None:
        self._body_bytes += len(chunk)
        if self._body_bytes > self._body_bytes_max:
            raise body_too_large(self._body_bytes_max)
        body = self.body
        if self._upload is not None:
            try:
                self._upload.write(chunk)
            except OSError as error:
                raise Refused(problem(503, "disk_error", f"the body could not be stored: {error.strerror}")) from None
        elif isinstance(body, bytearray):
            body += chunk
        else:
            # Most bodies come in one piece. A list of pieces would take many times the memory if the pieces are tiny.
            self.body = bytearray(body) + chunk if body else chunk
        self._since = self._shared.now

    def on_message_complete(self) -> None:
        path, _, query = self.target.partition(b"?")
        shared, recipient = self._shared, self._recipient
        base_url = shared.public_url if not shared.is_secure else self._secure_base_url()
        request = Request(self._method, path, query, self._headers, bytes(self.body), base_url, recipient, self._upload)
        self._upload = None
        self.body = b""  # it belongs to the request now: an idle connection holds no memory
        self._headers = {}
        self.state = IDLE
        self._completed += 1
        recipient.take(request, self._parser.should_keep_alive(), self._version)

    # -- the request ---------------------------------------------------------------------------------------

    def _secure_base_url(self) -> str:
        return self._shared.public_url or base_url_of("https", self._headers.get(b"host", b"localhost"))

    def _take_absolute_target(self) -> None:
        """A target in absolute form names the host, and then the Host header does not count (RFC 9112 §3.2.2)."""
        authority, self.target = split_absolute(self.target)
        if authority is not None and b"host" in self._headers:
            self._headers[b"host"] = authority

    def _check_head(self) -> None:
        """Refuse a head that is too large, of another protocol, or without a valid host."""
        headers, parser, version = self._headers, self._parser, self._version
        check_size(self.target, headers, self._shared.limits.header_bytes_max)
        check_version(version)
        if b"transfer-encoding" in headers:
            check_coding(version, headers[b"transfer-encoding"])
        if parser.should_upgrade():
            check_upgrade(parser.get_method(), headers)
        host = headers.get(b"host")
        check_host(version, host)
        if host is not None:
            self._known_host = host

    def _check_allowed(self) -> None:
        """Refuse a large body before it is received, if its request would be refused anyway."""
        path, _, query = self.target.partition(b"?")
        head = Request(self._method, path, query, self._headers, b"", client=self._recipient)
        refusal = self._shared.app.refusal_of_head(head)
        if refusal is not None:
            raise Refused(refusal)
