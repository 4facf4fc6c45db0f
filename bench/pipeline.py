"""The jobs: compaction and snapshots in bulk, on Spark with two cores beside the server.

- Compaction: history of small JSON messages in many segments becomes a few large ones; payload bytes a second from the
  start of the job (its session is there) to the last commit, which the server has checked byte by byte.
- Materialize: very many streams are folded and published as snapshots.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from bench import filling
from bench.measurement import OURS, Benchmark, Figures, Goal, Invalid, Metric, Plan, Results, progress, record
from bench.peers import Peer, Server, millstream, running

MESSAGE_BYTES = 200
MESSAGES_PER_APPEND = 500
STREAMS = 1_000
BUCKET = "bench"  # where the benchmarks' servers keep their streams
PAYLOAD_MIB = 512
PAYLOAD_MIB_QUICK = 128
FOLDED_STREAMS = 100_000
FOLDED_STREAMS_QUICK = 5_000
SETTINGS = ("cold.flush_interval=2s", "cold.flush_bytes=16MiB", "hot.keep_bytes=0B", "cold.reclaim_grace=1h")

COMPACTION = "compaction of 200-byte JSON messages in 1,000 streams"
MATERIALIZE = "fold and publish snapshots of many streams"
METRICS = (
    Metric("megabytes_per_second", "payload MB/s"),
    Metric("streams_per_second", "streams/s"),
    Metric("segments_before", "segments before"),
    Metric("segments_after", "after", higher_is_better=False),
    Metric("worker_mib", "largest worker, MiB", higher_is_better=False),
)


def run(peers: Sequence[Peer], plan: Plan) -> Results:
    results = Results(
        "pipeline",
        "The jobs on Spark",
        "local[2] in a process of its own beside the server; the server's checks and its commit are included.",
        METRICS,
        (COMPACTION,),
        (Goal(COMPACTION, "megabytes_per_second", 40.0),),
    )
    with running([millstream(OURS, *SETTINGS)], plan.data_parent) as [server]:
        record(results.cell(COMPACTION, OURS), lambda: _compaction(server, plan))
        progress(f"pipeline: {COMPACTION}: {results.cell(COMPACTION, OURS).samples}")
    with running([millstream(OURS, *SETTINGS)], plan.data_parent) as [server]:
        record(results.cell(MATERIALIZE, OURS), lambda: _materialize(server, plan))
        progress(f"pipeline: {MATERIALIZE}: {results.cell(MATERIALIZE, OURS).samples}")
    return results


def _compaction(server: Server, plan: Plan) -> Figures:
    from millstream.pipeline.compact import CompactOptions, compact
    from millstream.spark.options import read_options
    from millstream.spark.session import spark_session

    mib = PAYLOAD_MIB_QUICK if plan.is_quick else PAYLOAD_MIB
    _create(server, STREAMS)
    filling.pipeline(server, _appends(server, STREAMS, mib << 20))
    filling.await_flushed(server)
    options = read_options({"url": server.url, "bucket": "-"})
    spark = spark_session("millstream bench", "local[2]")
    spark.range(2, numPartitions=2).mapInArrow(lambda batches: batches, "id long").count()  # the workers are up
    summary = compact(spark, CompactOptions(options.connection, options.cold))
    spark.stop()
    if summary.payload_bytes < (mib << 20) // 2:  # segments that were large from the start are left alone
        raise Invalid(f"{summary.payload_bytes:,} bytes were compacted of {mib} MiB")
    return {
        "megabytes_per_second": summary.payload_bytes / 1e6 / summary.seconds,
        "segments_before": summary.segments_before,
        "segments_after": summary.segments_after,
        "worker_mib": summary.task_memory_bytes / (1 << 20),
    }


def _materialize(server: Server, plan: Plan) -> Figures:
    from millstream.pipeline.materialize import MaterializeOptions, materialize
    from millstream.spark.options import read_options
    from millstream.spark.session import spark_session

    count = FOLDED_STREAMS_QUICK if plan.is_quick else FOLDED_STREAMS
    _create(server, count)
    body = b'[{"a":1,"b":{"c":2}},{"b":{"c":null,"d":4}},{"e":"five"}]'
    appends = (filling.request("POST", server.path(index), body, "application/json") for index in range(count))
    filling.pipeline(server, appends)
    filling.await_flushed(server)
    connection = read_options({"url": server.url, "bucket": "-"}).connection
    spark = spark_session("millstream bench", "local[2]")
    summary = materialize(spark, MaterializeOptions(connection, {"url": server.url}, BUCKET, "merge-patch"))
    spark.stop()
    if summary.published != count:
        raise Invalid(f"{summary.published:,} of {count:,} snapshots were published")
    return {"streams_per_second": count / summary.seconds}


def _create(server: Server, count: int) -> None:
    create = filling.request("PUT", server.path("{}"), b"", "application/json").decode()
    filling.pipeline(server, (create.format(index).encode() for index in range(count)))


def _appends(server: Server, streams: int, total: int) -> Iterator[bytes]:
    payloads, chance = filling.Payloads(MESSAGE_BYTES), random.Random(2)
    sent = 0
    while sent < total:
        messages = [payloads.json() for _ in range(MESSAGES_PER_APPEND)]
        body = b"[" + b",".join(messages) + b"]"
        yield filling.request("POST", server.path(chance.randrange(streams)), body, "application/json")
        sent += sum(map(len, messages))


BENCHMARK = Benchmark("pipeline", "The jobs on Spark", run)
