"""Routes: what a path names. The front routes each request once and passes the route on."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import msgspec

from millstream.caches import show
from millstream.errors import InvalidRequest
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
from millstream.yjs.names import YJS_ROOT, Document, parse_document

PATH_BYTES_CACHED_MAX: Final = 512
ROUTES_CACHED_MAX: Final = 4096
_CONTROL_ROOT: Final = V1_ROOT + b"__ds"
_CONTROL_FOLDER: Final = _CONTROL_ROOT + b"/"


class Kind(StrEnum):
    """Kinds of resources; the values are the routes' names in metrics."""

    STREAM = "stream"
    BOOTSTRAP = "bootstrap"
    LATEST_SNAPSHOT = "latest snapshot"
    SNAPSHOT = "snapshot"
    BUCKET = "bucket"
    LISTING = "listing"
    FEED = "feed"
    COLD = "cold"
    DOCUMENT = "yjs"
    CONTROL = "control"
    COMPACTIONS = "compactions"
    # Resources of the node itself.
    HEALTH = "health"
    READINESS = "readiness"
    CLUSTER_READINESS = "cluster readiness"
    METRICS = "metrics"
    STATS = "stats"
    CLUSTER_COLD = "cluster cold"
    CLUSTER_OPERATION = "cluster operation"
    URL_TOKENS = "url tokens"
    CONSOLE = "console"
    # Paths that name no resource.
    RESERVED = "reserved"
    INVALID = "invalid"


class Route(msgspec.Struct, frozen=True, gc=False):
    """A kind of resource, and what identifies one of them."""

    kind: Kind
    # The stream that is named or that the resource belongs to: of a document, of a snapshot.
    key: StreamKey | None = None
    bucket: str = ""
    document: Document | None = None
    # The offset of a snapshot, as written in the path; or the first segment of a reserved path.
    rest: str = ""
    # Why the path can name nothing: message, code and hint. Not the error itself: its frames hold the request and this
    # route, which the garbage collector does not look at.
    refusal: tuple[str, str, str | None] | None = None

    def check(self) -> None:
        """Refuse a path that can name nothing."""
        if self.refusal is not None:
            message, code, hint = self.refusal
            raise InvalidRequest(message, code=code, hint=hint)


_STREAM: Final = Kind.STREAM
_OPERATIONS: Final[dict[tuple[str, ...], Kind]] = {
    ("healthz",): Kind.HEALTH,
    ("readyz", "local"): Kind.READINESS,
    ("readyz", "cluster"): Kind.CLUSTER_READINESS,
    ("metrics",): Kind.METRICS,
    ("v1", "tokens"): Kind.URL_TOKENS,
    ("cluster", "hot-cold-stats"): Kind.STATS,
    ("cluster", "cold"): Kind.CLUSTER_COLD,
    ("cluster", "compactions"): Kind.COMPACTIONS,
    **dict.fromkeys(
        [("cluster", name) for name in ("status", "transfer-leader", "trigger-snapshot", "purge-log", "members")],
        Kind.CLUSTER_OPERATION,
    ),
}
OPERATIONS: Final = frozenset(_OPERATIONS.values())

# Cleared when full: evicting the oldest entry would cost each new path more than parsing it.
_routes: dict[bytes, Route] = {}
show("routes", _routes, ROUTES_CACHED_MAX)


def route_of(path: bytes) -> Route:
    """What a path names. For an invalid path the route holds the error, which is raised later, after the gate."""
    # Parsing a plain name takes no longer than a lookup, and less time if there are very many streams.
    key = plain_key_of(path)
    if key is not None:
        return Route(_STREAM, key, key.bucket)
    found = _routes.get(path)
    if found is not None:
        return found
    try:
        found = _route(path)
    except InvalidRequest as error:
        return Route(Kind.INVALID, refusal=(error.message, error.code, error.hint))
    # A longer path cannot name anything: a key's bytes percent-encoded take three each, plus the rest of the path.
    if len(path) <= PATH_BYTES_CACHED_MAX:
        if len(_routes) == ROUTES_CACHED_MAX:
            _routes.clear()
        _routes[path] = found
    return found


def _route(path: bytes) -> Route:
    if path.startswith(V1_ROOT):
        if path == _CONTROL_ROOT or path.startswith(_CONTROL_FOLDER):
            return Route(Kind.CONTROL)
        return _of_stream(Kind.STREAM, stream_key_of(path))
    if path.startswith(YJS_ROOT):
        document = parse_document(path)
        return Route(Kind.DOCUMENT, document.key, document.key.bucket, document)
    segments = [decode_segment(segment) for segment in path.removeprefix(b"/").split(b"/")]
    head, *rest = segments
    if head in RESERVED_BUCKETS or not head:
        return _operation(segments)
    match rest:
        case []:
            return Route(Kind.BUCKET, bucket=parse_bucket(head))
        case ["streams"]:
            return Route(Kind.LISTING, bucket=parse_bucket(head))
        case ["streams", "cold"]:
            return Route(Kind.COLD, bucket=parse_bucket(head))
        case ["streams", "feed"]:
            return Route(Kind.FEED, bucket=parse_bucket(head))
        case [stream]:
            return _of_stream(Kind.STREAM, parse_bucketed(head, stream))
        case [stream, "bootstrap"]:
            return _of_stream(Kind.BOOTSTRAP, parse_snapshot_owner(head, stream))
        case [stream, "snapshot"]:
            return _of_stream(Kind.LATEST_SNAPSHOT, parse_snapshot_owner(head, stream))
        case [stream, "snapshot", offset]:
            return _of_stream(Kind.SNAPSHOT, parse_snapshot_owner(head, stream), offset)
    raise InvalidRequest("the path names nothing this server has", code="invalid_path", hint="see the API overview")


def _of_stream(kind: Kind, key: StreamKey, rest: str = "") -> Route:
    return Route(kind, key, key.bucket, rest=rest)


def _operation(segments: list[str]) -> Route:
    """The resource at a path whose first segment cannot be a bucket's name."""
    head = segments[0]
    if head == Kind.CONSOLE or segments == [""]:
        return Route(Kind.CONSOLE, rest=head)
    return Route(_OPERATIONS.get(tuple(segments), Kind.RESERVED), rest=head)
