"""Small reads: GET of a stream with one message of 100 bytes, and HEAD.

wrk cannot read the answer to a HEAD on a connection that stays open (it waits for a body), so HEAD is measured with
a connection for each request, for every server alike: the figure is connect, ask, answer, close.
"""

from __future__ import annotations

from collections.abc import Sequence

from bench import load
from bench.client import Client
from bench.measurement import Benchmark, Figures, Invalid, Metric, Plan, Results, alternate
from bench.peers import Peer, Server, running

MESSAGE = b"x" * 100
STREAM = "small"
# Case: method, query, connections, what becomes of the connection.
CASES = {
    "GET 100 B, 1 conn.": ("GET", "?offset=-1", 1, "keep"),
    "GET 100 B, 64 conn.": ("GET", "?offset=-1", 64, "keep"),
    "HEAD, 64 conn., a connection each": ("HEAD", "", 64, "close"),
}
WARM_UP_SECONDS = 1


def run(peers: Sequence[Peer], plan: Plan) -> Results:
    results = Results(
        "reads",
        "Small reads",
        "wrk reads a stream that holds one message of 100 bytes, from its start. HEAD takes a connection for each "
        "request, because wrk cannot keep one open after a HEAD.",
        (
            Metric("per_second", "requests/s"),
            Metric("p50_ms", "p50, ms", higher_is_better=False, digits=2),
            Metric("p99_ms", "p99, ms", higher_is_better=False, digits=2),
            Metric("server_cpu_us", "server processor time a request, µs", higher_is_better=False, digits=1),
        ),
        [case for case in CASES if "64" in case],
    )

    def read(case: str, server: Server, seconds: int) -> Figures:
        method, query, connections, connection = CASES[case]
        path = server.path(STREAM) + query
        measured = load.drive(
            server,
            "read",
            method,
            path,
            connection,
            connections=connections,
            seconds=seconds,
            closes=connection == "close",
        )
        if measured.problem:
            raise Invalid(measured.problem)
        return measured.figures()

    with running(peers, plan.data_parent) as servers:
        for server in servers:
            _prepare(server)
            read("GET 100 B, 64 conn.", server, WARM_UP_SECONDS)
        alternate(results, servers, CASES, plan.rounds, lambda case, server: read(case, server, plan.seconds))
    return results


def _prepare(server: Server) -> None:
    with Client(server) as client:
        client.request("PUT", server.path(STREAM), content_type="text/plain")
        client.request("POST", server.path(STREAM), MESSAGE, "text/plain")
        answer = client.request("GET", server.path(STREAM) + "?offset=-1")
    if (answer.status, answer.body) != (200, MESSAGE):
        raise Invalid(f"{server.name} answered {answer.status} with {len(answer.body)} bytes instead of the message")


BENCHMARK = Benchmark("reads", "small reads: GET of 100 bytes, HEAD", run)
