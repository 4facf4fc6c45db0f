"""Connections for asyncio: the same pool as `connections`, on the running event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from millstream.client.connections import (
    ANSWER_BYTES_MAX,
    IDLE_CONNECTIONS_MAX,
    RECEIVE_BYTES,
    Body,
    is_readable,
    reason_of,
    remedy_of,
)
from millstream.client.errors import ConnectionFailed
from millstream.client.http1 import AnswerParser, encode_head
from millstream.client.messages import Origin, Request, Response

if TYPE_CHECKING:
    import ssl


class AsyncConnection:
    """One connection and the answer that is being read from it."""

    def __init__(self, origin: Origin, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.origin = origin
        self.is_used = False
        self._reader = reader
        self._writer = writer
        self._parser = AnswerParser("GET")
        self._timeout = 0.0

    @classmethod
    async def connect(
        cls, origin: Origin, timeout: float, tls: ssl.SSLContext | None, address: str | None = None
    ) -> AsyncConnection:
        """Connect to the origin's host, or to an `address` that the caller has resolved for it. The certificate must
        match the host in both cases."""
        try:
            async with asyncio.timeout(timeout):
                reader, writer = await asyncio.open_connection(
                    address or origin.host,
                    origin.port,
                    ssl=tls,
                    server_hostname=origin.host if tls is not None else None,
                    limit=RECEIVE_BYTES,
                )
        except OSError as error:
            raise ConnectionFailed(
                f"cannot connect to {origin}: {reason_of(error)}",
                was_sent=False,
                timed_out=isinstance(error, TimeoutError),
                hint=remedy_of(error),
            ) from None
        return cls(origin, reader, writer)

    async def request(self, request: Request, timeout: float) -> AnswerParser:
        """Send a request and wait until its answer has begun."""
        parser = self._parser = AnswerParser(request.method)
        self._timeout = timeout
        head = encode_head(self.origin, request)
        try:
            async with asyncio.timeout(timeout):
                self._writer.writelines((head, request.body))
                await self._writer.drain()
        except TimeoutError:
            raise self._failure(f"{self.origin} took nothing for {timeout:g} s", timed_out=True) from None
        except OSError:
            pass  # the server may have refused the body before reading all of it; its answer says so
        while not parser.status:
            await self._receive()
        self.is_used = True
        return parser

    async def receive(self) -> bytes:
        """The next part of the body; empty at its end."""
        parser = self._parser
        while True:
            data = parser.take()
            if data or parser.is_complete:
                return data
            await self._receive()

    async def response(self, bytes_max: int = ANSWER_BYTES_MAX) -> Response:
        """The whole body of an answer that has begun, if it is not larger than this."""
        body = Body(bytes_max)
        while not body.take(self._parser):
            await self._receive()
        return Response(self._parser.status, self._parser.headers, body.joined())

    async def _receive(self) -> None:
        try:
            async with asyncio.timeout(self._timeout):
                data = await self._reader.read(RECEIVE_BYTES)
        except TimeoutError:
            raise self._failure(f"{self.origin} said nothing for {self._timeout:g} s", timed_out=True) from None
        except OSError as error:
            raise self._failure(f"the connection to {self.origin} broke: {reason_of(error)}") from None
        if data:
            self._parser.feed(data)
            return
        self._parser.end()
        if not self._parser.is_complete:
            raise self._failure(f"{self.origin} ended the connection before its answer")

    def _failure(self, message: str, *, timed_out: bool = False) -> ConnectionFailed:
        was_reused = self.is_used and not self._parser.status
        return ConnectionFailed(message, was_sent=True, was_reused=was_reused, timed_out=timed_out)

    @property
    def can_reuse(self) -> bool:
        return self._parser.is_complete and self._parser.can_reuse

    def is_stale(self) -> bool:
        """Whether the server has closed an idle connection, even if the event loop has not noticed yet."""
        found = self._writer.get_extra_info("socket")
        return self._reader.at_eof() or self._writer.is_closing() or found is None or is_readable(found.fileno())

    def close(self) -> None:
        self._writer.close()

    async def wait_closed(self) -> None:
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()


class AsyncPool:
    """Idle connections, all on one event loop."""

    def __init__(
        self,
        timeout: float,
        live_timeout: float,
        tls: ssl.SSLContext | None,
        *,
        idle_max: int = IDLE_CONNECTIONS_MAX,
        answer_bytes_max: int = ANSWER_BYTES_MAX,
    ) -> None:
        self._idle_max = idle_max
        self._answer_bytes_max = answer_bytes_max
        self._timeout = timeout
        self._live_timeout = live_timeout
        self._tls = tls
        self._idle: list[AsyncConnection] = []
        self._is_closed = False

    async def exchange(self, origin: Origin, request: Request, *, is_live: bool = False) -> Response:
        connection, _ = await self.open(origin, request, is_live=is_live)
        try:
            response = await connection.response(self._answer_bytes_max)
        except BaseException:
            connection.close()
            raise
        self.release(connection)
        return response

    async def open(
        self,
        origin: Origin,
        request: Request,
        *,
        is_live: bool,
        on_connected: Callable[[AsyncConnection], None] | None = None,
    ) -> tuple[AsyncConnection, AnswerParser]:
        """A connection on which the answer to this request has begun; `release` returns it to the pool. `on_connected`
        is called with it before anything is sent, so that another task can close it."""
        connection = await self._take(origin)
        try:
            if on_connected is not None:
                on_connected(connection)
            return connection, await connection.request(request, self._live_timeout if is_live else self._timeout)
        except BaseException:
            connection.close()
            raise

    async def _take(self, origin: Origin) -> AsyncConnection:
        while True:
            if self._is_closed:
                raise ConnectionFailed("the client is closed", was_sent=False)
            found = next((one for one in reversed(self._idle) if one.origin == origin), None)
            if found is None:
                tls = self._context() if origin.scheme == "https" else None
                return await AsyncConnection.connect(origin, self._timeout, tls)
            self._idle.remove(found)
            if not found.is_stale():
                return found
            found.close()

    def _context(self) -> ssl.SSLContext:
        if self._tls is None:
            import ssl  # imported only when it is needed, because it is slow

            self._tls = ssl.create_default_context()
        return self._tls

    def release(self, connection: AsyncConnection) -> None:
        """Return a connection to the pool; one whose answer was not read completely is closed."""
        if self._is_closed or not connection.can_reuse:
            connection.close()
            return
        self._idle.append(connection)
        if len(self._idle) > self._idle_max:
            self._idle.pop(0).close()

    async def close(self) -> None:
        for connection in self.close_soon():
            await connection.wait_closed()

    def close_soon(self) -> list[AsyncConnection]:
        """Close the pool without waiting for its connections to end; returns those."""
        self._is_closed = True
        idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()
        return idle
