"""The source on a standalone cluster with the cold tier on S3, while executors and the driver are killed.

`repartition` before the sink is the case that local mode does not show: a retried task gets its rows from the shuffle
in another order than the attempt that was killed in the middle of writing them.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.cold import S3Prefix
from support.s3 import shared_s3_server
from support.server import ServerProcess
from support.spark_cluster import Driver, SparkCluster
from support.spark_source import SETTINGS, Streams

ROWS = 6_000
SOURCES = 12
TARGETS = 40
SECONDS = 200.0

# Micro-batches of a few thousand rows, repartitioned and written; then everything is read back, on the executors too.
PROGRAM = """
import json, sys
from millstream.spark.session import spark_session

given = json.loads(sys.argv[1])
spark = spark_session("cluster", given["master"], **{
    "spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1", "spark.driver.memory": "512m",
    "spark.executor.memory": "512m", "spark.executor.cores": "1", "spark.task.maxFailures": "8",
    "spark.log.level": "ERROR"})
source = spark.readStream.format("millstream").options(**given["options"])
source = source.option("prefix", "in-").option("startingOffsets", "earliest").option("maxRecordsPerTrigger", "2000")
frame = source.load().selectExpr("get_json_object(cast(payload AS STRING), '$.n') AS text", "payload")
frame = frame.selectExpr("concat('out-', cast(text AS INT) % %d) AS stream", "cast(text AS INT) AS n", "payload")
sink = frame.repartition(4).writeStream.format("millstream").options(**given["options"])
sink = sink.option("orderBy", "n").option("maxAppendBytes", "300").option("checkpointLocation", given["checkpoint"])
query = sink.trigger(availableNow=True).start()
query.awaitTermination()
print([(one.batchId, one.numInputRows, one.sources[0].endOffset) for one in query.recentProgress], file=sys.stderr)
read = spark.read.format("millstream").options(**given["options"])
copy = read.option("prefix", "out-").option("columns", "stream,offset_start,payload").load()
rows = copy.selectExpr("stream", "offset_start", "cast(get_json_object(cast(payload AS STRING), '$.n') AS INT) AS n")
print(json.dumps([[row.stream, row.offset_start, row.n] for row in rows.collect()]))
""".replace("% %d", f"% {TARGETS}")


@pytest.fixture
def running(tmp_path: Path) -> Iterator[tuple[SparkCluster, Streams]]:
    store = S3Prefix(shared_s3_server())
    server = ServerProcess(tmp_path / "data", settings=(*SETTINGS, *store.settings), environment=store.environment)
    cluster_dir = tmp_path / "cluster"
    cluster_dir.mkdir()
    with server as started, Streams(started) as streams, SparkCluster(cluster_dir) as cluster:
        yield cluster, streams


def written(streams: Streams) -> int:
    """How many messages the copies hold by now."""
    cursor, total = "", 0
    while True:
        page = streams.client.get(f"/{streams.bucket}/streams", params={"prefix": "out-", "after": cursor}).json()
        total += sum(stream["tail_offset"] for stream in page["streams"])
        if not page["has_more"]:
            return total
        cursor = page["next_cursor"]


def wait_for_more(driver: Driver, streams: Streams, than: int) -> int:
    """Wait until a write is under way: something is there that was not there before."""
    deadline = time.monotonic() + SECONDS
    while (found := written(streams)) <= than:
        assert driver.is_running, driver.log()[-6000:]
        assert time.monotonic() < deadline, driver.log()[-6000:]
        time.sleep(0.01)
    return found


@pytest.mark.timeout(600)
def test_every_record_once_though_executors_and_driver_are_killed(
    running: tuple[SparkCluster, Streams], tmp_path: Path
) -> None:
    cluster, streams = running
    for first in range(0, ROWS, 100):
        messages = [{"n": number} for number in range(first, first + 100)]
        streams.append(f"in-{first // 100 % SOURCES}", *messages)
    streams.flush()
    arguments: dict[str, Any] = {
        "master": cluster.url,
        "options": streams.options(**{"cold.accessKeyId": "any", "cold.secretAccessKey": "thing"}),
        "checkpoint": str(tmp_path / "checkpoint"),
    }
    driver = Driver(PROGRAM, tmp_path, **arguments)
    try:
        at = wait_for_more(driver, streams, 0)
        os.kill(cluster.executors()[0], signal.SIGKILL)
        at = wait_for_more(driver, streams, at + 4_000)
        driver.kill()
    finally:
        driver.kill()
    assert written(streams) > 0
    rows = Driver(PROGRAM, tmp_path, **arguments).result(SECONDS)
    assert sorted(number for _, _, number in rows) == list(range(ROWS))
    assert {name for name, _, _ in rows} == {f"out-{number}" for number in range(TARGETS)}
    assert all(name == f"out-{number % TARGETS}" for name, _, number in rows)
    # What readers over HTTP see is the same, in the same order.
    for name in ("out-0", f"out-{TARGETS - 1}"):
        mine = [number for stream, _, number in sorted(rows, key=lambda row: row[1]) if stream == name]
        assert [message["n"] for message in streams.messages(name)] == mine
