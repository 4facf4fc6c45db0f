"""The handlers over one shard, and the choice among them by route."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from millstream.protocol.keys import StreamKey
from millstream.server.api.bucket_api import BucketApi
from millstream.server.api.cold_api import ColdApi
from millstream.server.api.compaction_api import CompactionApi
from millstream.server.api.feed_api import FeedApi
from millstream.server.api.live import LiveReaders
from millstream.server.api.responses import method_not_allowed
from millstream.server.api.routes import Kind, Route
from millstream.server.api.snapshot_api import SnapshotApi
from millstream.server.api.stream_api import StreamApi
from millstream.server.api.subscription_api import SubscriptionApi
from millstream.server.api.yjs_api import YjsApi, YjsSettings
from millstream.server.http.application import LiveReads
from millstream.server.http.limits import ReadLimits
from millstream.server.http.messages import Answer, Request, Upload
from millstream.server.http.metrics import Metrics
from millstream.shard.shard import Shard
from millstream.shard.subscription_quotas import SubscriptionSettings
from millstream.tiers.objects import ObjectStoreSettings
from millstream.yjs.names import Document

Handler = Callable[[Request, Route], Answer]

_STREAM: Final = Kind.STREAM


@dataclass(frozen=True, slots=True)
class ApiSettings:
    """The settings of the handlers, from the configuration."""

    limits: ReadLimits
    store: ObjectStoreSettings
    yjs: YjsSettings = field(default_factory=YjsSettings)
    subscriptions: SubscriptionSettings = field(default_factory=SubscriptionSettings)


class Handlers:
    def __init__(self, shard: Shard, settings: ApiSettings, metrics: Metrics) -> None:
        self.readers = LiveReaders(shard, settings.limits, metrics)
        self.subscriptions = SubscriptionApi(shard, settings.subscriptions)
        self.yjs = YjsApi(shard, self.readers, settings.yjs)
        self.cold = ColdApi(shard, settings.store)
        self._streams = StreamApi(shard, self.readers).methods
        self._snapshots = snapshots = SnapshotApi(shard, settings.limits.snapshot_bytes_max)
        buckets, feed = BucketApi(shard), FeedApi(shard, self.readers)
        self._resources: dict[Kind, dict[str, Handler]] = {
            Kind.DOCUMENT: {method: _of_document(handler) for method, handler in self.yjs.methods.items()},
            Kind.BUCKET: {
                "PUT": _of_bucket(buckets.create),
                "GET": _of_bucket(buckets.get),
                "DELETE": _of_bucket(buckets.delete),
            },
            Kind.LISTING: {"GET": _of_bucket(buckets.list_streams)},
            Kind.FEED: {"GET": _of_bucket(feed.read)},
            Kind.COLD: {"GET": _of_bucket(self.cold.describe), "POST": _of_bucket(self.cold.ask_alive)},
            Kind.BOOTSTRAP: {"GET": _of_stream(snapshots.bootstrap)},
            Kind.LATEST_SNAPSHOT: {"GET": _of_stream(snapshots.latest)},
            Kind.SNAPSHOT: {
                "PUT": _of_snapshot(snapshots.publish),
                "GET": _of_snapshot(snapshots.read),
                "DELETE": _of_snapshot(snapshots.delete),
            },
            Kind.COMPACTIONS: {"POST": _of_nothing(CompactionApi(shard).commit)},
        }

    @property
    def live_reads(self) -> LiveReads:
        return self.readers

    @property
    def methods(self) -> dict[Kind, list[str]]:
        return {
            Kind.STREAM: list(self._streams),
            Kind.CONTROL: ["GET", "PUT", "POST", "DELETE"],
            **{kind: list(methods) for kind, methods in self._resources.items()},
        }

    def set_read_limits(self, limits: ReadLimits) -> None:
        self.readers.limits = limits
        self.yjs.set_read_limits(limits)
        self._snapshots.snapshot_bytes_max = limits.snapshot_bytes_max

    def begin_upload(self) -> tuple[Upload, int]:
        return self._snapshots.begin_upload(), self._snapshots.snapshot_bytes_max

    def handle(self, request: Request, route: Route) -> Answer:
        if route.kind is _STREAM:
            assert route.key is not None
            on_stream = self._streams.get(request.method)
            if on_stream is None:
                return method_not_allowed(request.method, self._streams)
            return on_stream(request, route.key)
        if route.kind is Kind.CONTROL:
            return self.subscriptions.handle(request)
        methods = self._resources[route.kind]
        # Documents have their own HEAD handler; every other HEAD is a GET without its body.
        name = "GET" if request.method == "HEAD" and "HEAD" not in methods else request.method
        handler = methods.get(name)
        return method_not_allowed(request.method, methods) if handler is None else handler(request, route)

    async def stop(self) -> None:
        await self.subscriptions.stop()
        await self.yjs.compactor.stop()


def _of_bucket(handler: Callable[[Request, str], Answer]) -> Handler:
    return lambda request, route: handler(request, route.bucket)


def _of_stream(handler: Callable[[Request, StreamKey], Answer]) -> Handler:
    def handle(request: Request, route: Route) -> Answer:
        assert route.key is not None
        return handler(request, route.key)

    return handle


def _of_snapshot(handler: Callable[[Request, StreamKey, str], Answer]) -> Handler:
    def handle(request: Request, route: Route) -> Answer:
        assert route.key is not None
        return handler(request, route.key, route.rest)

    return handle


def _of_document(handler: Callable[[Request, Document], Answer]) -> Handler:
    def handle(request: Request, route: Route) -> Answer:
        assert route.document is not None
        return handler(request, route.document)

    return handle


def _of_nothing(handler: Callable[[Request], Answer]) -> Handler:
    return lambda request, route: handler(request)
