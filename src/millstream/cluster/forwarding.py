"""Passing a request on to the node that can answer it, for clients that do not follow redirects.

Connections to a node are kept and used again, a few at a time. A request goes out once: whether one that broke off
had been carried out is for the client to find out, by repeating it as a producer does.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from typing import Any, Final
from urllib.parse import urlsplit

import httptools

from millstream.access.forward_marks import MARK
from millstream.errors import OutcomeUnknown, Unavailable
from millstream.server.http.messages import Request, Response

CONNECTIONS_MAX: Final = 256
TIMEOUT_SECONDS: Final = 30.0
ANSWER_BYTES_MAX: Final = 16 << 20

_NOT_PASSED_ON: Final = frozenset(
    {b"connection", b"keep-alive", b"content-length", b"transfer-encoding", b"expect", b"upgrade", b"te", b"trailer"}
)
# What the adapter adds to every answer by itself.
_NOT_PASSED_BACK: Final = _NOT_PASSED_ON | {
    b"date",
    b"x-content-type-options",
    b"cross-origin-resource-policy",
    b"access-control-allow-origin",
    b"access-control-expose-headers",
}

_Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
_Address = tuple[str, int, bool]
"""Host, port, and whether TLS is spoken there."""


class Forwarder:
    """`tls` is how nodes are trusted whose addresses are https."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self._tls = tls
        self._idle: dict[_Address, deque[_Connection]] = {}
        self._slots = asyncio.Semaphore(CONNECTIONS_MAX)

    async def forward(self, request: Request, base_url: str, mark: bytes) -> Response:
        parts = urlsplit(base_url)
        is_secure = parts.scheme == "https"
        address = (parts.hostname or "", parts.port or (443 if is_secure else 80), is_secure)
        async with self._slots:
            try:
                async with asyncio.timeout(TIMEOUT_SECONDS):
                    return await self._exchange(request, address, mark)
            except (OSError, TimeoutError, EOFError, httptools.HttpParserError) as error:
                raise OutcomeUnknown(
                    f"the leader at {base_url} did not answer: {error or type(error).__name__}",
                    code="forward_failed",
                    hint="it may or may not have been written; repeat it with the same producer sequence",
                ) from None

    async def _exchange(self, request: Request, address: _Address, mark: bytes) -> Response:
        reader, writer = await self._connect(address)
        try:
            writer.write(_head(request, mark) + request.body)
            await writer.drain()
            answer = _Answer()
            parser: Any = httptools.HttpResponseParser(answer)
            while not answer.is_complete:
                data = await reader.read(65_536)
                if not data:
                    raise EOFError("the connection was closed without an answer")
                parser.feed_data(data)
                if answer.size > ANSWER_BYTES_MAX:
                    raise EOFError("the answer is too large")
        except BaseException:
            writer.close()
            raise
        if parser.should_keep_alive():
            self._idle.setdefault(address, deque(maxlen=CONNECTIONS_MAX)).append((reader, writer))
        else:
            writer.close()
        return Response(parser.get_status_code(), b"".join(answer.fields), b"".join(answer.chunks))

    async def _connect(self, address: _Address) -> _Connection:
        host, port, is_secure = address
        idle = self._idle.get(address)
        while idle:
            reader, writer = idle.pop()
            if not reader.at_eof() and not writer.is_closing():
                return reader, writer
            writer.close()
        try:
            return await asyncio.open_connection(host, port, ssl=self._tls if is_secure else None)
        except OSError as error:
            raise Unavailable(f"the leader at {host}:{port} cannot be reached: {error}") from None

    def close(self) -> None:
        for connections in self._idle.values():
            for _, writer in connections:
                writer.close()


def _head(request: Request, mark: bytes) -> bytes:
    target = request.path + (b"?" + request.query if request.query else b"")
    lines = [b"%b %b HTTP/1.1\r\n" % (request.method.encode(), target)]
    lines += [
        b"%b: %b\r\n" % field
        for field in request.headers.items()
        if field[0] not in _NOT_PASSED_ON | {b"x-forwarded-for"}
    ]
    hops = [request.headers[b"x-forwarded-for"]] if b"x-forwarded-for" in request.headers else []
    lines.append(b"x-forwarded-for: %b\r\n" % b", ".join([*hops, request.address.encode()]))
    lines.append(b"content-length: %d\r\n%b: %b\r\n\r\n" % (len(request.body), MARK, mark))
    return b"".join(lines)


class _Answer:
    """Collects what the response parser finds."""

    def __init__(self) -> None:
        self.fields: list[bytes] = []
        self.chunks: list[bytes] = []
        self.size = 0
        self.is_complete = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() not in _NOT_PASSED_BACK:
            self.fields.append(b"%b: %b\r\n" % (name.lower(), value))

    def on_body(self, data: bytes) -> None:
        self.chunks.append(data)
        self.size += len(data)

    def on_message_complete(self) -> None:
        self.is_complete = True
