"""Durable appends: POST of small messages, over sizes, connections and numbers of streams.

Every server is fresh for each size and number of streams, so that no case pays for what an earlier one stored. After
the runs the streams' tails are compared with what was acknowledged: an append that was answered but is not there makes
the server's cases invalid.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from bench import load
from bench.client import Client
from bench.measurement import Benchmark, Figures, Invalid, Metric, Plan, Results, alternate, progress
from bench.peers import Peer, Server, running

SIZES = {"100 B": 100, "1 KiB": 1024}
STREAMS = (1, 1000)
CONNECTIONS = (1, 16, 64, 256)
WARM_UP_SECONDS = 1
CREATE_SECONDS_MAX = 60


def case_name(size: str, streams: int, connections: int) -> str:
    plural = "" if streams == 1 else "s"
    return f"{size}, {streams:,} stream{plural}, {connections} conn."


def run(peers: Sequence[Peer], plan: Plan) -> Results:
    results = Results(
        "appends",
        "Durable appends",
        "wrk POSTs messages without a pause over keep-alive connections, to the streams in turn. "
        "`Node, memory` acknowledges without storing anything on disk.",
        (
            Metric("per_second", "requests/s"),
            Metric("p50_ms", "p50, ms", higher_is_better=False, digits=2),
            Metric("p99_ms", "p99, ms", higher_is_better=False, digits=2),
            Metric("server_cpu_us", "server processor time a request, µs", higher_is_better=False, digits=1),
        ),
        [case_name("100 B", 1, 64), case_name("100 B", 1000, 64), case_name("1 KiB", 1000, 64)],
    )
    for size, size_bytes in SIZES.items():
        for streams in STREAMS:
            with running(peers, plan.data_parent) as servers:
                _measure_group(results, servers, plan, size, size_bytes, streams)
    return results


def _measure_group(
    results: Results, servers: Sequence[Server], plan: Plan, size: str, size_bytes: int, streams: int
) -> None:
    acknowledged: Counter[str] = Counter()
    cases = {case_name(size, streams, connections): connections for connections in CONNECTIONS}

    def append(server: Server, connections: int, seconds: int) -> load.Load:
        arguments = (server.path(""), streams, size_bytes)
        measured = load.drive(server, "append", *arguments, connections=connections, seconds=seconds)
        acknowledged[server.name] += measured.requests - measured.refused
        return measured

    def measure(case: str, server: Server) -> Figures:
        measured = append(server, cases[case], plan.seconds)
        if measured.problem:
            raise Invalid(measured.problem)
        return measured.figures()

    for server in servers:
        created = load.create_streams(server, streams, 0, CREATE_SECONDS_MAX)
        if created.problem:
            progress(f"appends: {server.name}: creating {streams:,} streams: {created.problem}")
        append(server, 16, WARM_UP_SECONDS)
    alternate(results, servers, cases, plan.rounds, measure)
    for server in servers:
        problem = _missing(server, streams, acknowledged[server.name] * size_bytes)
        if problem is not None:
            for case in cases:
                results.cell(case, server.name).problems.append(problem)


def _missing(server: Server, streams: int, acknowledged_bytes: int) -> str | None:
    try:
        lacking = acknowledged_bytes - _stored_bytes(server, streams)
    except OSError as error:
        return f"what was stored could not be checked: {error}"
    return f"{lacking:,} acknowledged bytes are not in the streams" if lacking > 0 else None


def _stored_bytes(server: Server, streams: int) -> int:
    with Client(server) as client:
        return sum(client.tail_bytes(server.path(index)) for index in range(streams))


BENCHMARK = Benchmark("appends", "durable appends: sizes × connections × streams", run)
