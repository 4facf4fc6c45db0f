"""A whole server in one process: data directory, shard, application, listener, signals."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

from millstream.clock import Clock, SystemClock
from millstream.config import Config
from millstream.errors import ConfigurationError
from millstream.log.disk import Disk
from millstream.log.file_log import FileLog
from millstream.server.app import Application
from millstream.server.housekeeping import Housekeeping
from millstream.server.limits import HttpLimits, ReadLimits
from millstream.server.native import NativeServer
from millstream.shard.flusher import FlushLimits
from millstream.shard.shard import Shard
from millstream.tiers.blobs import Blobs
from millstream.tiers.catalog import Catalog
from millstream.tiers.cold import ColdTier
from millstream.tiers.objects import ObjectStoreSettings, open_objects

logger = logging.getLogger("millstream")


class DataDirectory:
    """The data directory, locked: no second process may write the same log."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT, 0o640)
        except OSError as error:
            raise ConfigurationError(
                f"the data directory {path} cannot be used: {error.strerror}",
                hint="choose a writable one with --data-dir",
            ) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._lock, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(self._lock)
            raise ConfigurationError(
                f"the data directory {path} is in use by another process (pid {holder})",
                hint="stop that process, or choose another directory with --data-dir",
            ) from None
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        os.close(self._lock)


class Node:
    """The parts of a server below its adapter, opened from a configuration and closed in order."""

    def __init__(self, config: Config, *, clock: Clock | None = None, disk: Disk | None = None) -> None:
        self.config = config
        clock = clock or SystemClock()
        self._directory = DataDirectory(config.server.data_dir)
        data_dir = config.server.data_dir
        try:
            log = FileLog(
                data_dir / "log",
                clock,
                segment_bytes=config.log.segment_bytes,
                block_seconds_max=config.log.sync_on_loop_max,
                disk=disk,
            )
            catalog = Catalog(data_dir / "catalog")
            objects = open_objects(object_store_settings(config))
            blobs = Blobs(objects, data_dir / "uploads")
        except OSError as error:
            raise ConfigurationError(
                f"the data directory {data_dir} cannot be used: {error}", hint="choose a writable one with --data-dir"
            ) from None
        cold = config.cold
        self.shard = Shard(
            log,
            catalog,
            ColdTier(objects, catalog, cold.cache_bytes),
            blobs,
            clock,
            hot_bytes_max=config.hot.bytes_max,
            flush_limits=FlushLimits(
                cold.flush_interval,
                cold.flush_bytes,
                # Whatever is configured: half of the memory must come free when messages move out.
                min(config.hot.keep_bytes, config.hot.bytes_max // 2),
                config.hot.bytes_max // 2,
                config.hot.resident_streams_max,
            ),
            reclaim_grace_seconds=cold.reclaim_grace,
        )
        self.app: Application | None = None

    async def start(self) -> Application:
        await self.shard.start()
        read = self.config.read
        self.app = Application(
            self.shard,
            ReadLimits(
                chunk_bytes_max=read.chunk_bytes_max,
                long_poll_seconds=read.long_poll_timeout,
                sse_lifetime_seconds=read.sse_lifetime,
                sse_heartbeat_seconds=read.sse_heartbeat,
                live_readers_max=read.live_readers_max,
                live_readers_per_stream_max=read.live_readers_per_stream_max,
                snapshot_bytes_max=read.snapshot_bytes_max,
            ),
            object_store_settings(self.config),
        )
        self.app.subscriptions.wakes.resume()
        return self.app

    async def stop(self) -> None:
        if self.app is not None:
            await self.app.subscriptions.stop()
        await self.shard.stop()
        self._directory.release()


def object_store_settings(config: Config) -> ObjectStoreSettings:
    """Where the cold tier lives; a folder is the data directory's own unless another is named."""
    cold = config.cold
    path = cold.path
    if cold.backend == "fs" and path == Path():
        path = config.server.data_dir / "cold"
    prefix = f"{cold.backend}_"
    options = {
        name.removeprefix(prefix): value
        for name, value in ((one.name, getattr(cold, one.name)) for one in fields(cold))
        if name.startswith(prefix)
    }
    return ObjectStoreSettings(cold.backend, path, options)


def open_listener(address: tuple[str, int]) -> socket.socket:
    host, port = address
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        reason = "another process listens there" if error.errno == errno.EADDRINUSE else error.strerror
        raise ConfigurationError(
            f"cannot listen on {host}:{port}: {reason}", hint="choose another address with --listen HOST:PORT"
        ) from None
    except socket.gaierror as error:
        listening.close()
        raise ConfigurationError(f"cannot listen on {host}:{port}: {error.strerror}") from None
    listening.setblocking(False)
    return listening


def _own_url(host: str, port: int) -> str:
    """How a process on this machine reaches the listener."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"


async def serve(config: Config, announce: Callable[[str], None], *, node: Node | None = None) -> None:
    """Run until SIGTERM or SIGINT, then stop in order."""
    listening = open_listener(config.server.listen)
    try:
        node = node or Node(config)
        app = await node.start()
    except BaseException:
        listening.close()
        raise
    http = config.http
    server = NativeServer(
        app,
        HttpLimits(
            header_bytes_max=http.header_bytes_max,
            body_bytes_max=http.body_bytes_max,
            connections_max=http.connections_max,
            pipelined_requests_max=http.pipelined_requests_max,
            header_timeout_seconds=http.header_timeout,
            body_timeout_seconds=http.body_timeout,
            idle_timeout_seconds=http.idle_timeout,
            send_timeout_seconds=http.send_timeout,
            write_buffer_bytes_max=http.write_buffer_bytes_max,
        ),
        public_url=config.server.public_url,
    )
    await server.start(listening)
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    for notice in node.shard.notices:
        logger.info(notice)
    host, port = listening.getsockname()[:2]
    store = object_store_settings(config)
    housekeeping = Housekeeping(
        _own_url(host, port), config.pipeline.compact_every, config.pipeline.master, store.backend, store.options
    )
    housekeeping.start()
    announce(
        f"millstream listens on http://{f'[{host}]' if ':' in host else host}:{port}, keeps its data in"
        f" {config.server.data_dir} (cold tier: {config.cold.backend}), and acknowledges after fdatasync (group commit)"
    )
    await stopped.wait()
    await housekeeping.stop()
    await server.stop(config.server.stop_timeout)
    await node.stop()
