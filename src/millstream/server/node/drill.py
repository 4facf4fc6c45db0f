"""A drill: every shard of a cluster's store, restored for reading only, in one process without brokers or other nodes.

`millstream restore --read-only` has made its data directory from the store alone, beside the cluster that runs. It
serves what was restored, refuses writes, and has no way to change anything in the store (`read_only.py`).
"""

from __future__ import annotations

import asyncio
from collections import ChainMap
from collections.abc import Callable, Sequence
from functools import partial

from millstream.clock import Clock, SystemClock
from millstream.cluster.placement import shard_of
from millstream.config import Config
from millstream.errors import MillstreamError
from millstream.log.file_log import FileLog
from millstream.protocol.keys import StreamKey, decode_segment
from millstream.server.api.app import Application, Route, route, target_of
from millstream.server.api.console_pages import open_console
from millstream.server.api.front import Front
from millstream.server.api.gate import Gate
from millstream.server.api.health_api import HealthApi
from millstream.server.api.live import LiveReaders
from millstream.server.api.metrics_api import MetricsApi
from millstream.server.api.yjs_api import YjsApi
from millstream.server.http.error_map import defect_response, error_response
from millstream.server.http.limits import ReadLimits, read_limits
from millstream.server.http.messages import Request, Upload
from millstream.server.http.metrics import Metrics
from millstream.server.node.read_only import refusal
from millstream.server.node.run import (
    DataDirectory,
    flush_limits,
    object_store_settings,
    open_gate,
    stream_limits,
    subscription_settings,
    yjs_settings,
)
from millstream.shard.shard import Shard
from millstream.tasks import Supervisor, end
from millstream.tiers.blobs import Blobs
from millstream.tiers.catalog import Catalog
from millstream.tiers.cold import ColdTier
from millstream.tiers.objects import open_objects
from millstream.yjs.names import YJS_ROOT, Document

_SUBSCRIPTIONS = b"/v1/stream/__ds/subscriptions/"


class DrillApplication(Front):
    """The handlers over each shard, and which of them a request is for."""

    def __init__(self, shards: Sequence[Shard], apps: Sequence[Application], metrics: Metrics) -> None:
        supervisor = shards[0].supervisor
        super().__init__(target_of, metrics, HealthApi(lambda: shards, supervisor))
        self._shards = shards
        self._apps = apps
        self._readers = _AllReaders([app.readers for app in apps])
        self._of_the_server: dict[str, Callable[[Request], None]] = {
            "health": self.health.alive,
            "readiness": self.health.ready,
            "cluster readiness": self.health.ready_in_cluster,
            "metrics": MetricsApi(metrics, [app.readers for app in apps], shards, supervisor).expose,
        }

    @property
    def live_reads(self) -> _AllReaders:
        return self._readers

    def set_read_limits(self, limits: ReadLimits) -> None:
        for app in self._apps:
            app.set_read_limits(limits)

    def upload_for(self, method: str, target: bytes, body_bytes_max: int) -> tuple[Upload | None, int]:
        return self._apps[0].upload_for(method, target, body_bytes_max)

    def handle(self, request: Request) -> None:
        if request.path.startswith(YJS_ROOT):
            YjsApi.adopt(request)
        try:
            if self.gate is not None:
                self.gate.admit(request, target_of)
            found = route(request.path)
            if self.shows_console(request, found.kind):
                return
            handler = self._of_the_server.get(found.kind) if request.method in ("GET", "HEAD") else None
            if handler is not None:
                request.series = self.metrics.series(request.method, found.kind)
                handler(request)
            else:
                self._app_of(request, found).handle(request)
        except MillstreamError as error:
            request.reply(error_response(error))
        except Exception:  # a defect is the misfortune of one request, not of its connection or the server
            request.reply(defect_response(request))

    def _app_of(self, request: Request, found: Route) -> Application:
        named = found.key or (found.arguments[0] if found.arguments else None)
        if isinstance(named, Document):
            named = named.key
        if isinstance(named, StreamKey):
            named = named.bucket
        if isinstance(named, str):
            return self._apps[shard_of(named, len(self._apps))]
        if request.path.startswith(_SUBSCRIPTIONS):
            name = decode_segment(request.path.removeprefix(_SUBSCRIPTIONS).partition(b"/")[0])
            for shard, app in zip(self._shards, self._apps, strict=True):
                if name in shard.machine.subscriptions.by_id:
                    return app
        return self._apps[0]


class _AllReaders:
    """The live readers of every shard."""

    def __init__(self, readers: Sequence[LiveReaders]) -> None:
        self._readers = readers

    def end_all(self) -> None:
        for one in self._readers:
            one.end_all()


class DrillNode:
    keeps_house = False

    def __init__(self, config: Config, *, clock: Clock | None = None) -> None:
        self.config = config
        self._clock = clock or SystemClock()
        self._directory = DataDirectory(config.server.data_dir)
        self._metrics = Metrics()
        self._supervisor = Supervisor()
        self._watching: asyncio.Task[None] | None = None
        self._shards: list[Shard] = []
        self._apps: list[Application] = []
        self.notices = ["this server is for reading only; it changes nothing in the object store"]
        self.on_removed: Callable[[], None] = lambda: None

    async def start(self) -> DrillApplication:
        config = self.config
        for number in range(config.cluster.shards):
            shard = await asyncio.to_thread(self._open, number)
            shard.read_only(refusal())
            self._shards.append(shard)
            self._apps.append(
                Application(
                    shard,
                    read_limits(config),
                    object_store_settings(config),
                    yjs_settings(config),
                    subscription_settings(config),
                    metrics=self._metrics,
                    url_token_seconds_max=config.auth.url_token_max,
                )
            )
        app = DrillApplication(self._shards, self._apps, self._metrics)
        app.logs_access = config.logging.access
        app.console = open_console(config)
        app.gate = self.open_gate(config)
        if app.gate is not None:
            self._watching = self._supervisor.start("token files", partial(app.gate.watch, config.auth.reload_interval))
        return app

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
            hot_bytes_max=config.hot.bytes_max // shards,
            flush_limits=flush_limits(config, shards),
            reclaim_grace_seconds=config.cold.reclaim_grace,
            number=number,
            supervisor=self._supervisor,
            stream_limits=stream_limits(config),
        )

    def open_gate(self, config: Config) -> Gate | None:
        subscriptions = ChainMap(*(shard.machine.subscriptions.by_id for shard in self._shards))
        return open_gate(config, self._metrics, self._clock, subscriptions, self._shards[0].token_key)

    async def retire(self) -> None:
        """Nobody else could take over."""

    async def stop(self, timeout_seconds: float | None = None) -> None:
        await end(self._watching)
        for app, shard in zip(self._apps, self._shards, strict=True):
            await app.subscriptions.stop()
            await app.yjs.compactor.stop()
            await shard.stop(timeout_seconds)
        self._directory.release()
