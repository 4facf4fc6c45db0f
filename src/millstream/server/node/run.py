"""A server process: starts a node and a listener, handles signals, and stops in order."""

from __future__ import annotations

import asyncio
import errno
import faulthandler
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from millstream.access.exposure import check_exposure
from millstream.config import Config
from millstream.errors import ConfigurationError
from millstream.server.api.examples import Examples
from millstream.server.api.front import Front
from millstream.server.api.gate import Gate
from millstream.server.http.limits import http_limits
from millstream.server.http.native import NativeServer
from millstream.server.http.tls import tls_context
from millstream.server.node.read_only import is_read_only
from millstream.server.node.reload import Reloader
from millstream.server.node.scheduled_jobs import ScheduledJobs
from millstream.server.node.settings import (
    object_store_settings,
)
from millstream.server.node.standalone import Node
from millstream.yjs.compaction import is_possible

logger = logging.getLogger("millstream")

# Shares of the time that a stop may take: for handing over, and for requests. The rest is for the last flush.
RETIRE_SHARE = 0.6
REQUESTS_SHARE = 0.5
# A stop that exceeds its time by this much is waiting for something that does not answer.
FORCE_SECONDS = 2.0


class Served(Protocol):
    """A node that can be served: standalone, a drill, or a node of a cluster."""

    on_removed: Callable[[], None]

    @property
    def notices(self) -> list[str]: ...

    @property
    def runs_scheduled_jobs(self) -> bool:
        """Whether this node starts the scheduled jobs."""
        ...

    async def start(self) -> Front: ...

    def open_gate(self, config: Config) -> Gate | None: ...

    async def retire(self) -> None:
        """Let other nodes take over before connections are closed."""
        ...

    async def stop(self, timeout_seconds: float | None = None) -> None: ...


def open_node(config: Config) -> Served:
    if not config.cluster.name:
        return Node(config)
    if is_read_only(config.server.data_dir):
        from millstream.server.node.drill import DrillNode

        return DrillNode(config)
    try:
        from millstream.server.node.cluster_node import ClusterNode
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"a cluster needs the package {error.name}, which is not installed",
            hint="pip install 'millstream[cluster]'",
        ) from None
    return ClusterNode(config)


def open_listener(address: tuple[str, int]) -> socket.socket:
    host, port = address
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        raise _cannot_listen(address, error) from None
    listening.setblocking(False)
    return listening


def _cannot_listen(address: tuple[str, int], error: OSError) -> ConfigurationError:
    host, port = address
    reason = "another process listens there" if error.errno == errno.EADDRINUSE else error.strerror
    return ConfigurationError(
        f"cannot listen on {host}:{port}: {reason}", hint="choose another address with --listen HOST:PORT"
    )


def end_by_force(seconds: float) -> None:
    """Kill the process after a time, whatever it waits for: a disk, a broker or a thread that does not answer.

    Everything acknowledged is in the log, so the next start is like one after a crash. The timer has its own thread,
    because the interpreter waits for other threads at its end, when the loop no longer runs.
    """

    def end() -> None:
        logger.critical("the stop has taken %.0f s and is ended by force; the log keeps everything", seconds)
        faulthandler.dump_traceback(all_threads=True)
        os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()


def _own_url(host: str, port: int) -> str:
    """The URL by which a process on this machine reaches the listener."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"


async def serve(
    config: Config,
    announce: Callable[[str], None],
    *,
    node: Served | None = None,
    examples: Path | None = None,
    load: Callable[[], Config] | None = None,
) -> None:
    """Run until SIGTERM or SIGINT, then stop in order. On SIGHUP, apply what `load` returns."""
    pages = Examples(examples) if examples is not None else None
    warning = check_exposure(config)
    tls = tls_context(config.tls)
    listening = open_listener(config.server.listen)
    try:
        node = node or open_node(config)
        app = await node.start()
        app.examples = pages
    except BaseException:
        listening.close()
        raise
    server = NativeServer(app, http_limits(config), public_url=config.server.public_url, tls=tls)
    try:
        await server.start(listening)
    except OSError as error:
        listening.close()
        await node.retire()
        await node.stop(config.server.stop_timeout)
        raise _cannot_listen(config.server.listen, error) from None
    stopped = asyncio.Event()
    _handle_signals(stopped, Reloader(config, load or (lambda: config), node.open_gate, app, server))
    node.on_removed = stopped.set
    _log_notices([*node.notices], warning)
    jobs = ScheduledJobs(
        config.server.public_url or _own_url(*listening.getsockname()[:2]),
        config.pipeline,
        object_store_settings(config),
        app.supervisor,
        is_ours=lambda: node.runs_scheduled_jobs,
    )
    jobs.start()
    _announce(announce, config, listening, pages, is_secure=tls is not None)
    await stopped.wait()
    app.health.is_stopping = True
    await _stop(config, node, server, jobs)


def _handle_signals(stopped: asyncio.Event, reloader: Reloader) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    loop.add_signal_handler(signal.SIGHUP, reloader.reload)


def _log_notices(notices: list[str], warning: str | None) -> None:
    for notice in notices:
        logger.info(notice)
    if warning is not None:
        logger.warning(warning)
    if not is_possible():
        logger.info("Yjs documents are served but not compacted: pycrdt is missing, pip install 'millstream[yjs]'")


def _announce(
    announce: Callable[[str], None],
    config: Config,
    listening: socket.socket,
    pages: Examples | None,
    *,
    is_secure: bool,
) -> None:
    """Print the server's address, for people and for programs that wait for the start."""
    host, port = listening.getsockname()[:2]
    place = f"{f'[{host}]' if ':' in host else host}:{port}"
    announce(
        f"millstream listens on http{'s' if is_secure else ''}://{place},"
        f" keeps its data in {config.server.data_dir} (cold tier: {config.cold.backend}), and acknowledges after"
        " fdatasync (group commit)"
    )
    for path in pages.paths if pages is not None else []:
        announce(f"an example to try: http://{place}{path}")


async def _stop(config: Config, node: Served, server: NativeServer, jobs: ScheduledJobs) -> None:
    """Stop in order, and within `server.stop_timeout`."""
    loop, seconds = asyncio.get_running_loop(), config.server.stop_timeout
    deadline = loop.time() + seconds
    end_by_force(seconds + FORCE_SECONDS)
    logger.info("stopping: no more connections, requests finish, live reads end")
    await jobs.stop()
    try:
        async with asyncio.timeout(seconds * RETIRE_SHARE):
            await node.retire()
    except TimeoutError:
        logger.warning("nobody has taken over in time; the others will when they miss this node")
    await server.stop(min(seconds * REQUESTS_SHARE, max(deadline - loop.time(), 0.0)))
    await node.stop(max(deadline - loop.time(), 0.0))
    logger.info("stopped")
