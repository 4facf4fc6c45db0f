"""Rates: how much each of many clients may use per second, remembered for a bounded number of them.

A token bucket per client, filled by time. What is spent is spent even if it was more than there was: the size of an
answer is known only afterwards, and the debt is waited off before the next request.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable

from millstream.clock import monotonic_seconds


class Rate:
    """`per_second` for each client, of which `burst_seconds`' worth may be used at once; 0 is no limit."""

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

    def wait_seconds(self, client: Hashable) -> float:
        """How long a client must wait until it may ask again; 0 if it may now."""
        if not self.per_second:
            return 0.0
        left = self._left(client)
        return 0.0 if left > 0 else (1e-9 - left) / self.per_second

    def spend(self, client: Hashable, amount: float) -> None:
        if not self.per_second or not amount:
            return
        self._clients[client] = (self._left(client) - amount, self._now())
        self._clients.move_to_end(client)
        if len(self._clients) > self._clients_max:
            self._clients.popitem(last=False)

    def _left(self, client: Hashable) -> float:
        found = self._clients.get(client)
        if found is None:
            return self._capacity
        left, since = found
        return min(left + (self._now() - since) * self.per_second, self._capacity)


def retry_after(seconds: float) -> int:
    """For a Retry-After header: whole seconds, at least one."""
    return max(1, math.ceil(seconds))
