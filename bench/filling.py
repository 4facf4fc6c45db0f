"""Fills streams fast: requests go out in batches over a few connections, without waiting for each answer.

Only what is not timed is done with this: creating a million streams, appending the history that is read later.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import time
from collections.abc import Iterable, Iterator
from itertools import islice

from bench.client import Client
from bench.measurement import Invalid
from bench.peers import Server

CONNECTIONS = 8
# millstream lets this many requests of one connection wait (`http.pipelined_requests_max`).
DEPTH = 64
TIMEOUT_SECONDS = 60.0
RECEIVE_BYTES = 1 << 16
POOL_BYTES = 8 << 20
# Longer than the flush intervals that are used, so that no flush in between means there is nothing to flush.
SETTLE_SECONDS = 3.0
BACKLOG_SECONDS = 0.2
STATUS_LINE = b"HTTP/1.1 "


def request(method: str, path: str, body: bytes, content_type: str) -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nHost: bench\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}"
    return head.encode() + b"\r\n\r\n" + body


def create_streams(server: Server, count: int) -> float:
    """Create empty byte streams 0 to `count` - 1; returns the seconds that took."""
    create = request("PUT", server.path("{}"), b"", "application/octet-stream").decode()
    begin = time.perf_counter()
    pipeline(server, (create.format(index).encode() for index in range(count)))
    return time.perf_counter() - begin


def pipeline(server: Server, requests: Iterable[bytes], depth: int = DEPTH, connections: int = CONNECTIONS) -> None:
    """Send everything; an answer that is no success makes the measurement invalid."""
    left = iter(requests)
    with contextlib.ExitStack() as stack:
        address = ("127.0.0.1", server.port)
        links = [
            _Link(stack.enter_context(socket.create_connection(address, TIMEOUT_SECONDS))) for _ in range(connections)
        ]
        while sum(link.turn(left, depth) for link in links):
            pass


class _Link:
    """A connection and how many answers it still owes."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection
        self._owed = 0

    def turn(self, requests: Iterator[bytes], depth: int) -> bool:
        """Take the answers to the last batch and send the next; whether there was anything to do."""
        self._await_answers()
        batch = list(islice(requests, depth))
        self._connection.sendall(b"".join(batch))
        self._owed = len(batch)
        return bool(batch)

    def _await_answers(self) -> None:
        rest = b""
        while self._owed:
            received = self._connection.recv(RECEIVE_BYTES)
            if not received:
                raise Invalid("the server closed a connection while streams were filled")
            data = rest + received
            successes = data.count(STATUS_LINE + b"2")
            if data.count(STATUS_LINE) - data.endswith(STATUS_LINE) > successes:
                raise Invalid(f"filling was answered {data[:300]!r}")
            self._owed -= successes
            # A status line may be cut in two: its first part is looked at again with the rest.
            rest = data[-len(STATUS_LINE) :]


def await_flushed(server: Server, seconds_max: float = 180.0) -> dict[str, float]:
    """Wait until millstream has nothing left to flush; what it then says of its tiers."""
    deadline = time.monotonic() + seconds_max
    flushes = -1
    with Client(server) as client:
        while time.monotonic() < deadline:
            stats = json.loads(client.request("GET", "/cluster/hot-cold-stats").body)
            if stats["flush_backlog_bytes"] == 0 and stats["flush_count"] == flushes:
                return stats
            flushes = stats["flush_count"]
            time.sleep(SETTLE_SECONDS)
    raise Invalid(f"still not flushed after {seconds_max:.0f} s")


def await_backlog(server: Server, bytes_max: int, seconds_max: float) -> None:
    """Wait until no more than so many bytes are left to flush."""
    deadline = time.monotonic() + seconds_max
    with Client(server) as client:
        while time.monotonic() < deadline:
            stats = json.loads(client.request("GET", "/cluster/hot-cold-stats").body)
            if stats["flush_backlog_bytes"] <= bytes_max:
                return
            time.sleep(BACKLOG_SECONDS)
    raise Invalid(f"more than {bytes_max} bytes are still not flushed after {seconds_max:.0f} s")


class Payloads:
    """Messages that compress as text does, about two to one, and differ from each other."""

    def __init__(self, size: int, seed: int = 1) -> None:
        self._size = size
        self._random = random.Random(seed)
        self._pool = os.urandom(POOL_BYTES).hex().encode()

    def plain(self) -> bytes:
        at = self._random.randrange(len(self._pool) - self._size)
        return self._pool[at : at + self._size]

    def json(self) -> bytes:
        return b'{"text":"%b"}' % self.plain()[: self._size - 11]


def append_messages(server: Server, stream: str, size: int, total: int) -> None:
    """Append messages of `size` bytes, one a request, until the byte stream holds `total`."""
    payloads, path = Payloads(size), server.path(stream)
    depth = max(1, min(DEPTH, (4 << 20) // size))
    requests = (request("POST", path, payloads.plain(), "application/octet-stream") for _ in range(total // size))
    pipeline(server, requests, depth)


def append_json(server: Server, stream: str, size: int, total: int) -> None:
    """The same for a JSON stream, with many messages in each request."""
    payloads, path = Payloads(size), server.path(stream)
    each = (256 << 10) // size
    requests = (
        request("POST", path, b"[%b]" % b",".join(payloads.json() for _ in range(each)), "application/json")
        for _ in range(total // size // each)
    )
    pipeline(server, requests, depth=4)
