"""Start-up time and memory with many streams: create them, stop the server, start it again.

The time runs from the start of the process until it answers HEAD of the last stream with 200, so a server that
listens before it knows its streams gains nothing. Files are in the page cache. A server that cannot create the
streams within the time limit is measured with those it has, and the summary says how many.
"""

from __future__ import annotations

from collections.abc import Sequence

from bench import load
from bench.measurement import Benchmark, Cell, Figures, Invalid, Metric, Plan, Results, alternate, progress, record
from bench.peers import Peer, Server, running

STREAMS = 100_000
STREAMS_QUICK = 5_000
CREATE_SECONDS_MAX = 60
# A server that takes longer than this to start is started once, not once a round.
SLOW_SECONDS = 20.0
MIB = 1 << 20


def run(peers: Sequence[Peer], plan: Plan) -> Results:
    wanted = STREAMS_QUICK if plan.is_quick else STREAMS
    case = f"{wanted:,} streams"
    results = Results(
        "startup",
        "Start-up and memory",
        f"{wanted:,} empty streams are created; then the server is stopped and started again, {plan.rounds} times "
        f"(once if that takes longer than {SLOW_SECONDS:.0f} s). Time: from process start to the first 200 for HEAD of "
        "the last stream. Memory: resident bytes of the process.",
        (
            Metric("start_seconds", "start, s", higher_is_better=False, digits=2),
            Metric("restarted_mib", "memory after start, MiB", higher_is_better=False),
            Metric("filled_mib", "memory after creating, MiB", higher_is_better=False),
            Metric("created_per_second", "streams created/s"),
        ),
        [case],
    )
    with running(peers, plan.data_parent) as servers:
        for server in servers:
            record(results.cell("no streams", server.name), lambda server=server: _restart(server, None))
        created = {}
        for server in servers:
            record(results.cell(case, server.name), lambda server=server: _fill(server, wanted, created))
            progress(f"startup: {server.name} created {created.get(server.name, 0):,} streams")
            if 0 < created.get(server.name, 0) < wanted:
                note = f"only {created[server.name]:,} streams after {CREATE_SECONDS_MAX} s"
                results.cell(case, server.name).notes.append(note)
        lasting = [server for server in servers if server.peer.is_persistent and created.get(server.name)]

        def restart(case: str, server: Server) -> Figures:
            return _restart(server, server.path(created[server.name] - 1))

        alternate(results, lasting, [case], 1, restart)
        quick = [server for server in lasting if _start_seconds(results.cell(case, server.name)) < SLOW_SECONDS]
        if quick:
            alternate(results, quick, [case], plan.rounds - 1, restart)
        for server in servers:
            if not server.peer.is_persistent:
                results.cell(case, server.name).notes.append("keeps nothing over a restart")
    return results


def _fill(server: Server, wanted: int, created: dict[str, int]) -> Figures:
    measured = load.create_streams(server, wanted, 0, CREATE_SECONDS_MAX)
    if measured.problem:
        raise Invalid(f"creating streams: {measured.problem}")
    # When time was up, some of the last requests were still in flight.
    is_complete = measured.requests >= wanted
    created[server.name] = wanted if is_complete else max(0, measured.requests - load.CREATE_CONNECTIONS)
    return {"filled_mib": server.resident_bytes() / MIB, "created_per_second": measured.per_second}


def _start_seconds(cell: Cell) -> float:
    return cell.samples[-1].get("start_seconds", SLOW_SECONDS) if cell.samples else SLOW_SECONDS


def _restart(server: Server, probe_path: str | None) -> Figures:
    server.stop()
    seconds = server.start(probe_path)
    return {"start_seconds": seconds, "restarted_mib": server.resident_bytes() / MIB}


BENCHMARK = Benchmark("startup", "start-up time and memory with 100,000 streams", run)
