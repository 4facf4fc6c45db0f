"""Rates: how much each client may use per second, for a bounded number of clients.

Each client has a token bucket that fills with time. An amount can be spent even if the bucket holds less, because the
size of an answer is known only afterwards; the client then waits until the debt is paid before its next request.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from millstream.clock import monotonic_seconds


class Rate:
    """`per_second` for each client; up to `burst_seconds` worth may be used at once. With 0 there is no limit."""

    def __init__(
        self,
        per_second: float,
        burst_seconds: float,
        clients_max: int,
        now: Callable[[], float] = monotonic_seconds,
    ) -> None:
        self.per_second = per_second
        self._capacity = max(per_second * burst_seconds, 1.0)
        self._generation_max = max(clients_max // 2, 1)
        self._now = now
        # What each client has left and at which time. Two generations: when the younger one is full, the older one is
        # dropped. That costs nothing per use. A client that was dropped starts with a full bucket again, which it would
        # have had anyway unless all the others came within the burst.
        self._clients: dict[Hashable, list[float]] = {}
        self._elder: dict[Hashable, list[float]] = {}

    def __len__(self) -> int:
        return len(self._clients) + len(self._elder)

    def take(self, client: Hashable, amount: float) -> float:
        """Take an amount if the client has any left. Returns 0, or how many seconds the client must wait."""
        now = self._now()
        bucket = self._clients.get(client) or self._recall(client, now)
        left = bucket[0] + (now - bucket[1]) * self.per_second
        if left > self._capacity:
            left = self._capacity
        if left <= 0:
            return -left / self.per_second + 1e-9
        bucket[0] = left - amount
        bucket[1] = now
        return 0.0

    def spend(self, client: Hashable, amount: float) -> None:
        """Record what a client has used, even if it had less left."""
        if self.per_second and amount:
            now = self._now()
            bucket = self._clients.get(client) or self._recall(client, now)
            bucket[0] = min(bucket[0] + (now - bucket[1]) * self.per_second, self._capacity) - amount
            bucket[1] = now

    def _recall(self, client: Hashable, now: float) -> list[float]:
        bucket = self._elder.pop(client, None) or [self._capacity, now]
        if len(self._clients) >= self._generation_max:
            self._elder, self._clients = self._clients, {}
        self._clients[client] = bucket
        return bucket
