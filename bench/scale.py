"""How far one data directory goes: a million streams, and one stream of very many bytes."""

from __future__ import annotations

import os
import random
import socket
import statistics
import time
from functools import partial
from pathlib import Path

from bench import crowd, filling, load
from bench.client import Client
from bench.measurement import OURS, YARDSTICK, Cell, Figures, Invalid, Plan, Results, progress, record
from bench.peers import Server
from bench.replay import BUFFER_BYTES, read_body, read_headers

MIB = 1 << 20
CONNECTIONS = 64
APPEND_BYTES = 1024
LARGE_MESSAGE_BYTES = MIB
LARGE_PORTION_BYTES = 1 << 30
LARGE_BACKLOG_SECONDS_MAX = 120.0
LARGE_READS = 300
TIMEOUT_SECONDS = 60.0
LARGE_STREAM = "large"


def append(server: Server, streams: int, seconds: int) -> Figures:
    """Appends to random ones of the first so many streams; one is chosen in the same way as a million."""
    arguments = (server.path(""), streams, APPEND_BYTES)
    measured = load.drive(server, "random", *arguments, connections=CONNECTIONS, seconds=seconds)
    if measured.problem:
        raise Invalid(measured.problem)
    return measured.figures()


# -- many streams ------------------------------------------------------------------------------------------------


def measure_streams(results: Results, plan: Plan, streams: int, case: str, seconds: int) -> None:
    with crowd.running(plan) as (server, created):

        def restart() -> Figures:
            server.stop()
            taken = server.start(server.path(streams - 1))
            return {"start_seconds": taken, "restarted_mib": server.resident_bytes() / MIB}

        def append_to_random() -> Figures:
            return append(server, streams, seconds) | {"used_mib": server.resident_bytes() / MIB}

        for turn in range(plan.rounds):
            record(results.cell(case, OURS), restart)
            append(server, 1, 1)
            kinds = [(OURS, append_to_random), (YARDSTICK, lambda: append(server, 1, seconds))]
            for column, measure in kinds if turn % 2 == 0 else reversed(kinds):
                # What the one before left to flush must not be flushed at this one's expense.
                filling.await_flushed(server)
                record(results.cell(case, column), measure)
            rates = ", ".join(
                f"{n} {c.samples[-1]['per_second']:,.0f}" for n, c in results.cells[case].items() if c.samples
            )
            progress(f"cold: {case}, round {turn + 1} of {plan.rounds}: {rates}")
        if created:
            results.cell(case, OURS).notes.append(f"created in {created:.0f} s")


# -- one large stream --------------------------------------------------------------------------------------------


def fill_large(server: Server, total: int) -> None:
    """Fill the large stream, no faster than it can be flushed, unless it holds that much already."""
    path = server.path(LARGE_STREAM)
    with Client(server) as client:
        client.request("PUT", path, None, "application/octet-stream")
        length, begin = client.tail_bytes(path), time.perf_counter()
    while length < total:
        portion = min(LARGE_PORTION_BYTES, total - length)
        filling.append_messages(server, LARGE_STREAM, LARGE_MESSAGE_BYTES, portion)
        length += portion
        filling.await_backlog(server, LARGE_PORTION_BYTES, LARGE_BACKLOG_SECONDS_MAX)
        progress(f"cold: {length / MIB:,.0f} of {total / MIB:,.0f} MiB after {time.perf_counter() - begin:.0f} s")
    filling.await_flushed(server)


def measure_first_bytes(results: Results, server: Server, plan: Plan, total: int, cold: str, warm: str) -> None:
    for turn in range(plan.rounds):
        server.stop()
        _forget(server.data)
        server.start()
        for case in (cold, warm):
            cell = results.cell(case, OURS)
            record(cell, partial(_first_bytes, server, total, turn))
            progress(f"cold: {case}, round {turn + 1} of {plan.rounds}: {_shown(cell)}")


def _shown(cell: Cell) -> str:
    return ", ".join(f"{key} {value:.1f}" for key, value in cell.samples[-1].items()) if cell.samples else "invalid"


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
            path = f"{server.path(LARGE_STREAM)}?offset={0:016d}_{offset:016d}"
            begin = time.perf_counter()
            connection.sendall(f"GET {path} HTTP/1.1\r\nHost: bench\r\n\r\n".encode())
            headers = read_headers(incoming)
            incoming.peek(1)
            times.append((time.perf_counter() - begin) * 1000)
            if read_body(incoming, headers, view, None) < LARGE_MESSAGE_BYTES:
                raise Invalid(f"a read from offset {offset} gave less than a message")
    percentiles = statistics.quantiles(times, n=100)
    return {"p50_ms": percentiles[49], "p99_ms": percentiles[98], "max_ms": max(times)}


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
