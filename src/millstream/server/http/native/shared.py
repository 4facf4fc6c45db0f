"""What the connections of one server share: limits, the current time, common header fields, and limited totals.

Three totals are limited over all connections: the number of connections (in all, and by address), the bytes that
clients have sent and no handler has yet (`incoming_bytes`), and the bytes that clients have not read
(`unsent_bytes_max`).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from email.utils import formatdate
from itertools import count
from typing import Final, Protocol

from millstream.access.addresses import is_loopback, network_of
from millstream.server.http.application import Application
from millstream.server.http.error_map import problem
from millstream.server.http.limits import HttpLimits
from millstream.server.http.messages import COMMON_FIELDS, Response, new_id

CHECK_SECONDS: Final = 0.5


class Member(Protocol):
    """A connection, as the totals see it."""

    @property
    def address(self) -> str: ...

    def check(self, now: float) -> None: ...

    def retire(self) -> None: ...

    def abort(self) -> None: ...


class Shared:
    def __init__(self, app: Application, limits: HttpLimits, public_url: str | None, *, is_secure: bool) -> None:
        self.app = app
        self.limits = limits
        self.public_url = public_url
        self.is_secure = is_secure
        self.is_stopping = False
        # The loop's time as of the last tick: deadlines are seconds away, and reading the clock is not free.
        self.now = 0.0
        self.id = new_id()
        self.numbers = count(1)
        self.untimed = 0  # bit mask: a request is timed if its number has none of these bits
        self._counted = (0, 0.0)
        self.fields = self.fields_and_id = b""
        # Each connection with the address under which it is counted; empty if it is not counted by address.
        self.connections: dict[Member, str] = {}
        self._by_address: Counter[str] = Counter()
        # Connections whose client does not read, longest first, each with its unsent bytes.
        self._paused: dict[Member, int] = {}
        # Over all connections: bytes of incomplete bodies and of queued requests.
        self.incoming_bytes = 0

    def tick(self) -> None:
        """Update the time, for deadlines and for the `date` field of answers."""
        self.now = asyncio.get_running_loop().time()
        self.fields = COMMON_FIELDS + b"date: %b\r\n" % formatdate(usegmt=True).encode()
        self.fields_and_id = self.fields + b"x-request-id: %b-" % self.id

    def pace(self) -> None:
        """Time all requests, or only a share of them when there are many."""
        number = next(self.numbers)
        before, at = self._counted
        self._counted = (number, self.now)
        metrics = self.app.metrics
        metrics.pace((number - before) / max(self.now - at, CHECK_SECONDS), times_all=self.app.logs_access)
        self.untimed = metrics.timed_one_in - 1

    # -- how many connections ------------------------------------------------------------------------------

    def join(self, connection: Member) -> Response | None:
        """Count a new connection. If it exceeds a limit, returns the refusal to send."""
        self.connections[connection] = ""
        self.app.metrics.connections += 1
        if len(self.connections) > self.limits.connections_max:
            return problem(503, "too_many_connections", "the server has as many connections as it takes")
        return self._join_address(connection) if self._is_counted(connection.address) else None

    def leave(self, connection: Member) -> None:
        name = self.connections.pop(connection)
        self.app.metrics.connections -= 1
        self.resumed(connection)
        if name:
            self._by_address[name] -= 1
            if not self._by_address[name]:
                del self._by_address[name]

    def _is_counted(self, address: str) -> bool:
        """Whether the connections of an address are limited in number."""
        limits = self.limits
        if not limits.address_connections_max or address in limits.trusted_proxies:
            return False
        return not (limits.exempt_loopback and is_loopback(address))

    def _join_address(self, connection: Member) -> Response | None:
        """Refuse a connection over the limit of its address; without an answer if the address has twice as many
        connections as allowed."""
        self.connections[connection] = name = network_of(connection.address)
        self._by_address[name] += 1
        limit = self.limits.address_connections_max
        if self._by_address[name] <= limit:
            return None
        self.app.metrics.rate_limited["address_connections"] += 1
        if self._by_address[name] > 2 * limit:
            connection.abort()
            return None
        return problem(429, "too_many_connections", "this address has as many connections as it may")

    # -- how much is unsent --------------------------------------------------------------------------------

    def paused(self, connection: Member, unsent_bytes: int) -> None:
        """A client does not read its answers. If the unsent bytes exceed the limit, the slowest readers are closed."""
        self._paused[connection] = unsent_bytes
        metrics = self.app.metrics
        metrics.unsent_bytes += unsent_bytes
        while metrics.unsent_bytes > self.limits.unsent_bytes_max:
            slowest = next(iter(self._paused))
            self.resumed(slowest)
            metrics.slow_readers_dropped += 1
            # Not immediately: it may be the connection that is being written to.
            asyncio.get_running_loop().call_soon(slowest.abort)

    def resumed(self, connection: Member) -> None:
        self.app.metrics.unsent_bytes -= self._paused.pop(connection, 0)
