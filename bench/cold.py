"""The cold tier: millstream with history as Parquet on a local folder, against itself without, in the same run.

Its parts can be run one by one (`--part`), and leave the others' results as they are:

- `flushes`: appends while flushes run, against a server that does not flush.
- `history`: catch-up reads of history that is wholly cold, against the same history in memory; live readers meanwhile.
- `streams`: very many streams in one data directory: start, memory, and appends to random streams against one.
- `large`: time to the first byte from random offsets of one large stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from bench import crowd, filling, history, scale
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
)
from bench.peers import Peer, Server, ServerFailed, millstream, running

MIB = 1 << 20
APPEND_STREAMS = (1, 1000)
APPEND_SECONDS = 6
APPEND_SECONDS_QUICK = 2
# Long enough for whole flushes, and what they cost, to be part of it.
SCALE_SECONDS = 20
LARGE_MIB_QUICK = 128
PARTS = ("flushes", "history", "streams", "large")

FLUSHING = ("cold.flush_interval=1s", "cold.flush_bytes=16MiB", "hot.keep_bytes=0B")
NOT_FLUSHING = ("cold.flush_interval=1h", "cold.flush_bytes=64GiB", "hot.bytes_max=8GiB")
# Everything else as shipped: what is cold is not in memory too.
COLD = ("hot.keep_bytes=0B",)


def append_case(streams: int) -> str:
    return f"appends during flushes, {streams:,} stream{'' if streams == 1 else 's'}"


def run(peers: Sequence[Peer], plan: Plan) -> Results:
    streams = crowd.size(plan)
    large_mib = min(plan.large_mib, LARGE_MIB_QUICK) if plan.is_quick else plan.large_mib
    seconds = APPEND_SECONDS_QUICK if plan.is_quick else APPEND_SECONDS
    scale_seconds = APPEND_SECONDS_QUICK if plan.is_quick else SCALE_SECONDS
    scale_case = f"{streams:,} streams"
    large_cases = [f"random offsets of {large_mib / 1024:g} GiB, {when}" for when in ("from disk", "again")]
    results = Results(
        "cold",
        "Cold tier",
        "Appends of 1 KiB over 64 connections with a flush each second; yardstick: a server that does not flush. "
        "Replay by one reader of history that is wholly in Parquet (64 MiB of bytes and 96 MiB of JSON in messages of "
        "1 KiB, 32 and 64 MiB in messages of 100 B), flushed as by default, right after a restart (the files are in "
        "the page cache), once more from the cache of row groups, and from the files with next to no cache; yardstick: "
        "the same history in memory. Append-to-SSE latency while a reader catches up again and again; yardstick: the "
        "same server without that reader. "
        f"{streams:,} streams in one data directory: start, memory, and appends of 1 KiB to random ones; "
        f"yardstick: appends to one of them. First byte from 300 random offsets of a stream of {large_mib:,} MiB in "
        "messages of 1 MiB, after a restart, its files dropped from the page cache, and from the same offsets again; "
        "no yardstick.",
        (
            Metric("p99_ms", "p99, ms", higher_is_better=False, digits=1),
            Metric("p50_ms", "p50, ms", higher_is_better=False, digits=1),
            Metric("max_ms", "longest, ms", higher_is_better=False, digits=1),
            Metric("megabytes_per_second", "MB/s"),
            Metric("client_busy", "share of the time the reader was busy", higher_is_better=False, digits=2),
            Metric("per_second", "appends/s"),
            Metric("start_seconds", "start, s", higher_is_better=False, digits=2),
            Metric("restarted_mib", "memory after start, MiB", higher_is_better=False),
            Metric("used_mib", "memory after the appends, MiB", higher_is_better=False),
        ),
        [],
        [
            *(Goal(append_case(count), "p99_ms", 2, is_ratio=True) for count in APPEND_STREAMS),
            *(Goal(case, "megabytes_per_second", 300) for case in history.GOAL_CASES),
            Goal(history.LIVE_CASE, "p99_ms", 2, is_ratio=True),
            Goal(scale_case, "start_seconds", 5),
            Goal(scale_case, "restarted_mib", 1024),
            Goal(scale_case, "used_mib", 1024),
            Goal(scale_case, "per_second", 0.7, is_ratio=True),
            *(Goal(case, key, 50) for case in large_cases for key in ("p50_ms", "p99_ms", "max_ms")),
        ],
    )
    pair = [millstream(OURS, *FLUSHING), millstream(YARDSTICK, *NOT_FLUSHING)]

    def appends(count: int) -> None:
        with running(pair, plan.data_parent) as servers:
            _measure_appends(results, servers, plan, count, seconds)

    def replays() -> None:
        with running([millstream(OURS, *COLD), pair[1]], plan.data_parent) as servers:
            history.measure(results, servers, plan, COLD)

    def first_bytes() -> None:
        with crowd.large(plan, COLD) as server:
            scale.fill_large(server, large_mib * MIB)
            scale.measure_first_bytes(results, server, plan, large_mib * MIB, *large_cases)

    parts: list[tuple[str, list[str], Callable[[], None]]] = [
        *(("flushes", [append_case(count)], partial(appends, count)) for count in APPEND_STREAMS),
        ("history", [*history.READ_CASES, history.LIVE_CASE], replays),
        ("streams", [scale_case], partial(scale.measure_streams, results, plan, streams, scale_case, scale_seconds)),
        ("large", large_cases, first_bytes),
    ]
    for part, cases, measure in parts:
        if not plan.parts or part in plan.parts:
            _attempt(results, cases, measure)
    return results


def _attempt(results: Results, cases: Sequence[str], measure: Callable[[], None]) -> None:
    """Measure some cases; if they cannot even be prepared, say so there and go on with the others."""
    try:
        measure()
    except (Invalid, ServerFailed, OSError) as error:
        progress(f"cold: INVALID: {error}")
        for case in cases:
            results.cell(case, OURS).problems.append(str(error))


def _measure_appends(results: Results, servers: Sequence[Server], plan: Plan, streams: int, seconds: int) -> None:
    for server in servers:
        filling.create_streams(server, streams)

    def measure(case: str, server: Server) -> Figures:
        figures = scale.append(server, streams, seconds)
        if server.name == OURS:
            # What is left must not be flushed while the other server is measured.
            figures["flushes"] = filling.await_flushed(server)["flush_count"]
        return figures

    alternate(results, servers, [append_case(streams)], plan.rounds, measure)


BENCHMARK = Benchmark("cold", "the cold tier: flushes, replay of history, many streams, one large stream", run)
