"""The front of an application: what happens to requests before and after the handlers, whichever shard they are for.

Adapters talk to a `Front`; `Application` is one over a single shard, `ClusterApplication` one over several.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from millstream.clock import monotonic_seconds
from millstream.errors import MillstreamError
from millstream.server.api.console_pages import Console
from millstream.server.api.examples import Examples
from millstream.server.api.gate import FindTarget, Gate
from millstream.server.api.health_api import HealthApi
from millstream.server.http.access_log import log_access
from millstream.server.http.application import LiveReads
from millstream.server.http.error_map import error_response, yjs_error
from millstream.server.http.limits import ReadLimits
from millstream.server.http.messages import Request, Response, Upload
from millstream.server.http.metrics import Metrics
from millstream.yjs.names import YJS_ROOT


class Front(ABC):
    def __init__(self, find_target: FindTarget, metrics: Metrics, health: HealthApi) -> None:
        self._find_target = find_target
        self.metrics = metrics
        self.health = health
        self.supervisor = health.supervisor
        self.gate: Gate | None = None
        self.logs_access = False
        self.examples: Examples | None = None
        self.console: Console | None = None

    @property
    @abstractmethod
    def live_reads(self) -> LiveReads: ...

    @abstractmethod
    def set_read_limits(self, limits: ReadLimits) -> None:
        """Apply limits to reads and snapshots that begin from now on."""

    @abstractmethod
    def handle(self, request: Request) -> None:
        """Answer a request, now or later, whatever happens."""

    @abstractmethod
    def upload_for(self, method: str, target: bytes, body_bytes_max: int) -> tuple[Upload | None, int]:
        """Where a request's body should go while it arrives, if not into memory; and how large it may be."""

    @staticmethod
    def worded(target: bytes, refusal: Response) -> Response:
        """A refusal that an adapter gives by itself, in the words of the protocol that its target belongs to."""
        return yjs_error(refusal) if target.startswith(YJS_ROOT) else refusal

    def shows_console(self, request: Request, kind: str) -> bool:
        """Answer what is the console's; for any other method its name is only reserved."""
        if kind != "console" or self.console is None or request.method not in ("GET", "HEAD"):
            return False
        self.console.serve(request)
        return True

    @property
    def judges_heads(self) -> bool:
        return self.gate is not None

    def refusal_of_head(self, request: Request) -> Response | None:
        """The answer to a request whose body need not be awaited, since it would be refused."""
        if self.gate is not None:
            try:
                self.gate.check_head(request, self._find_target)
            except MillstreamError as error:
                return self.gate.answer_to(request, error_response(error))
        return None

    def answered(self, request: Request, response: Response) -> Response:
        """Called by the adapters with every answer as it goes out, whoever gave it; returns what is to be sent."""
        if self.gate is not None:
            response = self.gate.answer_to(request, response)
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
