"""A whole server in one process: data directory, shard, application, listener, signals."""

from __future__ import annotations

import asyncio
import errno
import faulthandler
import fcntl
import logging
import math
import os
import shutil
import signal
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Protocol

from millstream.access.authenticator import Authenticator, auth_settings
from millstream.access.exposure import check_exposure, is_loopback_host
from millstream.clock import Clock, SystemClock
from millstream.config import Config
from millstream.descriptors import Descriptor
from millstream.errors import ConfigurationError, MillstreamError
from millstream.log.disk import Disk
from millstream.log.file_log import FileLog
from millstream.measures import ShardMeasures
from millstream.protocol.webhook_targets import NO_PRIVATE_TARGETS, THIS_MACHINE
from millstream.server.api.console_pages import open_console
from millstream.server.api.examples import Examples
from millstream.server.api.front import Front
from millstream.server.api.gate import Gate
from millstream.server.api.handlers import ApiSettings, Handlers
from millstream.server.api.single_node import front_of_one
from millstream.server.api.yjs_api import YjsSettings
from millstream.server.http.limits import http_limits, read_limits, trusted_proxies
from millstream.server.http.metrics import Metrics
from millstream.server.http.native import NativeServer
from millstream.server.http.tls import tls_context
from millstream.server.node.read_only import is_read_only, refusal
from millstream.server.node.reload import Reloader
from millstream.server.node.scheduled_jobs import ScheduledJobs
from millstream.shard.budget import STREAM_BYTES
from millstream.shard.flush.limits import FlushLimits
from millstream.shard.quarantine import Quarantine
from millstream.shard.scrub import ScrubLimits
from millstream.shard.shard import Shard
from millstream.shard.subscription_quotas import SubscriptionSettings
from millstream.streams.limits import StreamLimits
from millstream.streams.subscriptions import Subscription
from millstream.tasks import end
from millstream.tiers.blobs import Blobs
from millstream.tiers.catalog import Catalog
from millstream.tiers.cold import ColdTier
from millstream.tiers.objects import ObjectStoreSettings, open_objects
from millstream.yjs.compaction import CompactionLimits, is_possible

logger = logging.getLogger("millstream")

# Of the time a stop may take: for others to take over, and for requests. The rest is for the last flush.
RETIRE_SHARE = 0.6
REQUESTS_SHARE = 0.5
# A stop that takes so much longer than it may waits for something that does not answer.
FORCE_SECONDS = 2.0
# What a start makes in an empty data directory.
MADE_AT_START = ("log", "catalog", "uploads")


class DataDirectory:
    """The data directory, locked: no second process may write the same log."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = Descriptor(path / "lock", os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise ConfigurationError(
                f"the data directory {path} cannot be used: {error.strerror}",
                hint="choose a writable one with --data-dir",
            ) from None
        try:
            fcntl.flock(self._lock.number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._lock.number, 32, 0).decode(errors="replace").strip() or "unknown"
            self._lock.close()
            raise ConfigurationError(
                f"the data directory {path} is in use by another process (pid {holder})",
                hint="stop that process, or choose another directory with --data-dir",
            ) from None
        os.ftruncate(self._lock.number, 0)
        os.pwrite(self._lock.number, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Let others have it; harmless if that has happened."""
        self._lock.close()


class Node:
    """The parts of a server below its adapter, opened from a configuration and closed in order.

    One that is mounted in another server hears from wherever that one listens.
    """

    def __init__(
        self, config: Config, *, clock: Clock | None = None, disk: Disk | None = None, is_mounted: bool = False
    ) -> None:
        if config.cluster.name:
            raise ConfigurationError(
                "cluster.name is set, but this is not a node of a cluster",
                hint="start nodes of a cluster with `millstream serve`",
            )
        self.config = config
        self._is_mounted = is_mounted
        clock = clock or SystemClock()
        self._directory = DataDirectory(config.server.data_dir)
        data_dir = config.server.data_dir
        self._is_new = not any((data_dir / name).exists() for name in MADE_AT_START)
        try:
            measures = ShardMeasures()
            log = FileLog(
                data_dir / "log",
                clock,
                segment_bytes=config.log.segment_bytes,
                block_seconds_max=config.log.sync_on_loop_max,
                disk=disk,
                sync_seconds=measures.sync_seconds,
            )
            catalog = Catalog(data_dir / "catalog")
            self._is_read_only = config.server.read_only or is_read_only(data_dir)
            objects = open_objects(object_store_settings(config), read_only=self._is_read_only)
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
            flush_limits=flush_limits(config),
            reclaim_grace_seconds=cold.reclaim_grace,
            leftover_age_seconds=cold.leftover_age,
            may_take_over=cold.take_over,
            scrub_limits=ScrubLimits(cold.scrub_bytes_per_second, cold.scrub_interval),
            measures=measures,
            stream_limits=stream_limits(config),
            stuck_seconds_max=config.log.stuck_after,
            quarantine=Quarantine(data_dir / "quarantine"),
        )
        self.front: Front | None = None
        self.handlers: Handlers | None = None
        self._watching: asyncio.Task[None] | None = None
        self.on_removed: Callable[[], None] = lambda: None

    @property
    def notices(self) -> list[str]:
        return self.shard.notices

    @property
    def runs_scheduled_jobs(self) -> bool:
        return not self._is_read_only

    async def start(self) -> Front:
        if self._is_read_only:
            self.shard.read_only(refusal())
            self.notices.append("this server is for reading only; it changes nothing in the object store")
        else:
            await self._start_shard()
        config = self.config
        metrics = Metrics()
        self.handlers = handlers = Handlers(self.shard, api_settings(config), metrics)
        self.front = front = front_of_one(
            self.shard, handlers, metrics, url_token_seconds_max=config.auth.url_token_max
        )
        front.logs_access = config.logging.access
        front.console = open_console(config, is_mounted=self._is_mounted)
        front.gate = self.open_gate(config)
        if front.gate is not None:
            watch = partial(front.gate.watch, config.auth.reload_interval)
            self._watching = front.supervisor.start("token files", watch)
        if not self._is_read_only:
            handlers.subscriptions.wakes.resume()
        return front

    async def _start_shard(self) -> None:
        """Start the shard. A start that is refused on an empty data directory leaves it empty: nothing was accepted,
        and `millstream restore`, which the refusal may ask for, wants it so."""
        try:
            await self.shard.start()
        except MillstreamError as refusal:
            self.shard.committer.refuse(refusal)
            await self.shard.stop()
            if self._is_new:
                for name in MADE_AT_START:
                    shutil.rmtree(self.config.server.data_dir / name, ignore_errors=True)
            self._directory.release()
            raise

    def open_gate(self, config: Config) -> Gate | None:
        """The gate that a configuration asks for; none if requests need no token and have no limits."""
        assert self.front is not None
        subscriptions = self.shard.machine.subscriptions.by_id
        shard, is_mounted = self.shard, self._is_mounted
        return open_gate(config, self.front.metrics, shard.clock, subscriptions, shard.token_key, is_mounted=is_mounted)

    async def retire(self) -> None:
        """Nobody else could take over."""

    async def stop(self, timeout_seconds: float | None = None) -> None:
        """Stop in order. A last flush that takes longer than allowed is given up: the log has everything."""
        await end(self._watching)
        if self.handlers is not None:
            await self.handlers.stop()
        await self.shard.stop(timeout_seconds)
        self._directory.release()


class Served(Protocol):
    """What is served: a server of its own, or a node of a cluster."""

    on_removed: Callable[[], None]

    @property
    def notices(self) -> list[str]: ...

    @property
    def runs_scheduled_jobs(self) -> bool:
        """Whether scheduled jobs are this node's to start."""
        ...

    async def start(self) -> Front: ...

    def open_gate(self, config: Config) -> Gate | None: ...

    async def retire(self) -> None:
        """Let others take over before connections are closed."""
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


def open_gate(
    config: Config,
    metrics: Metrics,
    clock: Clock,
    subscriptions: Mapping[str, Subscription],
    token_key: Callable[[], bytes | None],
    *,
    is_mounted: bool = False,
) -> Gate | None:
    """The gate that a configuration asks for; none if requests need no token and have no limits."""
    authenticator = Authenticator(auth_settings(config), clock) if config.auth.enabled else None
    if authenticator is None and not _limits_addresses(config, is_mounted=is_mounted):
        return None
    return Gate(
        authenticator,
        config.limits,
        metrics,
        clock,
        subscriptions,
        token_key,
        open_metrics=config.auth.open_metrics,
        trusted_proxies=trusted_proxies(config),
    )


def _limits_addresses(config: Config, *, is_mounted: bool) -> bool:
    """Whether any address that may come has a limit; on loopback without a proxy none does by default."""
    limits = config.limits
    if not (limits.address_requests_per_second or limits.address_bytes_per_second or limits.address_live_max):
        return False
    is_reached_from_here_only = (
        is_loopback_host(config.server.listen[0]) and not trusted_proxies(config) and not is_mounted
    )
    return not (limits.exempt_loopback and is_reached_from_here_only)


def flush_limits(config: Config, shards: int = 1) -> FlushLimits:
    """When to flush; several shards share the memory."""
    cold, hot_bytes_max = config.cold, config.hot.bytes_max // shards
    return FlushLimits(
        cold.flush_interval,
        cold.flush_bytes,
        # Whatever is configured: half of the memory must come free when messages move out.
        min(config.hot.keep_bytes // shards, hot_bytes_max // 2),
        hot_bytes_max // 2,
        # The same for streams: those that are only read from must leave room for those that change.
        max(1, min(config.hot.resident_streams_max // shards, hot_bytes_max // 4 // STREAM_BYTES)),
    )


def stream_limits(config: Config) -> StreamLimits:
    streams, expiry = config.streams, config.streams.producer_expiry
    return StreamLimits(
        streams.fork_depth_max,
        streams.append_messages_max,
        streams.producers_max,
        None if expiry is None else int(expiry * 1000),
    )


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


def api_settings(config: Config) -> ApiSettings:
    return ApiSettings(
        read_limits(config), object_store_settings(config), yjs_settings(config), subscription_settings(config)
    )


def yjs_settings(config: Config) -> YjsSettings:
    yjs = config.yjs
    return YjsSettings(
        implicit_create=yjs.implicit_create,
        awareness_ttl_seconds=math.ceil(yjs.awareness_ttl),
        long_poll_seconds=yjs.long_poll_timeout,
        compaction=CompactionLimits(
            yjs.compaction_threshold, yjs.retention, config.read.snapshot_bytes_max, yjs.merging_bytes_max
        ),
    )


def subscription_settings(config: Config) -> SubscriptionSettings:
    section = config.subscriptions
    private_targets = section.private_targets
    if private_targets is None:
        is_local = not config.auth.enabled and is_loopback_host(config.server.listen[0])
        private_targets = THIS_MACHINE if is_local else NO_PRIVATE_TARGETS
    limits = {one.name: getattr(section, one.name) for one in fields(section) if one.name != "private_targets"}
    return SubscriptionSettings(private_targets, **limits)


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
    """End the process after so long, whatever it still waits for: a disk, a broker or a thread that does not answer.

    What was acknowledged is in the log, and a start after a crash is no different. The timer has a thread of its own,
    which outlasts the loop: when the interpreter ends it waits for other threads.
    """

    def end() -> None:
        logger.critical("the stop has taken %.0f s and is ended by force; the log keeps everything", seconds)
        faulthandler.dump_traceback(all_threads=True)
        os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()


def _own_url(host: str, port: int) -> str:
    """How a process on this machine reaches the listener."""
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
    """Run until SIGTERM or SIGINT, then stop in order. SIGHUP takes in what `load` then finds."""
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
    loop = asyncio.get_running_loop()
    reloader = Reloader(config, load or (lambda: config), node.open_gate, app, server)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    node.on_removed = stopped.set
    loop.add_signal_handler(signal.SIGHUP, reloader.reload)
    for notice in node.notices:
        logger.info(notice)
    if warning is not None:
        logger.warning(warning)
    if not is_possible():
        logger.info("Yjs documents are served but not compacted: pycrdt is missing, pip install 'millstream[yjs]'")
    host, port = listening.getsockname()[:2]
    store = object_store_settings(config)
    scheduled_jobs = ScheduledJobs(
        config.server.public_url or _own_url(host, port),
        config.pipeline.compact_every,
        config.pipeline.master,
        store.backend,
        store.options,
        app.supervisor,
    )
    scheduled_jobs.is_ours = lambda: node.runs_scheduled_jobs
    scheduled_jobs.start()
    announce(
        f"millstream listens on http{'s' if tls is not None else ''}://{f'[{host}]' if ':' in host else host}:{port},"
        f" keeps its data in {config.server.data_dir} (cold tier: {config.cold.backend}), and acknowledges after"
        " fdatasync (group commit)"
    )
    for path in pages.paths if pages is not None else []:
        announce(f"an example to try: http://{f'[{host}]' if ':' in host else host}:{port}{path}")
    await stopped.wait()
    deadline = loop.time() + config.server.stop_timeout
    end_by_force(config.server.stop_timeout + FORCE_SECONDS)
    logger.info("stopping: no more connections, requests finish, live reads end")
    app.health.is_stopping = True
    await scheduled_jobs.stop()
    try:
        async with asyncio.timeout(config.server.stop_timeout * RETIRE_SHARE):
            await node.retire()
    except TimeoutError:
        logger.warning("nobody has taken over in time; the others will when they miss this node")
    await server.stop(min(config.server.stop_timeout * REQUESTS_SHARE, max(deadline - loop.time(), 0.0)))
    await node.stop(max(deadline - loop.time(), 0.0))
    logger.info("stopped")
