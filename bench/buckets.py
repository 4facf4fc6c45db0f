"""Buckets, snapshots and bootstrap: millstream against a yardstick of its own in the same run.

- Bootstrap of a stream with a snapshot and messages after it, against the same number of bytes as one plain answer.
- One page of the listing of a bucket with very many streams: at its start, in its middle, at its end, by a prefix.
- Appends to a stream while snapshots of it are published, against the same appends alone.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import statistics
import threading
import time
from collections.abc import Callable, Sequence

from bench import crowd, filling, load
from bench.client import Client
from bench.measurement import (
    OURS,
    YARDSTICK,
    Benchmark,
    Figures,
    Goal,
    Invalid,
    Metric,
    Plan,
    Results,
    progress,
    record,
)
from bench.peers import Peer, Server, millstream, running
from bench.replay import BUFFER_BYTES, read_body, read_headers

SNAPSHOT_BYTES = 10 << 20
MESSAGES = 1000
MESSAGE_BYTES = 1024
REPETITIONS = 15
PAGE_STREAMS = 1000
PAGE_REPETITIONS = 20
CONNECTIONS = 64
PUBLISH_SECONDS = 0.5
APPEND_SECONDS = 6
APPEND_SECONDS_QUICK = 2
TIMEOUT_SECONDS = 60.0

BOOTSTRAP = "bootstrap: 10 MiB snapshot and 1,000 messages"
APPENDS = "appends while a snapshot is published every 0.5 s"
PAGES = ("first page", "middle page", "last page", "first page of a prefix", "last page of a prefix")
PREFIX = "42"


def run(peers: Sequence[Peer], plan: Plan) -> Results:
    streams = crowd.size(plan)
    pages = {page: f"{page} of {streams:,} streams" for page in PAGES}
    results = Results(
        "buckets",
        "Snapshots, bootstrap, listing",
        f"Bootstrap of a stream with a snapshot of 10 MiB and 1,000 messages of 1 KiB after it; yardstick: one plain "
        f"answer with the same bytes. A page of 1,000 streams of a bucket with {streams:,}; no yardstick. Appends of 1 "
        "KiB to one stream over 64 connections while snapshots of 10 MiB of that stream are published; yardstick: the "
        "same without snapshots.",
        (
            Metric("ms", "time, ms", higher_is_better=False, digits=1),
            Metric("p99_ms", "p99, ms", higher_is_better=False, digits=1),
            Metric("slowest_ms", f"slowest of {PAGE_REPETITIONS} pages, ms", higher_is_better=False, digits=1),
            Metric("per_second", "requests/s"),
            Metric("publish_ms", "publishing one snapshot, ms", higher_is_better=False, digits=1),
        ),
        [],
        [
            Goal(BOOTSTRAP, "ms", 2, is_ratio=True),
            Goal(APPENDS, "p99_ms", 2, is_ratio=True),
            *(Goal(case, "ms", 50) for case in pages.values()),
        ],
    )
    ours = millstream(OURS, "read.chunk_bytes_max=64MiB")
    with running([ours], plan.data_parent) as [server]:
        _measure_bootstrap(results, server, plan)
    with running([millstream(OURS)], plan.data_parent) as [server]:
        _measure_appends(results, server, plan)
    with crowd.running(plan) as (server, _):
        _measure_pages(results, server, plan, streams, pages)
    return results


# -- bootstrap ---------------------------------------------------------------------------------------------------


def _measure_bootstrap(results: Results, server: Server, plan: Plan) -> None:
    snapshot = os.urandom(SNAPSHOT_BYTES)
    with Client(server) as client:
        for stream in ("behind", "plain"):
            client.request("PUT", server.path(stream), None, "application/octet-stream")
        _publish(client, "behind", snapshot)
        for at in range(0, SNAPSHOT_BYTES, 1 << 20):
            client.request("POST", server.path("plain"), snapshot[at : at + (1 << 20)], "application/octet-stream")
    for stream in ("behind", "plain"):
        filling.append_messages(server, stream, MESSAGE_BYTES, MESSAGES * MESSAGE_BYTES)
    total = SNAPSHOT_BYTES + MESSAGES * MESSAGE_BYTES
    paths = {OURS: "/bench/behind/bootstrap", YARDSTICK: f"{server.path('plain')}?offset=-1"}
    for turn in range(plan.rounds):
        for column, path in paths.items():
            record(results.cell(BOOTSTRAP, column), lambda path=path: _time_answer(server, path, total))
        progress(f"buckets: bootstrap, round {turn + 1} of {plan.rounds}: {_glance(results, BOOTSTRAP, 'ms')}")


def _time_answer(server: Server, path: str, bytes_min: int) -> Figures:
    """The median time of a GET from its first byte sent to its last byte received."""
    times = []
    view = memoryview(bytearray(BUFFER_BYTES))
    address = ("127.0.0.1", server.port)
    with (
        socket.create_connection(address, TIMEOUT_SECONDS) as connection,
        connection.makefile("rb", BUFFER_BYTES) as incoming,
    ):
        for _ in range(REPETITIONS):
            begin = time.perf_counter()
            connection.sendall(f"GET {path} HTTP/1.1\r\nHost: bench\r\n\r\n".encode())
            length = read_body(incoming, read_headers(incoming), view, None)
            times.append(time.perf_counter() - begin)
            if length < bytes_min:
                raise Invalid(f"{path} gave {length} of {bytes_min} bytes")
    return {"ms": statistics.median(times) * 1000}


def _publish(client: Client, stream: str, snapshot: bytes) -> float:
    """Publish a snapshot at the tail; returns the seconds that took."""
    head = client.request("HEAD", f"/bench/{stream}")
    begin = time.perf_counter()
    path = f"/bench/{stream}/snapshot/{head.headers['Stream-Next-Offset']}"
    answer = client.request("PUT", path, snapshot, "application/octet-stream")
    if answer.status != 204:
        raise ConnectionError(f"a snapshot was answered {answer.status}: {answer.body[:200]!r}")
    return time.perf_counter() - begin


# -- appends beside snapshots ------------------------------------------------------------------------------------


def _measure_appends(results: Results, server: Server, plan: Plan) -> None:
    seconds = APPEND_SECONDS_QUICK if plan.is_quick else APPEND_SECONDS
    filling.create_streams(server, 1)

    def append() -> Figures:
        arguments = (server.path(""), 1, MESSAGE_BYTES)
        measured = load.drive(server, "random", *arguments, connections=CONNECTIONS, seconds=seconds)
        if measured.problem:
            raise Invalid(measured.problem)
        return measured.figures()

    append()  # warms up; nothing is kept of it
    for turn in range(plan.rounds):
        kinds: list[tuple[str, Callable[[], Figures]]] = [
            (OURS, lambda: _beside_snapshots(server, append)),
            (YARDSTICK, append),
        ]
        for column, measure in kinds if turn % 2 == 0 else reversed(kinds):
            record(results.cell(APPENDS, column), measure)
        progress(f"buckets: {APPENDS}, round {turn + 1} of {plan.rounds}: {_glance(results, APPENDS, 'p99_ms')}")


def _beside_snapshots(server: Server, append: Callable[[], Figures]) -> Figures:
    ended = threading.Event()
    times: list[float] = []
    faults: list[str] = []
    snapshot = os.urandom(SNAPSHOT_BYTES)

    def publish() -> None:
        try:
            with Client(server) as client:
                while not ended.wait(PUBLISH_SECONDS):
                    times.append(_publish(client, "0", snapshot))
        except (OSError, http.client.HTTPException) as error:
            faults.append(str(error))

    publisher = threading.Thread(target=publish)
    publisher.start()
    try:
        figures = append()
    finally:
        ended.set()
        publisher.join()
    if faults or not times:
        raise Invalid(faults[0] if faults else "no snapshot was published")
    return figures | {"publish_ms": statistics.median(times) * 1000, "published": len(times)}


# -- listing -----------------------------------------------------------------------------------------------------


def _measure_pages(results: Results, server: Server, plan: Plan, streams: int, pages: dict[str, str]) -> None:
    names = sorted(map(str, range(streams)))
    matching = [name for name in names if name.startswith(PREFIX)]
    queries = dict(
        zip(
            PAGES,
            (
                "",
                f"&after={names[streams // 2]}",
                f"&after={names[-PAGE_STREAMS - 1]}",
                f"&prefix={PREFIX}",
                f"&prefix={PREFIX}&after={matching[-min(PAGE_STREAMS + 1, len(matching))]}",
            ),
            strict=True,
        )
    )
    for turn in range(plan.rounds):
        for page, case in pages.items():
            path = f"/bench/streams?limit={PAGE_STREAMS}{queries[page]}"
            record(results.cell(case, OURS), lambda path=path: _time_page(server, path))
            progress(f"buckets: {case}, round {turn + 1} of {plan.rounds}: {_glance(results, case, 'ms')}")


def _time_page(server: Server, path: str) -> Figures:
    times = []
    with Client(server) as client:
        for _ in range(PAGE_REPETITIONS):
            begin = time.perf_counter()
            answer = client.request("GET", path)
            times.append((time.perf_counter() - begin) * 1000)
            found = json.loads(answer.body)["stream_count"] if answer.status == 200 else 0
            if found != PAGE_STREAMS:
                raise Invalid(f"{path} was answered {answer.status} with {found} streams")
    return {"ms": statistics.median(times), "slowest_ms": max(times)}


def _glance(results: Results, case: str, key: str) -> str:
    row = results.cells[case]
    return ", ".join(f"{name} {cell.samples[-1].get(key, 0):,.1f}" for name, cell in row.items() if cell.samples)


BENCHMARK = Benchmark("buckets", "snapshots, bootstrap and listing beside plain reads and appends", run)
