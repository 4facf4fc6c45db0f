"""What the server counts: requests by route and status, how long they took, bytes sent, and refusals.

Bumped by the adapters and the gate as they work; read by `metrics_api`. Knows no requests or responses.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from typing import Final

from millstream.measures import REQUEST_SECONDS, Histogram

METHODS: Final = frozenset({"GET", "HEAD", "PUT", "POST", "DELETE", "OPTIONS", "PATCH"})
UNROUTED: Final = "none"


class RouteSeries:
    """The requests of one method to one kind of resource."""

    __slots__ = ("counts", "method", "route", "seconds_sum", "statuses")

    def __init__(self, method: str, route: str) -> None:
        self.method = method
        self.route = route
        self.statuses: defaultdict[int, int] = defaultdict(int)
        # A histogram over REQUEST_SECONDS.
        self.counts = [0] * (len(REQUEST_SECONDS) + 1)
        self.seconds_sum = 0.0

    def observe(self, status: int, seconds: float) -> None:
        self.statuses[status] += 1
        self.counts[bisect_left(REQUEST_SECONDS, seconds)] += 1
        self.seconds_sum += seconds

    @property
    def seconds(self) -> Histogram:
        histogram = Histogram(REQUEST_SECONDS)
        histogram.counts, histogram.sum = self.counts, self.seconds_sum
        return histogram


class Metrics:
    def __init__(self) -> None:
        self.routes: dict[tuple[str, str], RouteSeries] = {}
        self.unrouted = self.series("any", UNROUTED)
        self.sent_bytes = 0
        self.connections = 0
        self.authentication_failures: Counter[str] = Counter()
        self.rate_limited: Counter[str] = Counter()
        self.forbidden = 0

    def series(self, method: str, route: str) -> RouteSeries:
        """The series of a method and a route. A client chooses its method freely, so unknown ones share one."""
        if method not in METHODS and route != UNROUTED:
            method = "other"
        found = self.routes.get((method, route))
        if found is None:
            found = self.routes[method, route] = RouteSeries(method, route)
        return found
