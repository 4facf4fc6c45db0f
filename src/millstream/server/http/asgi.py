"""The ASGI adapter: one exchange, from an ASGI scope to a request and from a response to ASGI messages."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final
from urllib.parse import quote

from millstream import config as configuration
from millstream.clock import monotonic_seconds
from millstream.errors import InvalidRequest, MillstreamError
from millstream.pending import Pending
from millstream.server.http.application import Application
from millstream.server.http.error_map import error_response, problem
from millstream.server.http.messages import (
    COMMON_FIELDS,
    BodyStream,
    Request,
    Response,
    Upload,
    base_url_of,
    new_id,
)

# How soon a live read ends that begins after a stop signal.
END_SECONDS: Final = 0.1

# How long a client that was refused early may go on sending its body.
LINGER_SECONDS: Final = 2.0

# Characters that need no encoding in a path (RFC 3986 §3.3), and characters that must be encoded.
PATH_CHARACTERS: Final = "/!$&'()*+,;=:@-._~"
_UNSENDABLE: Final = re.compile(rb"[\x00-\x20\x7f]")

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class Exchange:
    """One request and its answer."""

    def __init__(
        self, app: Application, config: configuration.Config, scope: Scope, receive: Receive, send: Send
    ) -> None:
        self._app = app
        self._config = config
        self._scope = scope
        self._receive = receive
        self._send = send
        self._id = new_id()

    @property
    def address(self) -> str:
        client = self._scope.get("client")
        return str(client[0]) if client else ""

    def request_id(self) -> bytes:
        return self._id

    async def run(self) -> None:
        try:
            request = await self._request()
        except MillstreamError as error:
            await self._respond(error_response(error), "GET", self._id)
            return
        if request is None:
            return
        work = asyncio.ensure_future(self._answer(request))
        watch = asyncio.ensure_future(self._disconnected())
        try:
            await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            work.cancel()
            watch.cancel()
            await asyncio.gather(work, watch, return_exceptions=True)
        if not work.cancelled():
            work.result()

    async def _answer(self, request: Request) -> None:
        answer = self._app.handle(request)
        outcome: Response | MillstreamError
        try:
            outcome = await answer if isinstance(answer, Pending) else answer
        except MillstreamError as error:
            outcome = error
        response = self._app.answered(request, outcome)
        await self._respond(response, request.method, request.id.encode("latin-1"))

    async def _disconnected(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def _request(self) -> Request | None:
        scope = self._scope
        headers: dict[bytes, bytes] = {}
        for name, value in scope["headers"]:
            name = name.lower()
            headers[name] = headers[name] + b", " + value if name in headers else value
        # Below a mount point the application sees its own paths; the URLs that it gives out keep the prefix.
        mount = quote(scope.get("root_path", ""), safe=PATH_CHARACTERS)
        path = _raw_path(scope).removeprefix(mount.encode())
        if _UNSENDABLE.search(path + scope["query_string"]) is not None:
            raise InvalidRequest("the path or the query contains a space or a control character", code="invalid_path")
        base_url = self._config.server.public_url or base_url_of(
            scope.get("scheme", "http"), headers.get(b"host", b"localhost")
        )
        head = Request(scope["method"], path, scope["query_string"], headers, b"", client=self)
        refusal = self._app.refusal_of_head(head)
        if refusal is not None:
            await self._refuse(path, refusal, scope["method"])
            return None
        upload, limit = self._app.upload_for(scope["method"], path, self._config.http.body_bytes_max)
        body = await self._body(path, upload, limit)
        if body is None:
            if upload is not None:
                upload.discard()
            return None
        request = Request(scope["method"], path, scope["query_string"], headers, body, base_url + mount, self)
        request.upload = upload
        request.started = monotonic_seconds()
        return request

    async def _body(self, path: bytes, upload: Upload | None, limit: int) -> bytes | None:
        """The request's body, or None if it did not arrive completely. An upload receives it chunk by chunk."""
        body, size = bytearray(), 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                return None
            chunk = message.get("body", b"")
            size += len(chunk)
            if size > limit:
                refusal = problem(413, "payload_too_large", f"the request body is larger than {limit} bytes")
                await self._refuse(path, refusal, "POST")
                return None
            if upload is not None:
                try:
                    upload.write(chunk)
                except OSError as error:
                    refusal = problem(503, "disk_error", f"the body could not be stored: {error.strerror}")
                    await self._refuse(path, refusal, "POST")
                    return None
            else:
                body += chunk
            if not message.get("more_body", False):
                return bytes(body)

    async def _refuse(self, path: bytes, refusal: Response, method: str) -> None:
        """Answer before the body has arrived, and go on receiving for a while. A server that closed the connection at
        once would reset it, and the client might lose the answer."""
        # Receiving would send 100 Continue to a client that waits for it, and make it send the body.
        is_sending = not any(name.lower() == b"expect" for name, _ in self._scope["headers"])
        await self._respond(self._app.format_refusal(path, refusal), method, self._id, lingers=is_sending)

    async def _linger(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_SECONDS):
                while True:
                    message = await self._receive()
                    if message["type"] == "http.disconnect" or not message.get("more_body", False):
                        return

    async def _respond(self, response: Response, method: str, request_id: bytes, *, lingers: bool = False) -> None:
        body = response.body
        lines = (COMMON_FIELDS + response.fields).split(b"\r\n")[:-1]
        headers = [*(tuple(line.split(b": ", 1)) for line in lines), (b"x-request-id", request_id)]
        if isinstance(body, bytes) and response.status not in (204, 304) and method != "HEAD":
            headers.append((b"content-length", b"%d" % len(body)))
        elif response.length is not None:
            headers.append((b"content-length", b"%d" % response.length))
        await self._send({"type": "http.response.start", "status": response.status, "headers": headers})
        if isinstance(body, bytes) or method == "HEAD":
            sent = body if method != "HEAD" else b""
            if lingers:
                await self._send({"type": "http.response.body", "body": sent, "more_body": True})
                await self._linger()
                sent = b""
            await self._send({"type": "http.response.body", "body": sent})
        else:
            await _AsgiSink(self._send, self._config.http.write_buffer_bytes_max).stream(body)


def _raw_path(scope: Scope) -> bytes:
    """The path as it was sent. If the ASGI server gives only the decoded path, it is encoded again: parts of it go into
    `Location`, and a decoded path may hold any character."""
    raw: bytes | None = scope.get("raw_path")
    if raw is None:
        return quote(scope["path"].encode(errors="surrogateescape"), safe=PATH_CHARACTERS).encode()
    return raw.partition(b"?")[0]


class _AsgiSink:
    """The sink of a streamed body: a bounded buffer while `send` waits for the client."""

    def __init__(self, send: Send, buffer_bytes_max: int) -> None:
        self._send = send
        self._buffer_bytes_max = buffer_bytes_max
        self._chunks: list[bytes] = []
        self._size = 0
        self._is_finished = False
        self._is_aborted = False
        self._changed = asyncio.Event()

    def write(self, data: bytes) -> bool:
        self._chunks.append(data)
        self._size += len(data)
        self._changed.set()
        return self._size < self._buffer_bytes_max

    def finish(self) -> None:
        self._is_finished = True
        self._changed.set()

    def abort(self) -> None:
        self._is_aborted = True
        self._changed.set()

    async def stream(self, body: BodyStream) -> None:
        body.start(self)
        try:
            while True:
                await self._changed.wait()
                self._changed.clear()
                if self._is_aborted:
                    raise ConnectionAbortedError("the body could not be completed")
                data, was_full = b"".join(self._chunks), self._size >= self._buffer_bytes_max
                self._chunks, self._size = [], 0
                if data:
                    await self._send({"type": "http.response.body", "body": data, "more_body": True})
                if self._is_finished and not self._chunks:
                    await self._send({"type": "http.response.body", "body": b""})
                    return
                if was_full:
                    body.resume()
        finally:
            body.cancel()
