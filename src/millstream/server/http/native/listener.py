"""The listener: accepts connections, checks their timeouts twice a second, and ends them when it stops."""

from __future__ import annotations

import asyncio
import socket
import ssl
from typing import Final

from millstream.server.http.application import Application
from millstream.server.http.limits import HttpLimits
from millstream.server.http.native.connection import Connection
from millstream.server.http.native.shared import CHECK_SECONDS, Shared
from millstream.server.http.native.writing import LINGER_SECONDS
from millstream.tasks import end

BACKLOG: Final = 4096


class NativeServer:
    def __init__(
        self,
        app: Application,
        limits: HttpLimits,
        *,
        public_url: str | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.tls = tls
        self._app = app
        self._shared = Shared(app, limits, public_url, is_secure=tls is not None)
        self._server: asyncio.Server | None = None
        self._ticker: asyncio.Task[None] | None = None

    async def start(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        self._shared.tick()
        # Two sockets may be bound to one address, and the first that listens gets it. uvloop does not report the
        # failure of the second: it closes it and continues.
        listening.listen(BACKLOG)
        handshake_seconds = self._shared.limits.header_timeout_seconds if self.tls is not None else None
        self._server = await loop.create_server(
            lambda: Connection(self._shared, loop),
            sock=listening,
            backlog=BACKLOG,
            ssl=self.tls,
            ssl_handshake_timeout=handshake_seconds,
            ssl_shutdown_timeout=LINGER_SECONDS if self.tls is not None else None,
        )
        self._ticker = self._app.supervisor.start("timeouts", self._tick, is_vital=True)

    def set_limits(self, limits: HttpLimits) -> None:
        """Apply limits to open and new connections; limits of write buffers only to new ones."""
        self._shared.limits = limits

    async def stop(self, grace_seconds: float) -> None:
        """Stop accepting, end live reads, let other requests finish; then close the remaining connections."""
        self._shared.is_stopping = True
        if self._server is not None:
            self._server.close()
        connections = self._shared.connections
        for connection in tuple(connections):
            connection.retire()
        self._app.live_reads.end_all()
        deadline = asyncio.get_running_loop().time() + grace_seconds
        while connections and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.01)
        for connection in tuple(connections):
            connection.abort()
        await end(self._ticker)

    async def _tick(self) -> None:
        shared = self._shared
        while True:
            # If the loop was delayed, it has not read what clients sent meanwhile: do not count that time against them.
            due = shared.now + CHECK_SECONDS
            await asyncio.sleep(CHECK_SECONDS)
            shared.tick()
            shared.pace()
            for connection in tuple(shared.connections):
                connection.check(due)
