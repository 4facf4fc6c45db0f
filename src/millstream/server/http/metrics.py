"""What the server counts: requests by route and status, their duration, bytes sent, and refusals.

Adapters and the gate increment the counts; `metrics_api` reads them. Knows no requests or responses.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from typing import Final

from millstream.measures import REQUEST_SECONDS, Histogram

METHODS: Final = frozenset({"GET", "HEAD", "PUT", "POST", "DELETE", "OPTIONS", "PATCH"})
UNROUTED: Final = "none"
BUSY_REQUESTS_PER_SECOND: Final = 2000
TIMED_ONE_IN: Final = 16


class RouteSeries:
    """The requests of one method to one kind of resource."""

    __slots__ = ("method", "route", "seconds", "statuses")

    def __init__(self, method: str, route: str) -> None:
        self.method = method
        self.route = route
        self.statuses: defaultdict[int, int] = defaultdict(int)
        self.seconds = Histogram(REQUEST_SECONDS)

    def time(self, seconds: float, weight: int) -> None:
        """Record how long a request took. `weight` is the number of requests that it represents."""
        self.seconds.counts[bisect_left(REQUEST_SECONDS, seconds)] += weight
        self.seconds.sum += seconds * weight


class Metrics:
    def __init__(self) -> None:
        self.routes: dict[tuple[str, str], RouteSeries] = {}
        self.unrouted = self.series("any", UNROUTED)
        self.sent_bytes = 0
        # Timing costs two percent of a small append. So under load only one in this many requests is timed, and its
        # time counts for all of them. A power of two.
        self.timed_one_in = 1
        self.connections = 0
        self.unsent_bytes = 0
        self.slow_readers_dropped = 0
        self.authentication_failures: Counter[str] = Counter()
        self.rate_limited: Counter[str] = Counter()
        self.forbidden = 0

    def pace(self, requests_per_second: float, *, times_all: bool) -> None:
        """Choose the share of requests that are timed, from the current request rate."""
        is_busy = requests_per_second > BUSY_REQUESTS_PER_SECOND and not times_all
        self.timed_one_in = TIMED_ONE_IN if is_busy else 1

    def series(self, method: str, route: str) -> RouteSeries:
        """The series of a method and a route. Clients can send any method, so unknown methods share one series."""
        if method not in METHODS and route != UNROUTED:
            method = "other"
        found = self.routes.get((method, route))
        if found is None:
            found = self.routes[method, route] = RouteSeries(method, route)
        return found
