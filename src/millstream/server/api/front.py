"""The front: what every request passes, in a single server and in a cluster.

It routes a request, lets the gate judge it, has it answered, and processes the answer: policies change it, then it is
counted, timed and logged. Requests about the node itself go to the node's handlers; requests about streams go to a
`Backend`: the handlers over one shard, or the dispatch of a cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, Protocol

from millstream.clock import monotonic_seconds
from millstream.errors import InvalidRequest, MillstreamError, NotFound
from millstream.server.api.console_pages import Console
from millstream.server.api.examples import EXAMPLES_ROOT, Examples
from millstream.server.api.gate import Gate
from millstream.server.api.health_api import HealthApi
from millstream.server.api.responses import method_not_allowed
from millstream.server.api.routes import OPERATIONS, Kind, Route, route_of
from millstream.server.http.access_log import log_access
from millstream.server.http.application import LiveReads
from millstream.server.http.error_map import defect_response, error_response, yjs_error
from millstream.server.http.limits import ReadLimits
from millstream.server.http.messages import Answer, Request, Response, Upload
from millstream.server.http.metrics import Metrics
from millstream.yjs.names import YJS_ROOT

Policy = Callable[[Request, Response], Response]
"""Returns the answer that is sent instead of the given one."""

NodeHandlers = Mapping[Kind, Mapping[str, Callable[[Request], Answer]]]
"""The handlers of a node's own resources, by kind of resource and method."""

_STREAM: Final = Kind.STREAM
_STREAM_METHODS: Final = ("GET", "HEAD", "POST", "PUT", "DELETE")
_PREFLIGHT: Final = Response(
    204,
    b"access-control-allow-methods: GET, HEAD, PUT, POST, DELETE, OPTIONS\r\n"
    b"access-control-allow-headers: content-type, authorization, if-match, if-none-match, last-event-id, stream-seq,"
    b" stream-ttl, stream-expires-at, stream-closed, producer-id, producer-epoch, producer-seq, stream-forked-from,"
    b" stream-fork-offset, stream-fork-sub-offset\r\n"
    b"access-control-max-age: 86400\r\n",
)


class Backend(Protocol):
    """Answers requests about streams."""

    @property
    def live_reads(self) -> LiveReads: ...

    @property
    def methods(self) -> dict[Kind, list[str]]:
        """Every kind of resource that this backend serves, with its methods."""
        ...

    def set_read_limits(self, limits: ReadLimits) -> None:
        """Apply limits to reads and snapshots that begin from now on."""
        ...

    def begin_upload(self) -> tuple[Upload, int]:
        """Where the body of a snapshot goes while it arrives, and how large it may be."""
        ...

    def handle(self, request: Request, route: Route) -> Answer:
        """Answer a request; an immediate refusal is raised."""
        ...


class Front:
    def __init__(
        self,
        backend: Backend,
        node_handlers: NodeHandlers,
        metrics: Metrics,
        health: HealthApi,
        policies: tuple[Policy, ...] = (),
    ) -> None:
        self._backend = backend
        self._node_handlers = node_handlers
        # Applied to every answer in this order; errors are first converted by `in_yjs_format`.
        self._own_policies = self._policies = policies
        self._series = {method: metrics.series(method, Kind.STREAM) for method in _STREAM_METHODS}
        self.metrics = metrics
        self.health = health
        self.supervisor = health.supervisor
        self._gate: Gate | None = None
        self.judges_heads = False
        self.logs_access = False
        self.examples: Examples | None = None
        self.console: Console | None = None

    @property
    def gate(self) -> Gate | None:
        return self._gate

    @gate.setter
    def gate(self, gate: Gate | None) -> None:
        self._gate = gate
        self.judges_heads = gate is not None
        self._policies = self._own_policies if gate is None else (*self._own_policies, gate.answer_to)

    @property
    def live_reads(self) -> LiveReads:
        return self._backend.live_reads

    @property
    def routes(self) -> dict[Kind, list[str]]:
        """Every kind of resource, with its methods."""
        return {**self._backend.methods, **{kind: list(found) for kind, found in self._node_handlers.items()}}

    def set_read_limits(self, limits: ReadLimits) -> None:
        """Apply limits to reads and snapshots that begin from now on."""
        self._backend.set_read_limits(limits)

    # -- down: a request comes in --------------------------------------------------------------------------------

    def refusal_of_head(self, request: Request) -> Response | None:
        """The refusal of a request, judged by its head alone, so that its body need not be received; None to receive
        it."""
        if self.gate is not None:
            try:
                self.gate.check_head(request, route_of(request.path))
            except MillstreamError as error:
                return self.gate.answer_to(request, error_response(error))
        return None

    def upload_for(self, method: str, target: bytes, body_bytes_max: int) -> tuple[Upload | None, int]:
        """Where a request's body goes while it arrives, None for memory; and how large it may be."""
        if method == "PUT" and route_of(target.partition(b"?")[0]).kind is Kind.SNAPSHOT:
            return self._backend.begin_upload()
        return None, body_bytes_max

    def handle(self, request: Request) -> Answer:
        """Answer a request, now or later. Never raises."""
        session = None
        answer: Answer
        try:
            if self.examples is not None and request.path.startswith(EXAMPLES_ROOT):
                return self.examples.serve(request)
            route = route_of(request.path)
            if self._gate is not None:
                session = self._gate.admit(request, route)
            if route.kind is _STREAM and (series := self._series.get(request.method)) is not None:
                request.series = series
                answer = self._backend.handle(request, route)
            else:
                answer = self._handle_other(request, route)
        except MillstreamError as error:
            # The error's frames refer to it through a route or a local variable: a cycle that would keep the request
            # alive.
            answer = _refused(request, error_response(error.with_traceback(None)))
        except Exception:  # a defect fails one request, not its connection or the server
            answer = _refused(request, defect_response(request))
        return answer if session is None else session.watch(answer)

    def _handle_other(self, request: Request, route: Route) -> Answer:
        kind, method = route.kind, request.method
        route.check()
        request.series = self.metrics.series(method, kind)
        if method == "OPTIONS":
            return _PREFLIGHT
        if kind is Kind.CONSOLE and self.console is not None and method in ("GET", "HEAD"):
            return self.console.serve(request)
        if kind in (Kind.RESERVED, Kind.CONSOLE) or (kind in OPERATIONS and method == "PUT"):
            raise _no_resource(method, route.rest)
        handlers = self._node_handlers.get(kind)
        if handlers is None:
            return self._backend.handle(request, route)
        handler = handlers.get("GET" if method == "HEAD" else method)
        return method_not_allowed(method, handlers) if handler is None else handler(request)

    # -- up: an answer goes out ----------------------------------------------------------------------------------

    def answered(self, request: Request, outcome: Response | MillstreamError) -> Response:
        """Called by the adapters with the outcome of every request; returns what is to be sent."""
        response = outcome if not isinstance(outcome, MillstreamError) else error_response(outcome.with_traceback(None))
        if response.status >= 400:
            response = in_yjs_format(request, response)
        for policy in self._policies:
            response = policy(request, response)
        metrics = self.metrics
        series = request.series or metrics.unrouted
        series.statuses[response.status] += 1
        body = response.body
        if body and isinstance(body, bytes):
            metrics.sent_bytes += len(body)
        if request.started:
            seconds = monotonic_seconds() - request.started
            series.time(seconds, metrics.timed_one_in)
            if self.logs_access:
                log_access(request, response, seconds)
        return response

    @staticmethod
    def format_refusal(target: bytes, refusal: Response) -> Response:
        """An adapter's own refusal, in the error format of the protocol that the target belongs to."""
        return yjs_error(refusal) if target.startswith(YJS_ROOT) else refusal


def in_yjs_format(request: Request, response: Response) -> Response:
    """Converts errors about documents to the Yjs protocol's format (Yjs §10)."""
    return yjs_error(response) if request.path.startswith(YJS_ROOT) else response


def _refused(request: Request, response: Response) -> Response:
    if request.upload is not None:
        request.upload.discard()
    return response


def _no_resource(method: str, head: str) -> MillstreamError:
    """The error for a path that cannot be a bucket's and that names no resource."""
    if head == "v1":
        return InvalidRequest("the path names no stream", code="invalid_path", hint="use /v1/stream/{path}")
    if method not in ("GET", "HEAD"):
        return InvalidRequest(f"{head!r} is a reserved name", code="invalid_bucket")
    return NotFound(
        "there is nothing at this path",
        code="not_found",
        hint="streams are at /v1/stream/{path} and /{bucket}/{stream}",
    )
