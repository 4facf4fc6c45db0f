"""The application: which handler a request belongs to, and what happens when one fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec

from millstream.caches import show
from millstream.errors import InvalidRequest, MillstreamError, NotFound
from millstream.protocol.keys import (
    RESERVED_BUCKETS,
    V1_ROOT,
    StreamKey,
    decode_segment,
    parse_bucket,
    parse_bucketed,
    parse_snapshot_owner,
    plain_key_of,
    stream_key_of,
)
from millstream.server.api.bucket_api import BucketApi
from millstream.server.api.cold_api import ColdApi
from millstream.server.api.compaction_api import CompactionApi
from millstream.server.api.examples import EXAMPLES_ROOT
from millstream.server.api.feed_api import FeedApi
from millstream.server.api.front import Front
from millstream.server.api.gate import Target
from millstream.server.api.health_api import HealthApi
from millstream.server.api.live import LiveReaders
from millstream.server.api.metrics_api import MetricsApi
from millstream.server.api.single_node import ClusterOfOne
from millstream.server.api.snapshot_api import SnapshotApi
from millstream.server.api.stats_api import StatsApi
from millstream.server.api.stream_api import StreamApi
from millstream.server.api.subscription_api import SubscriptionApi
from millstream.server.api.url_token_api import URL_TOKENS, UrlTokenApi
from millstream.server.api.yjs_api import YjsApi, YjsSettings
from millstream.server.http.application import LiveReads
from millstream.server.http.error_map import defect_response, error_response, problem
from millstream.server.http.limits import ReadLimits
from millstream.server.http.messages import Request, Response, Upload
from millstream.server.http.metrics import Metrics, RouteSeries
from millstream.shard.shard import Shard
from millstream.shard.wakes import SubscriptionSettings
from millstream.tiers.objects import ObjectStoreSettings
from millstream.yjs.names import YJS_ROOT, Document, parse_document

_PREFLIGHT: Final = Response(
    204,
    b"access-control-allow-methods: GET, HEAD, PUT, POST, DELETE, OPTIONS\r\n"
    b"access-control-allow-headers: content-type, authorization, if-match, if-none-match, last-event-id, stream-seq,"
    b" stream-ttl, stream-expires-at, stream-closed, producer-id, producer-epoch, producer-seq, stream-forked-from,"
    b" stream-fork-offset, stream-fork-sub-offset\r\n"
    b"access-control-max-age: 86400\r\n",
)

PATH_BYTES_CACHED_MAX: Final = 512
ROUTES_CACHED_MAX: Final = 4096
_CONTROL_ROOT: Final = V1_ROOT + b"__ds"
_CONTROL_FOLDER: Final = _CONTROL_ROOT + b"/"
_OF_BUCKETS: Final = ("bucket", "listing", "feed", "cold")
# What operators ask of a node: in a cluster `cluster_admin.py` answers, on a single server `single_node.py`.
CLUSTER_OPERATION: Final = "cluster operation"
_OPERATIONS: Final[dict[tuple[str, ...], str]] = {
    ("healthz",): "health",
    ("readyz", "local"): "readiness",
    ("readyz", "cluster"): "cluster readiness",
    ("metrics",): "metrics",
    ("v1", "tokens"): URL_TOKENS,
    ("cluster", "hot-cold-stats"): "stats",
    ("cluster", "cold"): "cluster cold",
    ("cluster", "compactions"): "compactions",
    **dict.fromkeys(
        [("cluster", name) for name in ("status", "transfer-leader", "trigger-snapshot", "purge-log", "members")],
        CLUSTER_OPERATION,
    ),
}

# The pages for browsers, and the root, which leads there.
CONSOLE: Final = "console"

Handler = Callable[..., None]


class Route(msgspec.Struct, frozen=True, gc=False):
    """What a path names: a kind of resource, and what identifies it among its kind."""

    kind: str
    arguments: tuple[Any, ...] = ()
    key: StreamKey | None = None


# All are forgotten when there are too many: to forget the oldest costs each path that is new more than the path itself.
_routes: dict[bytes, Route] = {}
show("routes", _routes, ROUTES_CACHED_MAX)


def route(path: bytes) -> Route:
    found = _routes.get(path)
    if found is None:
        found = _route(path)
        # A longer path can name nothing: three bytes for each of a key's, percent-encoded, and what surrounds it.
        if len(path) <= PATH_BYTES_CACHED_MAX:
            if len(_routes) == ROUTES_CACHED_MAX:
                _routes.clear()
            _routes[path] = found
    return found


def _route(path: bytes) -> Route:
    if path.startswith(V1_ROOT):
        if path == _CONTROL_ROOT or path.startswith(_CONTROL_FOLDER):
            return Route("control")
        return Route("stream", (), stream_key_of(path))
    if path.startswith(YJS_ROOT):
        return Route("yjs", (parse_document(path),))
    segments = [decode_segment(segment) for segment in path.removeprefix(b"/").split(b"/")]
    head, *rest = segments
    if head in RESERVED_BUCKETS or not head:
        return _operation(segments)
    match rest:
        case []:
            return Route("bucket", (parse_bucket(head),))
        case ["streams"]:
            return Route("listing", (parse_bucket(head),))
        case ["streams", "cold"]:
            return Route("cold", (parse_bucket(head),))
        case ["streams", "feed"]:
            return Route("feed", (parse_bucket(head),))
        case [stream]:
            return Route("stream", key=parse_bucketed(head, stream))
        case [stream, "bootstrap"]:
            return Route("bootstrap", (parse_snapshot_owner(head, stream),))
        case [stream, "snapshot"]:
            return Route("latest snapshot", (parse_snapshot_owner(head, stream),))
        case [stream, "snapshot", offset]:
            return Route("snapshot", (parse_snapshot_owner(head, stream), offset))
    raise InvalidRequest("the path names nothing this server has", code="invalid_path", hint="see the API overview")


def _operation(segments: list[str]) -> Route:
    """What is at a path whose first segment can be no bucket's."""
    head = segments[0]
    if head == CONSOLE or segments == [""]:
        return Route(CONSOLE, (head,))
    kind = _OPERATIONS.get(tuple(segments), "reserved")
    return Route(kind, (head,) if kind == "reserved" else ())


def target_of(path: bytes) -> Target:
    """What a path is about, for those who ask whether it is allowed."""
    found = route(path)
    named = found.key or (found.arguments[0] if found.arguments else None)
    if isinstance(named, Document):  # its awareness streams are its own as well
        named = named.key
    if isinstance(named, StreamKey):
        return Target(found.kind, named, named.bucket)
    return Target(found.kind, None, named if found.kind in _OF_BUCKETS else None)


class Application(Front):
    def __init__(
        self,
        shard: Shard,
        limits: ReadLimits,
        store: ObjectStoreSettings,
        yjs: YjsSettings | None = None,
        subscriptions: SubscriptionSettings | None = None,
        *,
        metrics: Metrics | None = None,
        url_token_seconds_max: float = 3600,
    ) -> None:
        super().__init__(target_of, metrics or Metrics(), HealthApi(lambda: [shard], shard.supervisor))
        self.readers = LiveReaders(shard, limits, self.metrics)
        self.subscriptions = SubscriptionApi(shard, subscriptions or SubscriptionSettings())
        self.yjs = YjsApi(shard, self.readers, yjs or YjsSettings())
        # Each with the series its requests are measured in.
        self._stream_methods: dict[str, tuple[Handler, RouteSeries]] = {
            method: (handler, self.metrics.series(method, "stream"))
            for method, handler in StreamApi(shard, self.readers).methods.items()
        }
        self._cluster = ClusterOfOne(shard, self.health)
        self._snapshots = SnapshotApi(shard, limits.snapshot_bytes_max)
        buckets = BucketApi(shard)
        feed = FeedApi(shard, self.readers)
        self.cold = cold = ColdApi(shard, store)
        self._resources: dict[str, dict[str, Handler]] = {
            "health": {"GET": self.health.alive},
            "readiness": {"GET": self.health.ready},
            "cluster readiness": {"GET": self.health.ready_in_cluster},
            "metrics": {"GET": MetricsApi(self.metrics, [self.readers], [shard], shard.supervisor).expose},
            "stats": {"GET": StatsApi(shard).hot_and_cold},
            "compactions": {"POST": CompactionApi(shard).commit},
            "cluster cold": {"GET": cold.describe_all},
            URL_TOKENS: {"POST": UrlTokenApi(shard, url_token_seconds_max).make},
            "bucket": {"PUT": buckets.create, "GET": buckets.get, "DELETE": buckets.delete},
            "listing": {"GET": buckets.list_streams},
            "feed": {"GET": feed.read},
            "cold": {"GET": cold.describe, "POST": cold.ask_alive},
            "bootstrap": {"GET": self._snapshots.bootstrap},
            "latest snapshot": {"GET": self._snapshots.latest},
            "snapshot": {
                "PUT": self._snapshots.publish,
                "GET": self._snapshots.read,
                "DELETE": self._snapshots.delete,
            },
        }

    @property
    def live_reads(self) -> LiveReads:
        return self.readers

    @property
    def routes(self) -> dict[str, list[str]]:
        """Every kind of resource there is, with the methods that are handled there."""
        return {
            "stream": list(self._stream_methods),
            "yjs": list(self.yjs.methods),
            "control": ["GET", "PUT", "POST", "DELETE"],
            CLUSTER_OPERATION: ["GET", "POST"],
            **{kind: list(methods) for kind, methods in self._resources.items()},
        }

    def set_read_limits(self, limits: ReadLimits) -> None:
        self.readers.limits = limits
        self.yjs.set_read_limits(limits)
        self._snapshots.snapshot_bytes_max = limits.snapshot_bytes_max

    def handle(self, request: Request) -> None:
        """Answer a request, now or later, whatever happens."""
        if request.path.startswith(YJS_ROOT):
            self.yjs.adopt(request)
        try:
            if self.examples is not None and request.path.startswith(EXAMPLES_ROOT):
                self.examples.serve(request)
                return
            if self.gate is not None:
                self.gate.admit(request, target_of)
            # To look a plain name up would take as long as to read it, and with very many streams longer.
            key = plain_key_of(request.path) or route(request.path).key
            if key is not None:
                entry = self._stream_methods.get(request.method)
                if entry is not None:
                    handler, request.series = entry
                    handler(request, key)
                    return
            self._handle_other(request, route(request.path))
        except MillstreamError as error:
            request.reply(error_response(error))
        except Exception:  # a defect is the misfortune of one request, not of its connection or the server
            request.reply(defect_response(request))

    def _handle_other(self, request: Request, found: Route) -> None:
        request.series = self.metrics.series(request.method, found.kind)
        if request.method == "OPTIONS":
            request.reply(_PREFLIGHT)
        elif found.key is not None:
            request.reply(_method_not_allowed(request.method, self._stream_methods))
        elif found.kind == "yjs":
            self._handle_document(request, found.arguments[0])
        elif found.kind == "control":
            self.subscriptions.handle(request)
        elif self.shows_console(request, found.kind):
            pass
        elif found.kind in ("reserved", CONSOLE):
            self._reserved(request, found.arguments[0])
        elif found.kind == CLUSTER_OPERATION:
            self._cluster.handle(request)
        elif found.kind in _OPERATIONS.values() and request.method == "PUT":
            self._reserved(request, "healthz")
        else:
            methods = self._resources[found.kind]
            handler = methods.get("GET" if request.method == "HEAD" else request.method)
            if handler is None:
                request.reply(_method_not_allowed(request.method, methods))
            else:
                handler(request, *found.arguments)

    def _handle_document(self, request: Request, document: Document) -> None:
        handler = self.yjs.methods.get(request.method)
        if handler is None:
            request.reply(_method_not_allowed(request.method, self.yjs.methods))
        else:
            handler(request, document)

    def upload_for(self, method: str, target: bytes, body_bytes_max: int) -> tuple[Upload | None, int]:
        """Where a request's body should go while it arrives, if not into memory; and how large it may be."""
        if method == "PUT" and not target.startswith(V1_ROOT):
            try:
                if route(target.partition(b"?")[0]).kind == "snapshot":
                    return self._snapshots.begin_upload(), self._snapshots.snapshot_bytes_max
            except InvalidRequest:
                pass  # it will be refused as any other request to such a path
        return None, body_bytes_max

    @staticmethod
    def _reserved(request: Request, head: str) -> None:
        """A path that can never be a bucket's, and at which there is nothing."""
        if head == "v1":
            raise InvalidRequest("the path names no stream", code="invalid_path", hint="use /v1/stream/{path}")
        if request.method not in ("GET", "HEAD"):
            raise InvalidRequest(f"{head!r} is a reserved name", code="invalid_bucket")
        raise NotFound(
            "there is nothing at this path",
            code="not_found",
            hint="streams are at /v1/stream/{path} and /{bucket}/{stream}",
        )


def _method_not_allowed(method: str, methods: dict[str, Any]) -> Response:
    allowed = ", ".join([*methods, "HEAD", "OPTIONS"] if "HEAD" not in methods else [*methods, "OPTIONS"])
    fields = b"allow: %b\r\n" % allowed.encode()
    return problem(405, "method_not_allowed", f"{method} is not possible here", fields=fields)
