"""HTTP/1.1 as bytes, from the client's side (RFC 9112): requests out, answers in.

Knows no sockets and no streams. A parser handles one answer; the owner of the connection feeds it input and makes a new
parser for the next request.
"""

from __future__ import annotations

import re
from typing import Final

from millstream.client.errors import BadAnswer, BadRequest
from millstream.client.messages import Origin, Request

HEAD_BYTES_MAX: Final = 64 << 10
LINE_BYTES_MAX: Final = 8 << 10

_STATUS_LINE: Final = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9]{2})(?: .*)?", re.DOTALL)
_CHUNK_SIZE: Final = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;.*)?", re.DOTALL)
_UNSENDABLE: Final = re.compile(r"[^\t\x20-\x7e\x80-\xff]")


def encode_head(origin: Origin, request: Request) -> bytes:
    """The head of a request. A request that has a `host` header keeps it: a forwarded request has its sender's."""
    lines = [f"{request.method} {request.target} HTTP/1.1"]
    if "host" not in request.headers:
        lines.append(f"host: {origin.authority}")
    for name, value in request.headers.items():
        if _UNSENDABLE.search(value) is not None:
            shown = "the token" if name == "authorization" else f"{name} {value[:80]!r}"
            raise BadRequest(f"{shown} cannot be sent in a header", hint="leave out line breaks and non-Latin letters")
        lines.append(f"{name}: {value}")
    if request.body or request.method in ("PUT", "POST"):
        lines.append(f"content-length: {len(request.body)}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


class AnswerParser:
    """Parses one answer from pieces of any size. `status` is 0 until the head has arrived."""

    def __init__(self, method: str) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.is_complete = False
        self.can_reuse = False
        self._method = method
        self._buffer = b""
        self._body: list[bytes] = []
        self._is_chunked = False
        self._is_last_chunk = False
        # Bytes left of the body or of its chunk; None reads until the connection ends.
        self._left: int | None = 0
        self._is_line_due = True

    def feed(self, data: bytes) -> None:
        if not self.status:
            data = self._feed_head(data)
            if not self.status:
                return
        if self._is_chunked:
            self._feed_chunks(data)
        else:
            self._feed_body(data)

    def take(self) -> bytes:
        """The part of the body that has arrived since the last call."""
        body = self._body
        data = body[0] if len(body) == 1 else b"".join(body)
        body.clear()
        return data

    def end(self) -> None:
        """The connection has ended. If that is also the end of the body, `is_complete` becomes true."""
        if self.status and self._left is None and not self._is_chunked:
            self.is_complete = True

    # -- head --------------------------------------------------------------------------------------------------

    def _feed_head(self, data: bytes) -> bytes:
        """Parse the head from what has arrived; returns what follows it."""
        self._buffer += data
        while True:
            end = self._buffer.find(b"\r\n\r\n")
            if end > HEAD_BYTES_MAX or (end < 0 and len(self._buffer) > HEAD_BYTES_MAX):
                raise BadAnswer(f"the answer's head is longer than {HEAD_BYTES_MAX} bytes")
            if end < 0:
                return b""
            head, self._buffer = self._buffer[:end], self._buffer[end + 4 :]
            status = self._parse_head(head)
            if status >= 200:
                break
            self.headers = {}  # an interim answer: the real one follows (RFC 9110 §15.2)
        self.status = status
        rest, self._buffer = self._buffer, b""
        return rest

    def _parse_head(self, head: bytes) -> int:
        first, *lines = head.split(b"\r\n")
        match = _STATUS_LINE.fullmatch(first)
        if match is None:
            raise BadAnswer(f"what answers does not speak HTTP/1.1: {first[:80]!r}", hint="check the URL and its port")
        headers = self.headers
        for line in lines:
            name, colon, value = line.decode("latin-1").partition(":")
            name, value = name.lower(), value.strip(" \t")
            if not colon or not name:
                raise BadAnswer(f"the answer has a malformed header {line[:80]!r}")
            headers[name] = f"{headers[name]}, {value}" if name in headers else value
        status = int(match[2])
        self._frame(status)
        connection = headers.get("connection", "").lower()
        is_kept = "close" not in connection and (match[1] == b"1" or "keep-alive" in connection)
        self.can_reuse = is_kept and self._left is not None
        return status

    def _frame(self, status: int) -> None:
        """How long the body is (RFC 9112 §6.3)."""
        length = self.headers.get("content-length")
        if self._method == "HEAD" or status < 200 or status in (204, 304):
            self._left = 0
        elif "transfer-encoding" in self.headers:
            if self.headers["transfer-encoding"].lower() != "chunked":
                raise BadAnswer(f"the answer is encoded as {self.headers['transfer-encoding'][:80]!r}")
            self._is_chunked = True
        elif length is None:
            self._left = None
        elif length.isascii() and length.isdigit():
            self._left = int(length)
        else:
            raise BadAnswer(f"the answer's content-length is {length[:80]!r}")

    # -- body --------------------------------------------------------------------------------------------------

    def _feed_body(self, data: bytes) -> None:
        left = self._left
        if left is None:
            if data:
                self._body.append(data)
            return
        if len(data) > left:
            self.can_reuse = False  # more bytes than it announced
            data = data[:left]
        if data:
            self._body.append(data)
            self._left = left - len(data)
        self.is_complete = self._left == 0

    def _feed_chunks(self, data: bytes) -> None:
        if self._buffer:
            data, self._buffer = self._buffer + data, b""
        at = 0
        while not self.is_complete:
            if not self._is_line_due:
                piece = data[at : at + (self._left or 0)]
                if piece:
                    self._body.append(piece)
                at += len(piece)
                self._left = (self._left or 0) - len(piece)
                if self._left:
                    return
                if len(data) - at < 2:
                    self._buffer = data[at:]
                    return
                if data[at : at + 2] != b"\r\n":
                    raise BadAnswer("a chunk of the answer is longer than it said")
                at += 2
                self._is_line_due = True
            end = data.find(b"\r\n", at)
            if end - at > LINE_BYTES_MAX or (end < 0 and len(data) - at > LINE_BYTES_MAX):
                raise BadAnswer("a line between the answer's chunks is too long")
            if end < 0:
                self._buffer = data[at:]
                return
            self._take_line(data[at:end])
            at = end + 2
        if at < len(data):
            self.can_reuse = False

    def _take_line(self, line: bytes) -> None:
        if self._is_last_chunk:
            self.is_complete = not line  # lines before the empty line are trailers
            return
        match = _CHUNK_SIZE.fullmatch(line)
        if match is None:
            raise BadAnswer(f"the answer has a malformed chunk size {line[:40]!r}")
        self._left = int(match[1], 16)
        self._is_last_chunk = self._left == 0
        self._is_line_due = self._is_last_chunk
