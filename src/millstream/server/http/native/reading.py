"""Reading: the bytes of one client become requests, within the limits on their heads and bodies.

The reader parses what it is fed and gives complete requests to its recipient. It owns the request that is arriving:
the state (`Reading`), headers, body or upload, and the deadline. It writes nothing and knows no transport: what it
refuses it returns, and its owner answers.
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

# A body up to this size is taken in before its request is judged.
BODY_BYTES_TRUSTED_MAX: Final = 64 << 10

_METHODS: Final = {
    method.encode(): method for method in ("GET", "HEAD", "PUT", "POST", "DELETE", "OPTIONS", "PATCH", "TRACE")
}
# Globals, because looking a member up in its class costs more, and this is done several times for every request.
IDLE, HEAD, EXPECTING, BODY, ENDED, CUT_OFF = Reading


class Recipient(Client, Protocol):
    """Whom the reader gives its requests."""

    def take(self, request: Request, keep_alive: bool, version: str) -> None:
        """Answer a complete request, in its turn."""
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
        self.target = b""  # of the request that is arriving, or arrived last
        self.body: bytes | bytearray = b""  # what has arrived of it
        self._recipient: Recipient = recipient
        self._shared = shared
        self._parser: Any = httptools.HttpRequestParser(self)
        self._completed = 0  # requests
        self._piece_bytes = 0  # of what is being parsed
        self._known_host = b""  # the Host header that was last found good
        self._method = "GET"
        self._version = "1.1"
        self._headers: dict[bytes, bytes] = {}
        self._header_bytes = 0
        self._body_bytes = 0  # including what went into the upload
        self._body_bytes_max = 0
        self._upload: Upload | None = None
        # Since when the client is waited for: in its present state, and for the whole body.
        self._since = self._body_since = shared.now

    @property
    def is_open(self) -> bool:
        return self.state is not ENDED and self.state is not CUT_OFF

    @property
    def is_receiving(self) -> bool:
        """Whether a request has begun to arrive and is not complete."""
        return self.state is HEAD or self.state is EXPECTING or self.state is BODY

    def feed(self, data: bytes) -> Response | None:
        """Take in what has arrived. The result is the answer to it, if it cannot become a request."""
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
                # An upgrade that we do not offer is ignored (RFC 9110 §7.8): what follows is HTTP/1.1 as before.
                self._parser = httptools.HttpRequestParser(self)
        except httptools.HttpParserCallbackError as error:
            # Not kept in a local: the exception's frames hold the request, and this frame would close the circle.
            if not isinstance(error.__context__, Refused):
                raise
            return error.__context__.response
        except httptools.HttpParserError as error:
            return problem(400, "malformed_request", f"this is not HTTP/1.1: {error}")
        # What arrives within one request and adds nothing to its body is headers, trailers or chunk framing. (A piece
        # that also ends the request before is mostly that one's; its headers are measured when they are complete.)
        if self._completed == completed and self.state is not IDLE and self._body_bytes in (0, body_bytes):
            self._header_bytes += len(data)
            if self._header_bytes > self._shared.limits.header_bytes_max:
                return HEADERS_TOO_LARGE
        return None

    def continue_sent(self) -> None:
        """The client has been told to send the body."""
        self.state = BODY

    def close(self) -> None:
        """Take in nothing more, and drop what is incomplete."""
        if self.is_open:
            self.state = ENDED if self.state is IDLE else CUT_OFF
        self.body = b""
        if self._upload is not None:
            self._upload.discard()
            self._upload = None

    def release(self) -> None:
        """The connection is gone. The parser and its callbacks are a cycle, and a collection may be far away."""
        self.close()
        self._headers = {}
        self._parser = None
        del self._recipient

    # -- time ----------------------------------------------------------------------------------------------

    def await_next(self) -> None:
        """All that arrived before is answered: from now on it is the client that is waited for."""
        self._since = self._body_since = self._shared.now

    def is_overdue(self, now: float) -> bool:
        """Whether the client has been waited for too long in the present state."""
        limits = self._shared.limits
        if self.state is BODY or self.state is EXPECTING:
            return now > self._since + limits.body_timeout_seconds or self._is_too_slow(now)
        if self.state is HEAD or self._completed == 0:
            return now > self._since + limits.header_timeout_seconds
        return now > self._since + limits.idle_timeout_seconds

    def _is_too_slow(self, now: float) -> bool:
        """Whether a body comes too slowly on the whole, however short its pauses are."""
        limits = self._shared.limits
        if not limits.body_bytes_per_second_min:
            return False
        earned = limits.body_timeout_seconds + self._body_bytes / limits.body_bytes_per_second_min
        return now > self._body_since + earned

    # -- the parser's callbacks ----------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self.state is not IDLE:
            raise Refused(None)  # the answer to the request before, in the same piece, was the last
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
            # A trailer. None of our fields may come as one (RFC 9110 §6.5.1), but it costs room.
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
        # Most requests are like the last one of their connection; only what is different is looked at closely.
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
            # Most come in one piece. A list of pieces would take many times their bytes where those are tiny.
            self.body = bytearray(body) + chunk if body else chunk
        self._since = self._shared.now

    def on_message_complete(self) -> None:
        path, _, query = self.target.partition(b"?")
        shared, recipient = self._shared, self._recipient
        base_url = shared.public_url if not shared.is_secure else self._secure_base_url()
        request = Request(self._method, path, query, self._headers, bytes(self.body), base_url, recipient, self._upload)
        self._upload = None
        self.body = b""  # the request's now: an idle connection holds nothing
        self._headers = {}
        self.state = IDLE
        self._completed += 1
        recipient.take(request, self._parser.should_keep_alive(), self._version)

    # -- the request ---------------------------------------------------------------------------------------

    def _secure_base_url(self) -> str:
        return self._shared.public_url or base_url_of("https", self._headers.get(b"host", b"localhost"))

    def _take_absolute_target(self) -> None:
        """A target in absolute form names the host too, and then the Host header does not count (RFC 9112 §3.2.2)."""
        authority, self.target = split_absolute(self.target)
        if authority is not None and b"host" in self._headers:
            self._headers[b"host"] = authority

    def _check_head(self) -> None:
        """Refuse what is too large, of another protocol, or addressed to nobody."""
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
        """Refuse a large body before it is taken in, if its request would be refused anyway."""
        path, _, query = self.target.partition(b"?")
        head = Request(self._method, path, query, self._headers, b"", client=self._recipient)
        refusal = self._shared.app.refusal_of_head(head)
        if refusal is not None:
            raise Refused(refusal)
