"""The ASGI application: the server, mountable in FastAPI, Starlette or any ASGI server.

    from millstream.asgi import MillstreamApp

    streams = MillstreamApp("streams-data")
    app = FastAPI(lifespan=streams.lifespan)
    app.mount("/streams", streams)

The app opens its data directory at lifespan start-up and closes it at shut-down; a framework that mounts it and does
not pass the lifespan on gets it opened by the first request. Live reads end when the process is told to stop, since
ASGI servers wait for them before they shut applications down. One process at a time may use a data directory.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from millstream import config as configuration
from millstream.errors import MillstreamError
from millstream.server.api.front import Front
from millstream.server.http.asgi import Exchange, Receive, Scope, Send
from millstream.server.node.standalone import Node
from millstream.server.node.stop_signals import StopSignals
from millstream.tasks import end

# How soon after a signal a live read ends that came after it.
END_SECONDS: Final = 0.1

# How long a client that was refused before its body had arrived may go on sending it.
LINGER_SECONDS: Final = 2.0

# What stands in a path as it is (RFC 3986 §3.3), and what no server would have passed on as it is.
PATH_CHARACTERS: Final = "/!$&'()*+,;=:@-._~"
_UNSENDABLE: Final = re.compile(rb"[\x00-\x20\x7f]")


class MillstreamApp:
    """An ASGI application that owns one data directory. `settings` are those of `--set`, by `section.key`."""

    def __init__(self, data_dir: str | Path | None = None, *, config_file: Path | None = None, **settings: str) -> None:
        assignments = [f"{key.replace('__', '.')}={value}" for key, value in settings.items()]
        if data_dir is not None:
            assignments.append(f"server.data_dir={data_dir}")
        self._config = configuration.load(config_file, {}, assignments)
        self._node: Node | None = None
        self._app: Front | None = None
        self._opening = asyncio.Lock()
        self._signals: StopSignals | None = None
        self._ending: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def lifespan(self, app: object) -> AsyncIterator[None]:
        """For frameworks that take one, such as `FastAPI(lifespan=streams.lifespan)`."""
        await self.open()
        try:
            yield
        finally:
            await self.close()

    async def open(self) -> Front:
        async with self._opening:
            if self._app is None:
                self._node = Node(self._config, is_mounted=True)
                self._app = await self._node.start()
                self._signals = StopSignals(self.end_live_reads)
                self._signals.listen()
            return self._app

    def end_live_reads(self) -> None:
        """End those there are and those that come: the process is about to stop."""
        if self._ending is None and self._app is not None:
            self._ending = asyncio.get_running_loop().create_task(self._end_live_reads(self._app))

    @staticmethod
    async def _end_live_reads(app: Front) -> None:
        while True:
            app.live_reads.end_all()
            await asyncio.sleep(END_SECONDS)

    async def close(self) -> None:
        if self._signals is not None:
            self._signals.close()
        if self._ending is not None:
            await end(self._ending)
            self._ending = None
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
            await Exchange(app, self._config, scope, receive, send).run()

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
