"""The cold tier: millstream with history as Parquet on a local folder, against itself without, in the same run.

- Appends while flushes run, against a server that does not flush.
- Catch-up reads of history that is wholly cold, against the same history in memory.
- Very many streams in one data directory: start, memory, and appends to random streams against appends to one.
- Time to the first byte from random offsets of one large stream.
"""

from __future__ import annotations

import os
import random
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

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
    alternate,
    progress,
    record,
)
from bench.peers import Peer, Server, ServerFailed, millstream, running
from bench.replay import BUFFER_BYTES, read_body, read_headers, replay

MIB = 1 << 20
CONNECTIONS = 64
APPEND_BYTES = 1024
APPEND_STREAMS = (1, 1000)
APPEND_SECONDS = 6
APPEND_SECONDS_QUICK = 2
# Small messages take long to append one by one, so that there are fewer bytes of them.
HISTORY_BYTES = {1024: 64 * MIB, 100: 16 * MIB}
QUICK_DIVISOR = 8
LARGE_MIB_QUICK = 128
LARGE_MESSAGE_BYTES = MIB
LARGE_READS = 300
TIMEOUT_SECONDS = 60.0

FLUSHING = ("cold.flush_interval=1s", "cold.flush_bytes=16MiB", "hot.keep_bytes=0B")
NOT_FLUSHING = ("cold.flush_interval=1h", "cold.flush_bytes=64GiB", "hot.bytes_max=8GiB")

Fill = Callable[[Server, str, int, int], None]
HISTORIES: dict[str, tuple[str, int, Fill]] = {
    "bytes, 1 KiB messages": ("application/octet-stream", 1024, filling.append_messages),
    "bytes, 100 B messages": ("application/octet-stream", 100, filling.append_messages),
    "JSON, 1 KiB messages": ("application/json", 1024, filling.append_json),
    "JSON, 100 B messages": ("application/json", 100, filling.append_json),
}
FIRST_READ, LATER_READ = "after a restart", "cached"


def append_case(streams: int) -> str:
    return f"appends during flushes, {streams:,} stream{'' if streams == 1 else 's'}"


def read_case(history: str, when: str) -> str:
    return f"{history}, {when}"


def run(peers: Sequence[Peer], plan: Plan) -> Results:
    streams = crowd.size(plan)
    large_mib = min(plan.large_mib, LARGE_MIB_QUICK) if plan.is_quick else plan.large_mib
    divisor = QUICK_DIVISOR if plan.is_quick else 1
    scale_case, large_case = f"{streams:,} streams", f"random offsets of {large_mib / 1024:g} GiB"
    read_cases = [read_case(history, when) for history in HISTORIES for when in (FIRST_READ, LATER_READ)]
    results = Results(
        "cold",
        "Cold tier",
        "Appends of 1 KiB over 64 connections with a flush each second; yardstick: a server that does not flush. "
        "Replay by one reader of history that is wholly in Parquet ("
        f"{HISTORY_BYTES[1024] // divisor // MIB} MiB in messages of 1 KiB, "
        f"{HISTORY_BYTES[100] // divisor // MIB} MiB in messages of 100 B), right after a restart "
        "(the files are in the page cache) and once more from the cache of row groups; yardstick: the same history in "
        f"memory. {streams:,} streams in one data directory: start, memory, and appends of 1 KiB to random ones; "
        f"yardstick: appends to one of them. First byte from random offsets of a stream of {large_mib:,} MiB in "
        "messages of 1 MiB, after a restart, its files dropped from the page cache; no yardstick.",
        (
            Metric("p99_ms", "p99, ms", higher_is_better=False, digits=1),
            Metric("p50_ms", "p50, ms", higher_is_better=False, digits=1),
            Metric("megabytes_per_second", "MB/s"),
            Metric("per_second", "appends/s"),
            Metric("start_seconds", "start, s", higher_is_better=False, digits=2),
            Metric("restarted_mib", "memory after start, MiB", higher_is_better=False),
            Metric("used_mib", "memory after the appends, MiB", higher_is_better=False),
        ),
        [],
        [
            *(Goal(append_case(count), "p99_ms", 2, is_ratio=True) for count in APPEND_STREAMS),
            *(Goal(case, "megabytes_per_second", 300) for case in read_cases),
            Goal(scale_case, "start_seconds", 5),
            Goal(scale_case, "restarted_mib", 1024),
            Goal(scale_case, "used_mib", 1024),
            Goal(scale_case, "per_second", 0.7, is_ratio=True),
            Goal(large_case, "p50_ms", 50),
            Goal(large_case, "p99_ms", 50),
        ],
    )
    pair = [millstream(OURS, *FLUSHING), millstream(YARDSTICK, *NOT_FLUSHING)]

    def appends(count: int) -> None:
        with running(pair, plan.data_parent) as servers:
            _measure_appends(results, servers, plan, count)

    def reads() -> None:
        with running(pair, plan.data_parent) as servers:
            _measure_reads(results, servers, plan, divisor)

    def scale() -> None:
        with crowd.running(plan) as (server, created):
            _measure_scale(results, server, plan, streams, scale_case, created)

    def first_bytes() -> None:
        with running([millstream(OURS, "hot.keep_bytes=0B")], plan.data_parent) as [server]:
            _measure_first_bytes(results, server, plan, large_mib * MIB, large_case)

    for count in APPEND_STREAMS:
        _attempt(results, [append_case(count)], lambda count=count: appends(count))
    _attempt(results, read_cases, reads)
    _attempt(results, [scale_case], scale)
    _attempt(results, [large_case], first_bytes)
    return results


def _attempt(results: Results, cases: Sequence[str], measure: Callable[[], None]) -> None:
    """Measure some cases; if they cannot even be prepared, say so there and go on with the others."""
    try:
        measure()
    except (Invalid, ServerFailed, OSError) as error:
        progress(f"cold: INVALID: {error}")
        for case in cases:
            results.cell(case, OURS).problems.append(str(error))


# -- appends during flushes --------------------------------------------------------------------------------------


def _measure_appends(results: Results, servers: Sequence[Server], plan: Plan, streams: int) -> None:
    seconds = APPEND_SECONDS_QUICK if plan.is_quick else APPEND_SECONDS
    for server in servers:
        filling.create_streams(server, streams)

    def measure(case: str, server: Server) -> Figures:
        figures = _append(server, streams, seconds)
        if server.name == OURS:
            # What is left must not be flushed while the other server is measured.
            figures["flushes"] = filling.await_flushed(server)["flush_count"]
        return figures

    alternate(results, servers, [append_case(streams)], plan.rounds, measure)


def _append(server: Server, streams: int, seconds: int) -> Figures:
    arguments = (server.path(""), streams, APPEND_BYTES)
    measured = load.drive(server, "random", *arguments, connections=CONNECTIONS, seconds=seconds)
    if measured.problem:
        raise Invalid(measured.problem)
    return measured.figures()


# -- reading history ---------------------------------------------------------------------------------------------


def _measure_reads(results: Results, servers: Sequence[Server], plan: Plan, divisor: int) -> None:
    cold, hot = servers
    for server in servers:
        for history, (content_type, size, fill) in HISTORIES.items():
            with Client(server) as client:
                client.request("PUT", server.path(_stream(history)), None, content_type)
            fill(server, _stream(history), size, HISTORY_BYTES[size] // divisor)
            progress(f"cold: {server.name}: filled {history}")
    stats = filling.await_flushed(cold)
    if stats["hot_bytes"]:
        raise Invalid(f"{stats['hot_bytes']} bytes are still in memory")
    for turn in range(plan.rounds):
        for history in HISTORIES:
            cold.stop()
            cold.start()
            first, later = read_case(history, FIRST_READ), read_case(history, LATER_READ)
            record(results.cell(first, OURS), lambda history=history: _replay(cold, history))
            record(results.cell(later, OURS), lambda history=history: _replay(cold, history))
            record(results.cell(later, YARDSTICK), lambda history=history: _replay(hot, history))
            results.cells[first][YARDSTICK] = results.cell(later, YARDSTICK)
            rates = ", ".join(
                f"{cell.samples[-1]['megabytes_per_second']:,.0f}"
                for cell in (results.cell(first, OURS), results.cell(later, OURS), results.cell(later, YARDSTICK))
                if cell.samples
            )
            progress(f"cold: {history}, round {turn + 1} of {plan.rounds}: first, later, from memory: {rates}")


def _stream(history: str) -> str:
    return history.replace(",", "").replace(" ", "-")


def _replay(server: Server, history: str) -> Figures:
    begin = time.perf_counter()
    length, requests = replay(server, stream=_stream(history))
    return {"megabytes_per_second": length / (time.perf_counter() - begin) / 1e6, "requests": requests}


# -- many streams ------------------------------------------------------------------------------------------------


def _measure_scale(results: Results, server: Server, plan: Plan, streams: int, case: str, created: float) -> None:
    seconds = APPEND_SECONDS_QUICK if plan.is_quick else APPEND_SECONDS

    def restart() -> Figures:
        server.stop()
        taken = server.start(server.path(streams - 1))
        return {"start_seconds": taken, "restarted_mib": server.resident_bytes() / MIB}

    def append_to_random() -> Figures:
        return _append(server, streams, seconds) | {"used_mib": server.resident_bytes() / MIB}

    for turn in range(plan.rounds):
        record(results.cell(case, OURS), restart)
        _append(server, 1, 1)
        kinds = [(OURS, append_to_random), (YARDSTICK, lambda: _append(server, 1, seconds))]
        for column, measure in kinds if turn % 2 == 0 else reversed(kinds):
            # What the one before left to flush must not be flushed at this one's expense.
            filling.await_flushed(server)
            record(results.cell(case, column), measure)
        rates = ", ".join(
            f"{n} {c.samples[-1]['per_second']:,.0f}" for n, c in results.cells[case].items() if c.samples
        )
        progress(f"cold: {case}, round {turn + 1} of {plan.rounds}: {rates}")
    results.cell(case, OURS).notes.append(f"created in {created:.0f} s")


# -- one large stream --------------------------------------------------------------------------------------------


def _measure_first_bytes(results: Results, server: Server, plan: Plan, total: int, case: str) -> None:
    with Client(server) as client:
        client.request("PUT", server.path("large"), None, "application/octet-stream")
        begin = time.perf_counter()
        filling.append_messages(server, "large", LARGE_MESSAGE_BYTES, total)
        progress(f"cold: appended {total / MIB:,.0f} MiB in {time.perf_counter() - begin:.0f} s")
    filling.await_flushed(server)
    for turn in range(plan.rounds):
        server.stop()
        _forget(server.data)
        server.start()
        record(results.cell(case, OURS), lambda turn=turn: _first_bytes(server, total, turn))
        cell = results.cell(case, OURS)
        if cell.samples:
            times = ", ".join(f"{key} {value:.1f}" for key, value in cell.samples[-1].items())
            progress(f"cold: {case}, round {turn + 1} of {plan.rounds}: {times}")


def _first_bytes(server: Server, total: int, seed: int) -> Figures:
    """Milliseconds from a request to the first byte of its answer's body, from message boundaries chosen at random."""
    chance = random.Random(seed)
    times = []
    view = memoryview(bytearray(BUFFER_BYTES))
    address = ("127.0.0.1", server.port)
    with (
        socket.create_connection(address, TIMEOUT_SECONDS) as connection,
        connection.makefile("rb", BUFFER_BYTES) as incoming,
    ):
        for _ in range(LARGE_READS):
            offset = chance.randrange(total // LARGE_MESSAGE_BYTES) * LARGE_MESSAGE_BYTES
            path = f"{server.path('large')}?offset={0:016d}_{offset:016d}"
            begin = time.perf_counter()
            connection.sendall(f"GET {path} HTTP/1.1\r\nHost: bench\r\n\r\n".encode())
            headers = read_headers(incoming)
            incoming.peek(1)
            times.append((time.perf_counter() - begin) * 1000)
            if read_body(incoming, headers, view, None) < LARGE_MESSAGE_BYTES:
                raise Invalid(f"a read from offset {offset} gave less than a message")
    return {"p50_ms": statistics.median(times), "p99_ms": statistics.quantiles(times, n=100)[98]}


def _forget(directory: Path) -> None:
    """Drop a directory's files from the page cache, so that reading them means reading the disk."""
    for path in directory.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


BENCHMARK = Benchmark("cold", "the cold tier: flushes, replay of history, many streams, one large stream", run)
