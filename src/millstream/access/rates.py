"""Rates: how much each of many clients may use per second, remembered for a bounded number of them.

A token bucket per client, filled by time. What is spent is spent even if it was more than there was: the size of an
answer is known only afterwards, and the debt is waited off before the next request.
"""

from __future__ import annotations

from collections import OrderedDict
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
        self._clients_max = clients_max
        self._now = now
        # What each client has left and when that was so, least recently used first. One that is forgotten starts
        # with a full bucket again, which it would have had anyway unless all the others came within the burst.
        self._clients: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._clients)

    def take(self, client: Hashable, amount: float) -> float:
        """Let a client use some if it has any left. Returns 0, or how long it must wait for that."""
        now = self._now()
        left, since = self._clients.get(client) or (self._capacity, now)
        left = min(left + (now - since) * self.per_second, self._capacity)
        if left <= 0:
            return -left / self.per_second + 1e-9
        if amount:
            self._note(client, left - amount, now)
        return 0.0

    def spend(self, client: Hashable, amount: float) -> None:
        """Note what a client has used already, also if it had less."""
        if self.per_second and amount:
            now = self._now()
            left, since = self._clients.get(client) or (self._capacity, now)
            self._note(client, min(left + (now - since) * self.per_second, self._capacity) - amount, now)

    def _note(self, client: Hashable, left: float, now: float) -> None:
        self._clients[client] = (left, now)
        self._clients.move_to_end(client)
        if len(self._clients) > self._clients_max:
            self._clients.popitem(last=False)
