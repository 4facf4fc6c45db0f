"""The ASGI adapter: the same handlers, mountable in FastAPI, Starlette or any ASGI server.

    from millstream.server.asgi import MillstreamApp
    app.mount("/streams", MillstreamApp("data"))

The app opens its data directory at lifespan start-up; a framework that mounts it and does not pass the lifespan on
gets it opened by the first request. One process at a time may use a data directory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

from millstream import config as configuration
from millstream.clock import monotonic_seconds
from millstream.errors import MillstreamError
from millstream.server.app import Application
from millstream.server.error_map import error_response, problem
from millstream.server.messages import (
    COMMON_FIELDS,
    BodyStream,
    ReplyWith,
    Request,
    Response,
    Upload,
    base_url_of,
    new_id,
)
from millstream.server.run import Node

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class MillstreamApp:
    """An ASGI application that owns one data directory. `settings` are those of `--set`, by `section.key`."""

    def __init__(self, data_dir: str | Path | None = None, *, config_file: Path | None = None, **settings: str) -> None:
        assignments = [f"{key.replace('__', '.')}={value}" for key, value in settings.items()]
        if data_dir is not None:
            assignments.append(f"server.data_dir={data_dir}")
        self._config = configuration.load(config_file, {}, assignments)
        self._node: Node | None = None
        self._app: Application | None = None
        self._opening = asyncio.Lock()

    async def open(self) -> Application:
        async with self._opening:
            if self._app is None:
                self._node = Node(self._config)
                self._app = await self._node.start()
            return self._app

    async def close(self) -> None:
        if self._node is not None:
            if self._app is not None:
                self._app.live_reads.end_all()
            await self._node.stop()
            self._node = self._app = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "http":
            app = self._app or await self.open()
            await _Exchange(app, self._config, scope, receive, send).run()

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                try:
                    await self.open()
                except MillstreamError as error:
                    await send({"type": "lifespan.startup.failed", "message": str(error)})
                    return
                await send({"type": "lifespan.startup.complete"})
            else:
                await self.close()
                await send({"type": "lifespan.shutdown.complete"})
                return


class _Exchange:
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
        answer: asyncio.Future[Response] = asyncio.get_running_loop().create_future()

        def reply(response: Response) -> None:
            if not answer.done():
                answer.set_result(response)

        try:
            request = await self._request(reply)
        except MillstreamError as error:
            await self._respond(error_response(error), "GET", self._id)
            return
        if request is None:
            return
        self._app.handle(request)
        work = asyncio.ensure_future(self._answer(request, answer))
        watch = asyncio.ensure_future(self._disconnected())
        try:
            await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not work.done():
                request.disconnect()
                work.cancel()
            watch.cancel()
            await asyncio.gather(work, watch, return_exceptions=True)
        if not work.cancelled():
            work.result()

    async def _answer(self, request: Request, answer: asyncio.Future[Response]) -> None:
        response = await answer
        self._app.answered(request, response)
        await self._respond(response, request.method, request.id.encode("latin-1"))

    async def _disconnected(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def _request(self, reply: ReplyWith) -> Request | None:
        scope = self._scope
        headers: dict[bytes, bytes] = {}
        for name, value in scope["headers"]:
            name = name.lower()
            headers[name] = headers[name] + b", " + value if name in headers else value
        # Below a mount point the application sees its own paths; its URLs to the outside keep the prefix.
        mount = scope.get("root_path", "")
        path: bytes = scope.get("raw_path") or scope["path"].encode()
        path = path.partition(b"?")[0].removeprefix(mount.encode())
        head = Request(scope["method"], path, scope["query_string"], headers, b"", lambda response: None, client=self)
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
        base_url = self._config.server.public_url or base_url_of(
            scope.get("scheme", "http"), headers.get(b"host", b"localhost")
        )
        request = Request(scope["method"], path, scope["query_string"], headers, body, reply, base_url + mount, self)
        request.upload = upload
        request.started = monotonic_seconds()
        return request

    async def _body(self, path: bytes, upload: Upload | None, limit: int) -> bytes | None:
        """The request's body, or None if it did not arrive whole; an upload takes it chunk by chunk."""
        chunks, size = [], 0
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
                upload.write(chunk)
            else:
                chunks.append(chunk)
            if not message.get("more_body", False):
                return b"".join(chunks)

    async def _refuse(self, path: bytes, refusal: Response, method: str) -> None:
        await self._respond(self._app.worded(path, refusal), method, self._id)

    async def _respond(self, response: Response, method: str, request_id: bytes) -> None:
        body = response.body
        lines = (COMMON_FIELDS + response.fields).split(b"\r\n")[:-1]
        headers = [*(tuple(line.split(b": ", 1)) for line in lines), (b"x-request-id", request_id)]
        if isinstance(body, bytes) and response.status not in (204, 304) and method != "HEAD":
            headers.append((b"content-length", b"%d" % len(body)))
        elif response.length is not None:
            headers.append((b"content-length", b"%d" % response.length))
        await self._send({"type": "http.response.start", "status": response.status, "headers": headers})
        if isinstance(body, bytes) or method == "HEAD":
            await self._send({"type": "http.response.body", "body": body if method != "HEAD" else b""})
        else:
            await _AsgiSink(self._send, self._config.http.write_buffer_bytes_max).stream(body)


class _AsgiSink:
    """Carries a streamed body: what is written gathers in a bounded buffer while `send` waits for the client."""

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
