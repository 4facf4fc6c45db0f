"""A drill: all shards of a cluster's object store, restored read-only in one process without brokers or other nodes.

`millstream restore --read-only` creates its data directory from the store alone, while the cluster keeps running. The
drill serves what was restored, refuses writes, and cannot change anything in the store (`read_only.py`).
"""

from __future__ import annotations

import asyncio
from collections import ChainMap
from collections.abc import Callable, Sequence
from functools import partial

from millstream.clock import Clock, SystemClock
from millstream.cluster.placement import shard_of
from millstream.config import Config
from millstream.log.file_log import FileLog
from millstream.protocol.keys import decode_segment
from millstream.server.api.console_pages import open_console
from millstream.server.api.front import Front, NodeHandlers
from millstream.server.api.gate import Gate
from millstream.server.api.handlers import Handlers
from millstream.server.api.health_api import HealthApi
from millstream.server.api.metrics_api import MetricsApi
from millstream.server.api.routes import Kind, Route
from millstream.server.api.url_token_api import UrlTokenApi
from millstream.server.http.application import LiveReads
from millstream.server.http.limits import ReadLimits
from millstream.server.http.messages import Answer, Request, Upload
from millstream.server.http.metrics import Metrics
from millstream.server.node.data_directory import DataDirectory
from millstream.server.node.read_only import refusal
from millstream.server.node.settings import api_settings, object_store_settings, open_gate, shard_settings
from millstream.shard.shard import Shard
from millstream.tasks import Supervisor, end
from millstream.tiers.blobs import Blobs
from millstream.tiers.catalog import Catalog
from millstream.tiers.cold import ColdTier
from millstream.tiers.objects import open_objects

_SUBSCRIPTIONS = b"/v1/stream/__ds/subscriptions/"


class DrillBackend:
    """The handlers over each shard, and which of them a request is for."""

    def __init__(self, shards: Sequence[Shard], handlers: Sequence[Handlers]) -> None:
        self._shards = shards
        self._handlers = handlers

    @property
    def live_reads(self) -> LiveReads:
        return self

    def end_all(self) -> None:
        for handlers in self._handlers:
            handlers.readers.end_all()

    @property
    def methods(self) -> dict[Kind, list[str]]:
        return self._handlers[0].methods

    def set_read_limits(self, limits: ReadLimits) -> None:
        for handlers in self._handlers:
            handlers.set_read_limits(limits)

    def begin_upload(self) -> tuple[Upload, int]:
        return self._handlers[0].begin_upload()

    def handle(self, request: Request, route: Route) -> Answer:
        return self._handlers_for(request, route).handle(request, route)

    def _handlers_for(self, request: Request, route: Route) -> Handlers:
        if route.bucket:
            return self._handlers[shard_of(route.bucket, len(self._handlers))]
        if request.path.startswith(_SUBSCRIPTIONS):
            name = decode_segment(request.path.removeprefix(_SUBSCRIPTIONS).partition(b"/")[0])
            for shard, handlers in zip(self._shards, self._handlers, strict=True):
                if name in shard.machine.subscriptions.by_id:
                    return handlers
        return self._handlers[0]


class DrillNode:
    runs_scheduled_jobs = False

    def __init__(self, config: Config, *, clock: Clock | None = None) -> None:
        self.config = config
        self._clock = clock or SystemClock()
        self._directory = DataDirectory(config.server.data_dir)
        self._metrics = Metrics()
        self._supervisor = Supervisor()
        self._watching: asyncio.Task[None] | None = None
        self._shards: list[Shard] = []
        self._handlers: list[Handlers] = []
        self.notices = ["this server is for reading only; it changes nothing in the object store"]
        self.on_removed: Callable[[], None] = lambda: None

    async def start(self) -> Front:
        config = self.config
        for number in range(config.cluster.shards):
            shard = await asyncio.to_thread(self._open, number)
            shard.read_only(refusal())
            self._shards.append(shard)
            self._handlers.append(Handlers(shard, api_settings(config), self._metrics))
        front = self._front()
        front.logs_access = config.logging.access
        front.console = open_console(config)
        front.gate = self.open_gate(config)
        if front.gate is not None:
            watch = partial(front.gate.watch, config.auth.reload_interval)
            self._watching = self._supervisor.start("token files", watch)
        return front

    def _front(self) -> Front:
        shards, metrics = self._shards, self._metrics
        health = HealthApi(lambda: shards, self._supervisor)
        readers = [handlers.readers for handlers in self._handlers]
        url_tokens = UrlTokenApi(self._clock, shards[0].token_key, self.config.auth.url_token_max)
        node_handlers: NodeHandlers = {
            Kind.HEALTH: {"GET": health.alive},
            Kind.READINESS: {"GET": health.ready},
            Kind.CLUSTER_READINESS: {"GET": health.ready_in_cluster},
            Kind.METRICS: {"GET": MetricsApi(metrics, readers, shards, self._supervisor).expose},
            Kind.URL_TOKENS: {"POST": url_tokens.make},
            Kind.STATS: {},
            Kind.CLUSTER_COLD: {},
            Kind.CLUSTER_OPERATION: {},
        }
        return Front(DrillBackend(shards, self._handlers), node_handlers, metrics, health)

    def _open(self, number: int) -> Shard:
        config, shards = self.config, self.config.cluster.shards
        place = config.server.data_dir / "shards" / f"{number:04d}"
        catalog = Catalog(place / "catalog")
        objects = open_objects(object_store_settings(config), read_only=True)
        return Shard(
            FileLog(place / "log", self._clock),
            catalog,
            ColdTier(objects, catalog, config.cold.cache_bytes // shards),
            Blobs(objects, place / "uploads", f"{number:04d}/" if shards > 1 else ""),
            self._clock,
            shard_settings(config, shards),
            number=number,
            supervisor=self._supervisor,
        )

    def open_gate(self, config: Config) -> Gate | None:
        subscriptions = ChainMap(*(shard.machine.subscriptions.by_id for shard in self._shards))
        return open_gate(config, self._metrics, self._clock, subscriptions, self._shards[0].token_key)

    async def retire(self) -> None:
        """Nobody else could take over."""

    async def stop(self, timeout_seconds: float | None = None) -> None:
        await end(self._watching)
        for handlers, shard in zip(self._handlers, self._shards, strict=True):
            await handlers.stop()
            await shard.stop(timeout_seconds)
        self._directory.release()
