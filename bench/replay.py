"""Catch-up replay: read a whole stream from its start, following Stream-Next-Offset until it is up to date.

Servers answer with pieces of different size (the summary says how many requests each took). The reader lets the
kernel copy bodies into one buffer and looks at headers only; the share of time it was busy is reported, so that a
reader that is itself the bottleneck would show.
"""

from __future__ import annotations

import hashlib
import socket
import threading
import time
from collections.abc import Callable, Sequence

from bench import load
from bench.client import Client
from bench.measurement import Benchmark, Figures, Invalid, Metric, Plan, Results, alternate
from bench.peers import Peer, Server, running

MESSAGE_BYTES = 4096
MESSAGES = 8192
MESSAGES_QUICK = 2048
READERS = {"1 reader": 1, "8 readers": 8}
FILL_SECONDS_MAX = 120
TIMEOUT_SECONDS = 60.0
BUFFER_BYTES = 1 << 20
STREAM = "0"

Sink = Callable[[memoryview], object]


def run(peers: Sequence[Peer], plan: Plan) -> Results:
    size = MESSAGE_BYTES * (MESSAGES_QUICK if plan.is_quick else MESSAGES)
    results = Results(
        "replay",
        "Catch-up replay",
        f"A stream of about {size >> 20} MiB in messages of {MESSAGE_BYTES >> 10} KiB is read from its start to its "
        "end; with 8 readers at once, the figure is their sum.",
        (
            Metric("megabytes_per_second", "MB/s"),
            Metric("requests", "requests for the whole stream", higher_is_better=False),
            Metric("client_busy", "share of the time a reader was busy", higher_is_better=False, digits=2),
        ),
        list(READERS),
    )
    with running(peers, plan.data_parent) as servers:
        sizes = {server.name: _fill(server, size) for server in servers}

        def measure(case: str, server: Server) -> Figures:
            return _replay_together(server, READERS[case], sizes[server.name], plan.seconds)

        alternate(results, servers, READERS, plan.rounds, measure)
    return results


def _fill(server: Server, size: int) -> int:
    """Append until the stream holds at least `size` bytes; returns its length, read back and checked."""
    load.create_streams(server, 1, 0, 5)
    deadline = time.monotonic() + FILL_SECONDS_MAX
    with Client(server) as client:
        while client.tail_bytes(server.path(STREAM)) < size and time.monotonic() < deadline:
            load.drive(server, "append", server.path(""), 1, MESSAGE_BYTES, connections=16, seconds=1)
        _await_rest(client, server.path(STREAM))
    digest = hashlib.sha256()
    length, _ = replay(server, digest.update)
    whole = hashlib.sha256(b"x" * length)
    if length < size * 0.9 or length % MESSAGE_BYTES or digest.digest() != whole.digest():
        raise Invalid(f"{server.name} gave back {length} bytes that are not what was appended")
    return length


def _await_rest(client: Client, path: str) -> None:
    """Wait for appends that were still under way when the load generator ended."""
    before = -1
    while (tail := client.tail_bytes(path)) != before:
        before = tail
        time.sleep(0.5)


def _replay_together(server: Server, readers: int, size: int, seconds: int) -> Figures:
    """Replay again and again for the given time with several readers."""
    lengths: list[int] = []
    requests: list[int] = []
    faults: list[str] = []
    busy: list[float] = []
    deadline = time.perf_counter() + seconds

    def read() -> None:
        cpu_begin = time.thread_time()
        while time.perf_counter() < deadline:
            try:
                length, asked = replay(server)
            except OSError as error:
                faults.append(str(error))
                return
            lengths.append(length)
            requests.append(asked)
        busy.append(time.thread_time() - cpu_begin)

    begin = time.perf_counter()
    threads = [threading.Thread(target=read) for _ in range(readers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    elapsed = time.perf_counter() - begin
    if faults or any(length != size for length in lengths):
        raise Invalid(faults[0] if faults else f"a replay gave {min(lengths)} of {size} bytes")
    return {
        "megabytes_per_second": sum(lengths) / elapsed / 1e6,
        "requests": max(requests),
        "client_busy": sum(busy) / readers / elapsed,
    }


def replay(server: Server, sink: Sink | None = None, stream: str = STREAM) -> tuple[int, int]:
    """Read a stream to its end over one connection. Returns its length and the number of requests that took."""
    path, offset = server.path(stream), "-1"
    length = requests = 0
    view = memoryview(bytearray(BUFFER_BYTES))
    with socket.create_connection(("127.0.0.1", server.port), TIMEOUT_SECONDS) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with connection.makefile("rb", BUFFER_BYTES) as incoming:
            while True:
                connection.sendall(f"GET {path}?offset={offset} HTTP/1.1\r\nHost: bench\r\n\r\n".encode())
                requests += 1
                headers = read_headers(incoming)
                piece = read_body(incoming, headers, view, sink)
                length += piece
                offset = headers["stream-next-offset"]
                if headers.get("stream-up-to-date") == "true":
                    return length, requests
                if piece == 0:
                    raise ConnectionError("an answer without bytes that is not up to date")


def read_headers(incoming: socket.SocketIO) -> dict[str, str]:
    status = incoming.readline().decode()
    if " 200 " not in status:
        raise ConnectionError(f"a read was answered {status.strip()!r}")
    headers = {}
    while (line := incoming.readline().decode("latin-1").strip()) != "":
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
    return headers


def read_body(incoming: socket.SocketIO, headers: dict[str, str], view: memoryview, sink: Sink | None) -> int:
    if headers.get("transfer-encoding") != "chunked":
        return _drain(incoming, int(headers["content-length"]), view, sink)
    length = 0
    while True:
        chunk = _drain(incoming, int(incoming.readline(), 16), view, sink)
        incoming.readline()
        if chunk == 0:
            return length
        length += chunk


def _drain(incoming: socket.SocketIO, length: int, view: memoryview, sink: Sink | None) -> int:
    left = length
    while left:
        received = incoming.readinto(view[: min(left, BUFFER_BYTES)])
        if not received:
            raise ConnectionError(f"the connection ended {left} bytes early")
        if sink is not None:
            sink(view[:received])
        left -= received
    return length


BENCHMARK = Benchmark("replay", "catch-up replay of a stream, MB/s", run)
