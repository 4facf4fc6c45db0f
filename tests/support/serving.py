"""Servers for suites that hold over every HTTP adapter, all with the same face: a URL, and what went wrong.

`in-process`  the native adapter on a thread of this process: starts in a few hundredths of a second
`native`      `millstream serve`, a process of its own, as a user runs it
`asgi`        the ASGI adapter in uvicorn, on a thread of this process
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Protocol

import uvicorn
import uvloop

from millstream import config as configuration
from millstream.asgi import MillstreamApp
from millstream.server.http.limits import http_limits
from millstream.server.http.native import NativeServer
from millstream.server.node.run import open_listener
from millstream.server.node.standalone import Node
from support.server import ServerProcess

ADAPTERS = ("in-process", "native", "asgi")
STOP_SECONDS = 20.0


class Server(Protocol):
    """A running server."""

    @property
    def url(self) -> str: ...

    @property
    def data_dir(self) -> Path: ...

    def stderr(self) -> str:
        """What it has logged."""
        ...

    def __enter__(self) -> Server: ...

    def __exit__(self, *exc: object) -> None: ...


Serve = Callable[..., Server]
"""Starts a server with these settings, `section.key=value` each; it ends with the module."""


def server_behind(adapter: str, data_dir: Path, *settings: str) -> Server:
    if adapter == "native":
        return ServerProcess(data_dir, settings=settings)
    return _ServerThread(_in_process if adapter == "in-process" else _in_uvicorn, data_dir, settings)


Running = AbstractAsyncContextManager[None]


class _ServerThread:
    """A server on an event loop of its own in a thread of this process."""

    def __init__(
        self,
        running: Callable[[Path, tuple[str, ...], socket.socket], Running],
        data_dir: Path,
        settings: tuple[str, ...],
    ) -> None:
        self._running = running
        self.data_dir = data_dir
        self._settings = settings
        self._listening = open_listener(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self._loop = uvloop.new_event_loop()
        self._stopping = asyncio.Event()
        self._started: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, name=f"serving {data_dir.parent.name}")
        self._log = io.StringIO()
        self._handler = logging.StreamHandler(self._log)

    def stderr(self) -> str:
        return self._log.getvalue()

    def __enter__(self) -> _ServerThread:
        logging.getLogger("millstream").addHandler(self._handler)
        logging.getLogger("asyncio").addHandler(self._handler)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._until_started(), self._loop).result(STOP_SECONDS)
        return self

    def __exit__(self, *exc: object) -> None:
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(STOP_SECONDS)
        assert not self._thread.is_alive(), f"the server did not stop: {self.stderr()}"
        logging.getLogger("millstream").removeHandler(self._handler)
        logging.getLogger("asyncio").removeHandler(self._handler)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _until_started(self) -> None:
        await self._started

    async def _serve(self) -> None:
        try:
            async with self._running(self.data_dir, self._settings, self._listening):
                self._started.set_result(None)
                await self._stopping.wait()
        except BaseException as error:
            if self._started.done():
                raise
            self._listening.close()
            self._started.set_exception(error)


@contextlib.asynccontextmanager
async def _in_process(data_dir: Path, settings: tuple[str, ...], listening: socket.socket) -> AsyncIterator[None]:
    config = configuration.load(None, {}, [*settings, f"server.data_dir={data_dir}"])
    node = Node(config)
    app = await node.start()
    server = NativeServer(app, http_limits(config), public_url=config.server.public_url)
    await server.start(listening)
    yield
    await server.stop(0.0)
    await node.stop(STOP_SECONDS)


@contextlib.asynccontextmanager
async def _in_uvicorn(data_dir: Path, settings: tuple[str, ...], listening: socket.socket) -> AsyncIterator[None]:
    assignments: Any = dict(one.replace(".", "__", 1).split("=", 1) for one in settings)
    app = MillstreamApp(data_dir, **assignments)
    # Long: httpx does not close what a server has closed before.
    config = uvicorn.Config(app, log_config=None, timeout_keep_alive=120, timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    serving = asyncio.ensure_future(server.serve(sockets=[listening]))
    while not server.started:
        assert not serving.done(), "uvicorn did not start"
        await asyncio.sleep(0.01)
    yield
    server.should_exit = True
    await serving
