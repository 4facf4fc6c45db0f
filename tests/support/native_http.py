"""A connection of the native adapter without a socket: tests feed bytes and move time, and see what is written."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from functools import partial
from typing import Any

from millstream import config as configuration
from millstream.errors import MillstreamError
from millstream.pending import Pending
from millstream.server.http.limits import http_limits
from millstream.server.http.messages import Answer, Request, Response, Sink
from millstream.server.http.metrics import Metrics
from millstream.server.http.native.connection import Connection
from millstream.server.http.native.shared import Shared
from support.fake_time import FakeClock, turns

HOST = b"Host: x\r\n"


class FakeTransport(asyncio.Transport):
    """Takes what is written. A client that does not read lets it pile up in `unsent_bytes`."""

    def __init__(self, connection: Connection, address: str) -> None:
        super().__init__()
        self._connection: Connection | None = connection
        self._address = address
        self._high = 1 << 62
        self.written = b""
        self.unsent_bytes = 0
        self.client_reads = True
        self.is_paused = False
        self.takes_input = True
        self.has_ended = False
        self.is_closed = self.is_aborted = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return (self._address, 1) if name == "peername" else default

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        assert high is not None
        self._high = high

    def get_write_buffer_size(self) -> int:
        return self.unsent_bytes

    def write(self, data: Any) -> None:
        assert not self.has_ended, "written after the end"
        if self.is_closing():
            return
        self.written += data
        if not self.client_reads:
            self.unsent_bytes += len(data)
            if self.unsent_bytes > self._high and not self.is_paused and self._connection is not None:
                self.is_paused = True
                self._connection.pause_writing()

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        self.write(b"".join(list_of_data))

    def drain(self) -> None:
        """The client has read everything."""
        self.unsent_bytes = 0
        if self.is_paused and self._connection is not None:
            self.is_paused = False
            self._connection.resume_writing()

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.has_ended = True

    def pause_reading(self) -> None:
        self.takes_input = False

    def resume_reading(self) -> None:
        self.takes_input = True

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            asyncio.get_running_loop().call_soon(self.lose)

    def abort(self) -> None:
        self.is_aborted = True
        self.close()

    def lose(self) -> None:
        """The connection is gone."""
        self.is_closed = True
        if self._connection is not None:
            connection, self._connection = self._connection, None
            connection.connection_lost(None)


class FakeApplication:
    """Keeps the requests that it is given until a test answers them; those named in `immediate` it answers itself."""

    def __init__(self) -> None:
        self.metrics = Metrics()
        self.logs_access = False
        self.judges_heads = False
        self.supervisor: Any = None
        self.live_reads: Any = None
        self.requests: list[Request] = []
        self.pending: dict[Request, Pending[Response]] = {}
        # Whether the answers only wait for something, and are given up when their client is gone.
        self.is_live = False
        self.abandoned: list[Request] = []
        self.uploads: list[FakeUpload] = []
        self.immediate: dict[bytes, Response] = {}

    def handle(self, request: Request) -> Answer:
        self.requests.append(request)
        if request.path in self.immediate:
            return self.immediate[request.path]
        pending: Pending[Response] = Pending(
            on_abandon=partial(self.abandoned.append, request) if self.is_live else None
        )
        self.pending[request] = pending
        return pending

    def upload_for(self, method: str, target: bytes, body_bytes_max: int) -> tuple[Any, int]:
        if not target.startswith(b"/upload"):
            return None, body_bytes_max
        self.uploads.append(FakeUpload())
        return self.uploads[-1], 1 << 30

    def refusal_of_head(self, request: Request) -> Response | None:
        return None

    def answered(self, request: Request, outcome: Response | MillstreamError) -> Response:
        assert isinstance(outcome, Response)
        return outcome

    def format_refusal(self, target: bytes, refusal: Response) -> Response:
        return refusal


class FakeUpload:
    def __init__(self) -> None:
        self.content = b""
        self.is_discarded = False

    @property
    def size(self) -> int:
        return len(self.content)

    def write(self, chunk: bytes) -> None:
        self.content += chunk

    def discard(self) -> None:
        self.is_discarded = True


class FakeBody:
    """A streamed body that a test writes by hand."""

    def __init__(self) -> None:
        self.resumed = 0
        self.is_cancelled = False
        self.sink: Sink | None = None

    def start(self, sink: Sink) -> None:
        self.sink = sink

    def resume(self) -> None:
        self.resumed += 1

    def cancel(self) -> None:
        self.is_cancelled = True


class Wire:
    """One server's application and what its connections share, with as many clients as a test opens."""

    def __init__(self, clock: FakeClock, *settings: str, is_secure: bool = False) -> None:
        self._clock = clock
        self.app = FakeApplication()
        limits = http_limits(configuration.load(None, {}, settings))
        self.shared = Shared(self.app, limits, None, is_secure=is_secure)
        self.shared.tick()

    def open(self, address: str = "192.0.2.1") -> FakeClient:
        connection = Connection(self.shared, asyncio.get_running_loop())
        transport = FakeTransport(connection, address)
        connection.connection_made(transport)
        return FakeClient(self.app, connection, transport)

    async def advance(self, seconds: float) -> None:
        """Let time pass as the server's ticker sees it."""
        for _ in range(round(seconds * 2)):
            self._clock.advance(500)
            self.shared.tick()
            for member in tuple(self.shared.connections):
                member.check(self.shared.now)
            await turns(3)


class FakeClient:
    """A client, and the server's connection to it."""

    def __init__(self, app: FakeApplication, connection: Connection, transport: FakeTransport) -> None:
        self._app = app
        self.connection = connection
        self.transport = transport

    def send(self, data: bytes) -> None:
        """Send in one piece."""
        if not self.transport.is_closing():
            self.connection.data_received(data)

    def read(self) -> bytes:
        """What the server has written since the last time."""
        written, self.transport.written = self.transport.written, b""
        return written

    def statuses(self) -> list[int]:
        """The status codes of what the server has written since the last time."""
        return [int(part[:3]) for part in self.read().split(b"HTTP/1.1 ")[1:]]

    def answer(self, response: Response | None = None) -> Request:
        """Let the application answer the oldest request that it has."""
        request = self._app.requests.pop(0)
        self._app.pending.pop(request).settle(response or Response(204))
        return request


def get(path: str, *headers: str) -> bytes:
    return request("GET", path, *headers)


def post(path: str, body: bytes, *headers: str) -> bytes:
    return request("POST", path, f"Content-Length: {len(body)}", *headers) + body


def request(method: str, path: str, *headers: str, version: str = "1.1") -> bytes:
    lines = "".join(f"{line}\r\n" for line in headers)
    return f"{method} {path} HTTP/{version}\r\n".encode() + HOST + lines.encode() + b"\r\n"
