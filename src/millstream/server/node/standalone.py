"""A standalone server: data directory, log, shard, handlers and front, opened and closed in order."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from functools import partial

from millstream.clock import Clock, SystemClock
from millstream.config import Config
from millstream.errors import ConfigurationError, MillstreamError
from millstream.log.disk import Disk
from millstream.log.file_log import FileLog
from millstream.measures import ShardMeasures
from millstream.server.api.console_pages import open_console
from millstream.server.api.front import Front
from millstream.server.api.gate import Gate
from millstream.server.api.handlers import Handlers
from millstream.server.api.single_node import single_node_front
from millstream.server.http.metrics import Metrics
from millstream.server.node.data_directory import DataDirectory
from millstream.server.node.read_only import is_read_only, refusal
from millstream.server.node.settings import api_settings, object_store_settings, open_gate, shard_settings
from millstream.shard.quarantine import Quarantine
from millstream.shard.shard import Shard
from millstream.tasks import end
from millstream.tiers.blobs import Blobs
from millstream.tiers.catalog import Catalog
from millstream.tiers.cold import ColdTier
from millstream.tiers.objects import open_objects

# What a start creates in an empty data directory.
MADE_AT_START = ("log", "catalog", "uploads")


class Node:
    """The components of a server below its adapter, opened from a configuration and closed in order.

    If it is mounted in another server, that server decides where it listens.
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
        self.shard = Shard(
            log,
            catalog,
            ColdTier(objects, catalog, config.cold.cache_bytes),
            blobs,
            clock,
            shard_settings(config),
            measures=measures,
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
        self.front = front = single_node_front(
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
        """Start the shard. If the start is refused on an empty data directory, the directory is left empty: nothing was
        accepted, and `millstream restore`, which the refusal may suggest, needs it empty."""
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
        """The gate for a configuration; None if requests need no token and have no limits."""
        assert self.front is not None
        subscriptions = self.shard.machine.subscriptions.by_id
        shard, is_mounted = self.shard, self._is_mounted
        return open_gate(config, self.front.metrics, shard.clock, subscriptions, shard.token_key, is_mounted=is_mounted)

    async def retire(self) -> None:
        """There is no other node to hand over to."""

    async def stop(self, timeout_seconds: float | None = None) -> None:
        """Stop in order. A last flush that exceeds its time is abandoned: the log has everything."""
        await end(self._watching)
        if self.handlers is not None:
            await self.handlers.stop()
        await self.shard.stop(timeout_seconds)
        self._directory.release()
