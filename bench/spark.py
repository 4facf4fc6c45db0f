"""The Spark data source: reads of history, exactly-once writes, and how long a message takes through a stream.

- A read of cold history, against `spark.read.parquet` over the same files with the same columns and the same sums.
- The same rows against the feed over HTTP, in its Arrow form, by as many tasks; and against plain GETs of the streams,
  which bring the payloads alone, without positions.
- A batch write of small messages into 1,000 streams.
- From an append to the output of a query with a trigger of one second.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import filling
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

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql import DataFrame, SparkSession

READ_MESSAGES = 5_000_000
READ_MESSAGES_QUICK = 200_000
MESSAGE_BYTES = 200
MESSAGES_PER_APPEND = 500
STREAMS = 1000
WRITE_MESSAGES = 1_000_000
WRITE_MESSAGES_QUICK = 50_000
LIVE_MESSAGES = 40
LIVE_MESSAGES_QUICK = 5
WAIT_SECONDS = 60.0
COLUMNS = ("stream", "position", "payload")
SCHEMA = "stream STRING, position LONG, payload BINARY"
TASKS = 4
WARM_UPS = 8
SUMS = ("count(*)", "sum(length(payload))", "max(position)", "max(stream)")

WRITE_CASE = f"exactly-once write into {STREAMS:,} streams"
LIVE_CASE = "append to output, trigger of one second"


def run(peers: Sequence[Peer], plan: Plan) -> Results:
    messages = READ_MESSAGES_QUICK if plan.is_quick else READ_MESSAGES
    parquet_case = f"{messages:,} cold messages, against spark.read.parquet"
    feed_case = f"{messages:,} cold messages, against the feed over HTTP"
    http_case = f"{messages:,} cold messages, against GETs of the payloads alone"
    results = Results(
        "spark",
        "Spark data source",
        f"Spark on two cores beside the server. Reads of {messages:,} JSON messages of {MESSAGE_BYTES} B in "
        f"{STREAMS:,} streams, wholly cold, columns {', '.join(COLUMNS)}, with {', '.join(SUMS)}; yardsticks: "
        "spark.read.parquet over the same files; tasks that fetch the same rows over HTTP, from the feed as Arrow; and "
        "tasks that GET the streams, which gives the payloads without their positions. Writes of messages of about "
        "50 B in two partitions. From an append to the arrival of its copy at a "
        "long-poll, through a query from one stream into another with a trigger of one second.",
        (
            Metric("megabytes_per_second", "MB/s"),
            Metric("per_second", "messages/s"),
            Metric("p95_seconds", "p95, s", higher_is_better=False, digits=2),
            Metric("p50_seconds", "p50, s", higher_is_better=False, digits=2),
        ),
        [],
        [
            Goal(parquet_case, "megabytes_per_second", 0.7, is_ratio=True),
            Goal(feed_case, "megabytes_per_second", 3, is_ratio=True),
            Goal(WRITE_CASE, "per_second", 50_000),
            Goal(LIVE_CASE, "p95_seconds", 3),
        ],
    )
    settings = ("hot.keep_bytes=0B", "cold.flush_interval=2s")
    with running([millstream(OURS, *settings)], plan.data_parent) as [server], _session() as spark:
        _measure_reads(results, server, spark, plan, messages, (parquet_case, feed_case, http_case))
        _measure_writes(results, server, spark, plan)
        record(results.cell(LIVE_CASE, OURS), lambda: _live(server, spark, plan))
    return results


@contextlib.contextmanager
def _session() -> Iterator[SparkSession]:
    try:
        from millstream.spark.session import spark_session
    except ImportError:
        raise Invalid("PySpark is not installed (pip install 'millstream[spark]')") from None
    spark = spark_session("millstream bench", "local[2]", **{"spark.log.level": "ERROR"})
    try:
        yield spark
    finally:
        spark.stop()


# -- reads -------------------------------------------------------------------------------------------------------


def _measure_reads(
    results: Results,
    server: Server,
    spark: SparkSession,
    plan: Plan,
    messages: int,
    cases: tuple[str, str, str],
) -> None:
    parquet_case, feed_case, http_case = cases
    _fill(server, messages)
    stats = filling.await_flushed(server)
    if stats["hot_bytes"]:
        raise Invalid(f"{stats['hot_bytes']} bytes are still in memory")
    # Two matches, one after the other: what the virtual machine has learned of one way slows it down in another.
    matches = [
        {
            (parquet_case, OURS): lambda: _source(spark, server),
            (parquet_case, YARDSTICK): lambda: spark.read.parquet(f"{server.data}/cold/segments").select(*COLUMNS),
        },
        {
            (feed_case, YARDSTICK): lambda: _over_feed(spark, server, stats["last_position"]),
            (http_case, YARDSTICK): lambda: _over_http(spark, server),
        },
    ]
    for ways in matches:
        # The first ones start Python workers, and the virtual machine compiles for some time.
        for _ in range(WARM_UPS if ways is matches[0] else 1):
            for way in ways.values():
                _sums(way())
        for turn in range(plan.rounds):
            for (case, column), way in list(ways.items()) if turn % 2 == 0 else reversed(ways.items()):
                record(results.cell(case, column), lambda way=way: _read(way(), messages))
                for sample in results.cell(case, column).samples[-1:]:
                    rate = sample["megabytes_per_second"]
                    progress(f"spark: round {turn + 1} of {plan.rounds}: {case}: {column} {rate:,.0f} MB/s")
    for case in (feed_case, http_case):
        results.cells.setdefault(case, {})[OURS] = results.cell(parquet_case, OURS)


def _fill(server: Server, messages: int) -> None:
    payloads = filling.Payloads(MESSAGE_BYTES)
    with Client(server) as client:
        client.request("PUT", "/bench")
    paths = [server.path(f"run-{number:04d}") for number in range(STREAMS)]
    filling.pipeline(server, (filling.request("PUT", path, b"", "application/json") for path in paths))
    each = min(MESSAGES_PER_APPEND, messages // STREAMS)

    def requests() -> Iterator[bytes]:
        for path in itertools.islice(itertools.cycle(paths), messages // each):
            body = b"[%b]" % b",".join(payloads.json() for _ in range(each))
            yield filling.request("POST", path, body, "application/json")

    filling.pipeline(server, requests(), depth=4)
    progress(f"spark: filled {messages:,} messages")


def _source(spark: SparkSession, server: Server) -> DataFrame:
    reader = spark.read.format("millstream").option("url", server.url).option("bucket", "bench")
    return reader.option("columns", ",".join(COLUMNS)).load()


def _over_feed(spark: SparkSession, server: Server, latest: int) -> DataFrame:
    from millstream.spark.options import read_options
    from millstream.spark.source_client import SourceClient

    connection = read_options({"url": server.url, "bucket": "bench"}).connection
    share = -(-latest // TASKS)

    def fetch(batches: Iterator[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
        import pyarrow.compute as compute

        feed = SourceClient(connection)
        for batch in batches:
            for number in batch.column("id").to_pylist():
                after, last = number * share, min((number + 1) * share, latest)
                while after < last:
                    page = feed.feed("bench", 0, after, "")
                    is_wanted = (compute.field("event") == "message") & (compute.field("position") <= last)
                    yield from page.table.filter(is_wanted).select(list(COLUMNS)).to_batches()
                    after = page.position
        feed.close()

    return spark.range(0, TASKS, 1, TASKS).mapInArrow(fetch, SCHEMA)


def _over_http(spark: SparkSession, server: Server) -> DataFrame:
    port = server.port

    def fetch(batches: Iterator[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
        import msgspec
        import pyarrow

        decoder = msgspec.json.Decoder(list[msgspec.Raw])
        link = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        for batch in batches:
            for stream in batch.column("stream").to_pylist():
                offset = "-1"
                while True:
                    link.request("GET", f"/v1/stream/bench/{stream}?offset={offset}")
                    answer = link.getresponse()
                    found = [bytes(one) for one in decoder.decode(answer.read())]
                    offset = answer.getheader("stream-next-offset")
                    columns = [
                        pyarrow.array([stream] * len(found), pyarrow.string()),
                        pyarrow.array([0] * len(found), pyarrow.int64()),
                        pyarrow.array(found, pyarrow.binary()),
                    ]
                    yield pyarrow.record_batch(columns, names=list(COLUMNS))
                    if answer.getheader("stream-up-to-date") == "true":
                        break
        link.close()

    names = spark.range(0, STREAMS, 1, TASKS).selectExpr("format_string('run-%04d', id) AS stream")
    return names.mapInArrow(fetch, SCHEMA)


def _sums(frame: DataFrame) -> Any:
    return frame.selectExpr(*SUMS).first()


def _read(frame: DataFrame, messages: int) -> Figures:
    begin = time.perf_counter()
    found = _sums(frame)
    seconds = time.perf_counter() - begin
    if found[0] != messages:
        raise Invalid(f"{found[0]:,} messages were read of {messages:,}")
    return {"megabytes_per_second": found[1] / seconds / 1e6, "per_second": messages / seconds}


# -- writes ------------------------------------------------------------------------------------------------------


def _measure_writes(results: Results, server: Server, spark: SparkSession, plan: Plan) -> None:
    messages = WRITE_MESSAGES_QUICK if plan.is_quick else WRITE_MESSAGES
    with Client(server) as client:
        client.request("PUT", "/written")
    for turn in range(plan.rounds + 1):
        target = f"{turn}-"
        rows = spark.range(0, messages, 1, 2).selectExpr(
            f"concat('{target}', id % {STREAMS}) AS stream", "to_json(struct(id, 'small message' AS text)) AS payload"
        )
        rows = rows.persist()
        rows.count()

        def write(rows: DataFrame = rows, target: str = target) -> Figures:
            begin = time.perf_counter()
            sink = rows.write.format("millstream").option("url", server.url).option("bucket", "written")
            sink.mode("append").save()
            seconds = time.perf_counter() - begin
            found = spark.read.format("millstream").option("url", server.url).option("bucket", "written")
            count = found.option("prefix", target).option("columns", "position").load().count()
            if count != messages:
                raise Invalid(f"{count:,} messages are there of {messages:,}")
            return {"per_second": messages / seconds}

        if turn == 0:
            write()  # starts the workers
            continue
        record(results.cell(WRITE_CASE, OURS), write)
        rows.unpersist()
        progress(f"spark: writes, round {turn} of {plan.rounds}: {results.cell(WRITE_CASE, OURS).samples[-1:]}")


# -- live --------------------------------------------------------------------------------------------------------


def _live(server: Server, spark: SparkSession, plan: Plan) -> Figures:
    """Seconds from before an append to when its copy arrives at a reader that waits for it."""
    count = LIVE_MESSAGES_QUICK if plan.is_quick else LIVE_MESSAGES
    with Client(server) as client, tempfile.TemporaryDirectory(prefix="millstream-bench-") as scratch:
        client.request("PUT", "/live")
        for name in ("in", "out"):
            client.request("PUT", f"/v1/stream/live/{name}", None, "application/json")
        options = {"url": server.url, "bucket": "live"}
        rows = spark.readStream.format("millstream").options(**options, stream="in", startingOffsets="earliest").load()
        sink = rows.selectExpr("'out' AS stream", "payload").writeStream.format("millstream").options(**options)
        sink = sink.option("checkpointLocation", str(Path(scratch) / "checkpoint"))
        query = sink.trigger(processingTime="1 second").start()
        arrived: dict[int, float] = {}
        follower = threading.Thread(target=_follow, args=(server.port, arrived, count + 1), daemon=True)
        follower.start()
        sent: dict[int, float] = {}
        try:
            for number in range(count + 1):
                sent[number] = time.perf_counter()
                client.request("POST", "/v1/stream/live/in", json.dumps({"n": number}).encode(), "application/json")
                if number == 0:
                    _await(lambda: bool(arrived), "the first message")
                time.sleep(0.45)
            _await(lambda: len(arrived) == count + 1, "all messages")
        finally:
            query.stop()
        follower.join(WAIT_SECONDS)
    times = [arrived[number] - sent[number] for number in range(1, count + 1)]
    return {"p50_seconds": statistics.median(times), "p95_seconds": statistics.quantiles(times, n=20)[18]}


def _await(condition: Any, what: str) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise Invalid(f"{what} did not arrive within {WAIT_SECONDS:.0f} s")
        time.sleep(0.01)


def _follow(port: int, arrived: dict[int, float], count: int) -> None:
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_SECONDS)
    offset = "-1"
    while len(arrived) < count:
        link.request("GET", f"/v1/stream/live/out?offset={offset}&live=long-poll")
        answer = link.getresponse()
        body = answer.read()
        offset = answer.getheader("stream-next-offset") or offset
        for message in json.loads(body) if body else []:
            arrived.setdefault(message["n"], time.perf_counter())
    link.close()


BENCHMARK = Benchmark("spark", "the Spark data source: cold reads, exactly-once writes, latency of a stream", run)
