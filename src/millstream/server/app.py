"""The application: which handler a request belongs to, and what happens when one fails."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import lru_cache
from typing import Final, NamedTuple

from millstream import __version__
from millstream.errors import InvalidRequest, MillstreamError
from millstream.protocol.keys import StreamKey, decode_segment, parse_v1_path
from millstream.server.error_map import error_response, problem
from millstream.server.limits import ReadLimits
from millstream.server.live import LiveReaders
from millstream.server.messages import Request, Response
from millstream.server.stream_api import StreamApi
from millstream.server.subscription_api import SubscriptionApi
from millstream.shard.shard import Shard

logger = logging.getLogger("millstream.server")

_PREFLIGHT: Final = Response(
    204,
    b"access-control-allow-methods: GET, HEAD, PUT, POST, DELETE, OPTIONS\r\n"
    b"access-control-allow-headers: content-type, authorization, if-match, if-none-match, stream-seq, stream-ttl,"
    b" stream-expires-at, stream-closed, producer-id, producer-epoch, producer-seq, stream-forked-from,"
    b" stream-fork-offset, stream-fork-sub-offset\r\n"
    b"access-control-max-age: 86400\r\n",
)

_STREAM_ROOT: Final = b"/v1/stream/"
_CONTROL_ROOT: Final = b"/v1/stream/__ds"


class Route(NamedTuple):
    """What a path names: a stream, or one of the other resources by name."""

    key: StreamKey | None
    resource: str = "stream"


@lru_cache(maxsize=65_536)
def route(path: bytes) -> Route:
    if path.startswith(_STREAM_ROOT):
        if path.startswith(_CONTROL_ROOT) and path[len(_CONTROL_ROOT) : len(_CONTROL_ROOT) + 1] in (
            b"",
            b"/",
        ):
            return Route(None, "control")
        return Route(parse_v1_path(decode_segment(path[len(_STREAM_ROOT) :])))
    if path == b"/healthz":
        return Route(None, "health")
    return Route(None, "none")


class Application:
    def __init__(self, shard: Shard, limits: ReadLimits) -> None:
        self.readers = LiveReaders(shard, limits)
        self._streams = StreamApi(shard, self.readers)
        self.subscriptions = SubscriptionApi(shard)
        self._stream_methods = self._streams.methods
        self._resources: dict[str, Callable[[Request], None]] = {
            "health": self._health,
            "control": self.subscriptions.handle,
            "none": self._nothing_here,
        }

    def handle(self, request: Request) -> None:
        """Answer a request, now or later, whatever happens."""
        try:
            found = route(request.path)
            if request.method == "OPTIONS":
                request.reply(_PREFLIGHT)
            elif found.key is not None:
                handler = self._stream_methods.get(request.method)
                if handler is None:
                    request.reply(method_not_allowed(request.method, "GET, HEAD, PUT, POST, DELETE, OPTIONS"))
                else:
                    handler(request, found.key)
            else:
                self._resources[found.resource](request)
        except MillstreamError as error:
            request.reply(error_response(error))
        except Exception:
            logger.exception("%s %r failed", request.method, request.path)
            request.reply(problem(500, "internal_error", "the server failed to handle this request; its log says why"))

    @staticmethod
    def _health(request: Request) -> None:
        if request.method not in ("GET", "HEAD"):
            request.reply(method_not_allowed(request.method, "GET, HEAD, OPTIONS"))
            return
        body = b'{"status":"ok","version":"%b"}' % __version__.encode()
        request.reply(Response(200, b"content-type: application/json\r\ncache-control: no-store\r\n", body))

    @staticmethod
    def _nothing_here(request: Request) -> None:
        if request.path.startswith(b"/v1/stream"):
            raise InvalidRequest("the path names no stream", code="invalid_path", hint="use /v1/stream/{path}")
        request.reply(
            problem(404, "not_found", "there is nothing at this path", hint="streams live at /v1/stream/{path}")
        )


def method_not_allowed(method: str, allowed: str) -> Response:
    return problem(
        405,
        "method_not_allowed",
        f"{method} is not possible here",
        fields=b"allow: %b\r\n" % allowed.encode(),
    )
