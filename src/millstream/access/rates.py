"""Rates: how much each of many clients may use per second, remembered for a bounded number of them.

A token bucket per client, filled by time. What is spent is spent even if it was more than there was: the size of an
answer is known only afterwards, and the debt is waited off before the next request.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from millstream.clock import monotonic_seconds


class Rate:
    """`per_second` for each client, of which `burst_seconds`' worth may be used at once; with 0 nobody takes."""

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
        # What each client has left and when that was so. Two generations: when the younger is full, the elder is
        # forgotten. That costs nothing per use, and who was not seen for so long starts with a full bucket again, which
        # it would have had anyway unless all the others came within the burst.
        self._clients: dict[Hashable, list[float]] = {}
        self._elder: dict[Hashable, list[float]] = {}

    def __len__(self) -> int:
        return len(self._clients) + len(self._elder)

    def take(self, client: Hashable, amount: float) -> float:
        """Let a client use some if it has any left. Returns 0, or how long it must wait for that."""
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
        """Note what a client has used already, also if it had less."""
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
