"""Append-to-SSE latency: from just before a POST to the arrival of its message at each subscriber.

One writer and all subscribers are raw sockets in one process around one epoll, so that the clock is the same for all
and the client costs about two microseconds a subscriber. The next message goes out after the last one has arrived
everywhere and a short pause: this measures latency, not throughput.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import socket
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.client import Client
from bench.measurement import Benchmark, Figures, Invalid, Metric, Plan, Results, alternate
from bench.peers import Peer, Server, millstream, running

# Case: subscribers and messages a round.
CASES = {"1 subscriber": (1, 300), "100 subscribers": (100, 100), "1,000 subscribers": (1000, 40)}
MESSAGES_QUICK = 20
WARM_UP_MESSAGES = 5
MESSAGE_BYTES = 100
PAUSE_SECONDS = 0.003
SUBSCRIBE_SECONDS_MAX = 15.0
ARRIVE_SECONDS_MAX = 10.0
# A slow server is measured with fewer messages rather than for minutes.
ROUND_SECONDS_MAX = 10.0
RECEIVE_BYTES = 65536
MEMORY = Path("/dev/shm")
IN_MEMORY = "millstream, memory"


def run(peers: Sequence[Peer], plan: Plan) -> Results:
    results = Results(
        "live",
        "Append-to-SSE latency",
        "Milliseconds from before the POST of a 100-byte message to its arrival at each subscriber, over all messages "
        "and subscribers. Subscribers and writer share one client process, so with 1,000 subscribers a part of "
        f"the figure, the same for all servers, is the client's. {IN_MEMORY!r} has its log in a file system without a "
        "disk: what is left when nothing waits for one.",
        (
            Metric("p50_ms", "p50, ms", higher_is_better=False, digits=2),
            Metric("p99_ms", "p99, ms", higher_is_better=False, digits=2),
            Metric("acknowledged_p50_ms", "p50 of the writer's answer, ms", higher_is_better=False, digits=2),
        ),
        list(CASES),
    )
    numbers = itertools.count()

    def measure(case: str, server: Server) -> Figures:
        subscribers, messages = CASES[case]
        with subscribed(server, f"live-{next(numbers)}", subscribers) as audience:
            return audience.measure(MESSAGES_QUICK if plan.is_quick else messages)

    with running(peers, plan.data_parent) as servers, _in_memory() as others:
        alternate(results, [*servers, *others], CASES, plan.rounds, measure)
    return results


@contextlib.contextmanager
def _in_memory() -> Iterator[list[Server]]:
    """millstream without a disk to wait for, where the system has a file system in memory."""
    if not os.access(MEMORY, os.W_OK):
        yield []
        return
    with running([millstream(IN_MEMORY)], MEMORY) as servers:
        yield servers


@contextlib.contextmanager
def subscribed(server: Server, stream: str, subscribers: int) -> Iterator[Audience]:
    """A new stream with its subscribers, each of them past the headers of its answer."""
    path = server.path(stream)
    with Client(server) as client:
        status = client.request("PUT", path, content_type="text/plain").status
    if status != 201:
        raise Invalid(f"the stream's creation was answered {status}")
    with contextlib.ExitStack() as sockets:
        opened = []
        for _ in range(subscribers + 1):
            one = sockets.enter_context(socket.create_connection(("127.0.0.1", server.port), SUBSCRIBE_SECONDS_MAX))
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            opened.append(one)
        writer, *readers = opened
        request = f"GET {path}?offset=-1&live=sse HTTP/1.1\r\nHost: bench\r\nAccept: text/event-stream\r\n\r\n".encode()
        for reader in readers:
            reader.sendall(request)
        for reader in readers:
            _await_first_event(reader)
        yield Audience(writer, readers, path)


def _await_first_event(reader: socket.socket) -> None:
    """Every server begins with a control event that says where the reader stands."""
    received = b""
    while b"streamNextOffset" not in received:
        piece = reader.recv(RECEIVE_BYTES)
        if not piece:
            raise Invalid(f"a subscription ended at once: {received[:80]!r}")
        received += piece
    if not received.startswith(b"HTTP/1.1 200"):
        raise Invalid(f"a subscription was answered {received[:40]!r}")
    reader.setblocking(False)


class Audience:
    """A writer and the subscribers of its stream."""

    def __init__(self, writer: socket.socket, readers: Sequence[socket.socket], path: str) -> None:
        self._writer = writer
        self._path = path
        self._readers = {reader.fileno(): reader for reader in readers}
        self._unfinished = dict.fromkeys(self._readers, b"")

    def measure(self, messages: int) -> Figures:
        latencies: list[float] = []
        acknowledged: list[float] = []
        deadline = time.perf_counter() + ROUND_SECONDS_MAX
        with select.epoll() as poll:
            for number in (*self._readers, self._writer.fileno()):
                poll.register(number, select.EPOLLIN)
            for index in range(WARM_UP_MESSAGES + messages):
                arrivals, answered = self._send(poll, index)
                if index >= WARM_UP_MESSAGES:
                    latencies += arrivals
                    acknowledged.append(answered)
                    if time.perf_counter() > deadline:
                        break
                time.sleep(PAUSE_SECONDS)
        percentiles = statistics.quantiles(latencies, n=100, method="inclusive")
        return {
            "p50_ms": percentiles[49] * 1000,
            "p99_ms": percentiles[98] * 1000,
            "acknowledged_p50_ms": statistics.median(acknowledged) * 1000,
        }

    def _send(self, poll: select.epoll, index: int) -> tuple[list[float], float]:
        """POST one message; how long it took to reach each subscriber, and to be acknowledged."""
        mark = b"<%06d>" % index
        head = (
            f"POST {self._path} HTTP/1.1\r\nHost: bench\r\nContent-Type: text/plain\r\nContent-Length: {MESSAGE_BYTES}"
        )
        request = head.encode() + b"\r\n\r\n" + mark.ljust(MESSAGE_BYTES, b"x")
        arrivals: list[float] = []
        answered = None
        waiting = set(self._readers)
        begin = time.perf_counter()
        self._writer.sendall(request)
        while waiting or answered is None:
            events = poll.poll(ARRIVE_SECONDS_MAX)
            if not events:
                raise Invalid(f"message {index} did not reach {len(waiting)} of {len(self._readers)} subscribers")
            for number, _ in events:
                if number == self._writer.fileno():
                    self._check_answer()
                    answered = time.perf_counter() - begin
                elif self._has_arrived(number, mark):
                    arrivals.append(time.perf_counter() - begin)
                    waiting.discard(number)
        return arrivals, answered

    def _has_arrived(self, number: int, mark: bytes) -> bool:
        piece = self._readers[number].recv(RECEIVE_BYTES)
        if not piece:
            raise Invalid("the server ended a subscription")
        text = self._unfinished[number] + piece
        found = mark in text
        self._unfinished[number] = b"" if found else text[-len(mark) :]
        return found

    def _check_answer(self) -> None:
        answer = self._writer.recv(RECEIVE_BYTES)
        if not answer.startswith((b"HTTP/1.1 204", b"HTTP/1.1 200")):
            raise Invalid(f"an append was answered {answer[:40]!r}")


BENCHMARK = Benchmark("live", "append-to-SSE latency with 1, 100 and 1,000 subscribers", run)
