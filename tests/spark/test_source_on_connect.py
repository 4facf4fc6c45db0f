"""The source through Spark Connect: the client has no Java of its own, and all of the source runs on the server."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.server import ServerProcess
from support.spark_cluster import Driver
from support.spark_source import Streams

SECONDS = 150.0

# `local[2]` starts a Connect server on loopback and talks to it as to any other.
PROGRAM = """
import json, sys
from pyspark.sql import SparkSession
from pyspark.sql.connect.session import SparkSession as Remote
from millstream.spark.session import SQL_SETTINGS

given = json.loads(sys.argv[1])
builder = SparkSession.builder.remote("local[2]")
for name, value in SQL_SETTINGS.items():
    builder = builder.config(name, value)
spark = builder.getOrCreate()
assert isinstance(spark, Remote)
rows = spark.read.format("millstream").options(**given["options"]).option("prefix", "run-").load()
found = sorted([row.stream, bytes(row.payload).decode()] for row in rows.collect())
filtered = rows.where("stream = 'run-1'").count()
copies = rows.selectExpr("concat('copy-', stream) AS stream", "payload")
copies.write.format("millstream").options(**given["options"]).mode("append").save()
live = spark.readStream.format("millstream").options(**given["options"]).option("prefix", "run-")
live = live.option("startingOffsets", "earliest").load().selectExpr("concat('live-', stream) AS stream", "payload")
sink = live.writeStream.format("millstream").options(**given["options"])
query = sink.option("checkpointLocation", given["checkpoint"]).trigger(availableNow=True).start()
query.awaitTermination(240)
try:
    spark.read.format("millstream").options(**given["options"] | {"bucket": "nowhere"}).load().count()
    refusal = ""
except Exception as error:
    refusal = str(error)
spark.stop()
print(json.dumps([found, filtered, refusal]))
"""


@pytest.mark.soak
@pytest.mark.timeout(240)
def test_reads_streams_and_writes_work_through_spark_connect(own_server: ServerProcess, tmp_path: Path) -> None:
    with Streams(own_server) as streams:
        for number in range(12):
            streams.append(f"run-{number % 3}", {"n": number})
        streams.flush()
        for number in range(12, 18):
            streams.append(f"run-{number % 3}", {"n": number})
        arguments = {"options": streams.options(), "checkpoint": str(tmp_path / "checkpoint")}
        found, filtered, refusal = Driver(PROGRAM, tmp_path, **arguments).result(SECONDS)
        expected = {f"run-{name}": [{"n": number} for number in range(name, 18, 3)] for name in range(3)}
        assert found == sorted([name, f'{{"n": {one["n"]}}}'] for name, all_ in expected.items() for one in all_)
        assert filtered == 6
        assert "'bucket' is 'nowhere'" in refusal and "has no such bucket" in refusal
        for name, messages in expected.items():
            assert streams.messages(f"copy-{name}") == messages
            assert streams.messages(f"live-{name}") == messages
