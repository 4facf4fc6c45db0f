"""Streaming reads: offsets, limits, restarts, and micro-batches that are the same whenever they are read."""

from __future__ import annotations

import json
import shutil
import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxBytes, ReadMaxRows

from millstream.spark.columns import message_schema
from millstream.spark.errors import SourceError
from millstream.spark.options import read_options
from millstream.spark.stream import StreamReader
from support.cold import wait_until
from support.server import ServerProcess
from support.spark_source import JSON, Row, Streams, rows_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery


def reader_of(streams: Streams, **more: str) -> StreamReader:
    options = read_options(streams.options(**more))
    return StreamReader(options, message_schema(options.columns))


def batch_of(reader: StreamReader, start: dict[str, Any], end: dict[str, Any]) -> list[list[Row]]:
    """The rows of a micro-batch, partition by partition."""
    return [
        [row for batch in reader.read(partition) for row in batch.to_pylist()]
        for partition in reader.partitions(start, end)
    ]


def numbers(rows: list[Row]) -> list[int]:
    return [json.loads(row["payload"])["n"] for row in rows]


def fill(streams: Streams, count: int, first: int = 0, names: int = 3) -> None:
    for number in range(first, first + count):
        streams.append(f"run-{number % names}", {"n": number})


@pytest.mark.parametrize("split", ["position", "stream"])
def test_micro_batch_is_the_same_before_and_after_a_flush(streams: Streams, split: str) -> None:
    more = {"partitionBy": split, "maxPartitionBytes": "300" if split == "position" else "100"}
    reader = reader_of(streams, startingOffsets="earliest", **more)
    start = reader.initialOffset()
    fill(streams, 20)
    streams.flush()
    fill(streams, 20, first=20)
    end = reader.latestOffset(start, ReadAllAvailable())
    before = batch_of(reader, start, end)
    found = numbers([row for rows in before for row in rows])
    assert (found if split == "position" else sorted(found)) == list(range(40))
    assert len(before) > 1
    streams.flush()
    fill(streams, 5, first=40)
    streams.flush()
    # Another process, after a restart, with nothing but the two offsets from the checkpoint.
    again = reader_of(streams, startingOffsets="latest", **more)
    assert batch_of(again, json.loads(json.dumps(start)), json.loads(json.dumps(end))) == before
    reader.stop()


def test_all_messages_of_a_stream_in_a_micro_batch_are_in_one_partition_in_order(streams: Streams) -> None:
    fill(streams, 60, names=6)
    streams.flush()
    fill(streams, 60, first=60, names=6)
    streams.flush()
    fill(streams, 30, first=120, names=7)  # some in the feed, and a stream that no segment has
    reader = reader_of(streams, startingOffsets="earliest", maxPartitionBytes="300")
    start = reader.initialOffset()
    partitions = batch_of(reader, start, reader.latestOffset(start, ReadAllAvailable()))
    assert len(partitions) > 2
    by_stream: dict[str, list[list[int]]] = {}
    for rows in partitions:
        for name in {row["stream"] for row in rows}:
            by_stream.setdefault(name, []).append(numbers([row for row in rows if row["stream"] == name]))
    assert len(by_stream) == 7 and all(len(parts) == 1 for parts in by_stream.values())
    expected = {f"run-{one}": streams.messages(f"run-{one}") for one in range(7)}
    assert {name: parts[0] for name, parts in by_stream.items()} == {
        name: [message["n"] for message in messages] for name, messages in expected.items()
    }
    reader.stop()


def test_record_limit_is_exact_in_segments_and_in_the_feed(streams: Streams) -> None:
    fill(streams, 25)
    streams.flush()
    fill(streams, 25, first=25)
    reader = reader_of(streams, startingOffsets="earliest")
    assert reader.getDefaultReadLimit() == ReadMaxBytes(1 << 30)
    assert reader_of(streams, partitionBy="position").getDefaultReadLimit() == ReadAllAvailable()
    offset = reader.initialOffset()
    found: list[int] = []
    for _ in range(8):
        end = reader.latestOffset(offset, ReadMaxRows(7))
        rows = [row for rows in batch_of(reader, offset, end) for row in rows]
        assert len(rows) <= 7
        found += numbers(rows)
        offset = end
    assert found == list(range(50))
    assert reader.latestOffset(offset, ReadMaxRows(7)) == offset
    reader.stop()


def test_record_limit_that_ends_with_a_segment_goes_on_with_the_next(streams: Streams) -> None:
    for part in range(4):
        fill(streams, 6, first=6 * part)
        if part < 3:
            streams.flush()
    reader = reader_of(streams, startingOffsets="earliest")
    for limit in (ReadMaxRows(6), ReadMaxRows(12), ReadMaxBytes(1), ReadMaxRows(24)):
        offset = reader.initialOffset()
        found: list[int] = []
        while (end := reader.latestOffset(offset, limit)) != offset:
            found += numbers([row for rows in batch_of(reader, offset, end) for row in rows])
            offset = end
        assert found == list(range(24)), limit
    reader.stop()


def test_byte_limit_is_kept_within_a_message(streams: Streams) -> None:
    fill(streams, 20)
    streams.flush()
    fill(streams, 20, first=20)
    reader = reader_of(streams, startingOffsets="earliest", maxBytesPerTrigger="64")
    assert reader.getDefaultReadLimit() == ReadMaxBytes(64)
    offset = reader.initialOffset()
    found: list[int] = []
    while (end := reader.latestOffset(offset, ReadMaxBytes(64))) != offset:
        rows = [row for rows in batch_of(reader, offset, end) for row in rows]
        assert rows and sum(len(row["payload"]) for row in rows) < 64 + 9
        found += numbers(rows)
        offset = end
    assert found == list(range(40))
    reader.stop()


def test_start_is_earliest_latest_a_position_or_a_time(streams: Streams) -> None:
    fill(streams, 5)
    time.sleep(0.02)
    moment = time.time_ns() // 1_000_000
    fill(streams, 5, first=5)
    for _ in range(2):
        for options, expected in (
            ({"startingOffsets": "earliest"}, list(range(10))),
            ({"startingOffsets": "latest"}, []),
            ({}, []),
            ({"startingTimestamp": str(moment)}, list(range(5, 10))),
            ({"startingTimestamp": "0"}, list(range(10))),
            ({"startingTimestamp": str(moment + 10**6)}, []),
        ):
            reader = reader_of(streams, **options)
            start = reader.initialOffset()
            end = {"0": streams.cold()["shards"][0]["latest"] + 1}
            assert numbers([row for rows in batch_of(reader, start, end) for row in rows]) == expected, options
            reader.stop()
        reader = reader_of(streams, startingOffsets="earliest")
        rows = [row for rows in batch_of(reader, reader.initialOffset(), end) for row in rows]
        reader.stop()
        from_fourth = reader_of(streams, startingOffsets=json.dumps({"0": rows[3]["position"]}))
        found = batch_of(from_fourth, from_fourth.initialOffset(), end)
        assert numbers([row for rows in found for row in rows]) == list(range(3, 10))
        from_fourth.stop()
        streams.flush()


def test_other_buckets_make_no_micro_batches_and_waiting_is_paced(streams: Streams) -> None:
    fill(streams, 3)
    reader = reader_of(streams)
    start = reader.initialOffset()
    with Streams(streams.server, f"{streams.bucket}-other") as other:
        fill(other, 5)
    begun = time.monotonic()
    assert reader.latestOffset(start, ReadAllAvailable()) == start
    assert 0.05 < time.monotonic() - begun < 5.0
    # While a call waits, something arrives: the next one sees it at once.
    timer = threading.Timer(0.1, lambda: fill(streams, 1, first=3))
    timer.start()
    assert reader.latestOffset(start, ReadAllAvailable()) == start
    timer.join()
    end = reader.latestOffset(start, ReadAllAvailable())
    assert numbers([row for rows in batch_of(reader, start, end) for row in rows]) == [3]
    reader.stop()


def test_position_the_server_does_not_have_is_data_loss(streams: Streams, caplog: pytest.LogCaptureFixture) -> None:
    fill(streams, 3)
    reader = reader_of(streams)
    with pytest.raises(SourceError, match=r"positions before 999999 .* restored to an earlier state.*failOnDataLoss"):
        reader.latestOffset({"0": 999_999}, ReadAllAvailable())
    lenient = reader_of(streams, failOnDataLoss="false")
    now = lenient.latestOffset({"0": 999_999}, ReadAllAvailable())
    assert now["0"] == streams.cold()["shards"][0]["latest"] + 1
    assert "data loss" in caplog.text
    removed = reader_of(streams, startingOffsets="0")
    with pytest.raises(SourceError, match=r"starts at position 0 .* keeps bucket .* from position 1 on"):
        removed.initialOffset()
    for one in (reader, lenient, removed):
        one.stop()


def test_messages_that_retention_took_before_they_were_read_are_counted_in_the_log(
    streams: Streams, caplog: pytest.LogCaptureFixture
) -> None:
    reader = reader_of(streams, startingOffsets="earliest")
    start = reader.initialOffset()
    fill(streams, 12)
    streams.flush()
    end = reader.latestOffset(start, ReadAllAvailable())
    assert len(numbers([row for rows in batch_of(reader, start, end) for row in rows])) == 12
    assert caplog.text == ""
    trimmed = streams.client.head(f"/{streams.bucket}/run-0").headers["stream-next-offset"]
    answer = streams.client.put(f"/{streams.bucket}/run-0/snapshot/{trimmed}", headers=JSON, content="{}")
    assert answer.status_code == 204, answer.text
    streams.client.delete(f"/{streams.bucket}/run-1")
    left = numbers([row for rows in batch_of(reader, start, end) for row in rows])
    assert left == [number for number in range(12) if number % 3 == 2]
    assert f"bucket '{streams.bucket}'" in caplog.text and "8 messages were deleted, trimmed or expired" in caplog.text
    reader.stop()


# -- with Spark ------------------------------------------------------------------------------------------------------


def stream_of(spark: SparkSession, streams: Streams, **more: str) -> DataFrame:
    return spark.readStream.format("millstream").options(**streams.options(**more)).load()


def to_files(frame: DataFrame, folder: Path, *, once: bool = True) -> StreamingQuery:
    writer = frame.writeStream.format("parquet").option("path", str(folder / "rows"))
    writer = writer.option("checkpointLocation", str(folder / "checkpoint"))
    return (writer.trigger(availableNow=True) if once else writer.trigger(processingTime="200 milliseconds")).start()


def in_files(spark: SparkSession, folder: Path) -> list[int]:
    rows = spark.read.parquet(str(folder / "rows")).select("payload").collect()
    return sorted(json.loads(row.payload)["n"] for row in rows)


def test_available_now_reads_what_there_is_in_steps_and_goes_on_from_its_checkpoint(
    spark: SparkSession, streams: Streams, tmp_path: Path
) -> None:
    fill(streams, 12)
    streams.flush()
    fill(streams, 6, first=12)
    frame = stream_of(spark, streams, startingOffsets="earliest", maxRecordsPerTrigger="10")
    query = to_files(frame, tmp_path)
    assert query.awaitTermination(240)
    assert [progress.numInputRows for progress in query.recentProgress if progress.numInputRows] == [10, 8]
    assert in_files(spark, tmp_path) == list(range(18))
    # Meanwhile streams come and go, and the start option no longer counts.
    fill(streams, 4, first=18, names=7)
    streams.client.delete(f"/{streams.bucket}/run-6")
    streams.append("run-new", {"n": 100})
    query = to_files(stream_of(spark, streams, startingOffsets="latest"), tmp_path)
    assert query.awaitTermination(240)
    gone = [number for number in range(18, 22) if number % 7 == 6]
    assert in_files(spark, tmp_path) == sorted({*range(22), 100} - set(gone))


def test_query_outlives_restarts_of_the_server(spark: SparkSession, own_server: ServerProcess, tmp_path: Path) -> None:
    with Streams(own_server) as streams:
        fill(streams, 5)
        query = to_files(stream_of(spark, streams, startingOffsets="earliest"), tmp_path, once=False)
        try:
            wait_until(lambda: query.exception() or _seen(query) >= 5, "the first messages", 60)
            own_server.kill()
            time.sleep(1.0)
            own_server.start()
        finally:
            streams.client.close()
    with Streams(own_server) as streams:
        fill(streams, 5, first=5)
        wait_until(lambda: query.exception() or _seen(query) >= 10, "messages after the restart", 60)
        assert query.exception() is None
        query.stop()
    assert in_files(spark, tmp_path) == list(range(10))


def _seen(query: StreamingQuery) -> int:
    return sum(progress.numInputRows for progress in query.recentProgress)


def test_checkpoint_of_another_server_is_said_to_be_data_loss(
    spark: SparkSession, own_server: ServerProcess, tmp_path: Path
) -> None:
    with Streams(own_server) as streams:
        fill(streams, 12)
        frame = stream_of(spark, streams, startingOffsets="earliest", serverTimeout="5s")
        assert to_files(frame, tmp_path).awaitTermination(240)
        own_server.stop()
        shutil.rmtree(own_server.data_dir)
        own_server.start()
    with Streams(own_server) as streams:
        fill(streams, 1)
        with pytest.raises(StreamingQueryException, match="restored to an earlier state, or is another server"):
            to_files(stream_of(spark, streams), tmp_path).awaitTermination(240)


@pytest.mark.parametrize("is_running", [True, False])
def test_history_that_is_trimmed_deleted_or_expired_before_it_is_read_is_left_out(
    spark: SparkSession, streams: Streams, tmp_path: Path, is_running: bool
) -> None:
    """Whether the query runs meanwhile or is started again from its checkpoint: it goes on with what is left."""
    frame = stream_of(spark, streams, startingOffsets="earliest", maxRecordsPerTrigger="6")
    fill(streams, 6)
    assert to_files(frame, tmp_path).awaitTermination(240)
    assert in_files(spark, tmp_path) == list(range(6))
    query = to_files(frame, tmp_path, once=False) if is_running else None
    moment = (datetime.now(UTC) + timedelta(seconds=2)).isoformat(timespec="seconds").replace("+00:00", "Z")
    expiring = JSON | {"stream-expires-at": moment}
    assert streams.client.put(f"/{streams.bucket}/short", headers=expiring, content='[{"n": 999}]').status_code == 201
    for number in range(6, 30):
        streams.append(f"run-{number % 3}", {"n": number})
    streams.flush()
    trimmed = streams.client.head(f"/{streams.bucket}/run-0").headers["stream-next-offset"]
    answer = streams.client.put(f"/{streams.bucket}/run-0/snapshot/{trimmed}", headers=JSON, content="{}")
    assert answer.status_code == 204, answer.text
    streams.client.delete(f"/{streams.bucket}/run-1")
    wait_until(lambda: streams.client.head(f"/{streams.bucket}/short").status_code in (404, 410), "expiry", 20)
    streams.append("run-0", {"n": 30})
    if query is None:
        assert to_files(frame, tmp_path).awaitTermination(240)
    else:
        wait_until(lambda: query.exception() or 30 in in_files(spark, tmp_path), "the last message", 60)
        assert query.exception() is None
        query.stop()
    found = in_files(spark, tmp_path)
    assert len(found) == len(set(found)), "nothing twice"
    kept = {*range(6), *(n for n in range(6, 30) if n % 3 == 2), 30}
    removed = {999, *range(6, 30)} - kept
    # A query that runs may have read them in time; one that was down cannot.
    assert kept <= set(found) <= kept | (removed if is_running else set())


@pytest.mark.parametrize("fails", [True, False])
def test_checkpoint_older_than_what_the_server_keeps_fails_or_goes_on_as_asked(
    spark: SparkSession, streams: Streams, tmp_path: Path, fails: bool
) -> None:
    fill(streams, 4)
    assert to_files(stream_of(spark, streams, startingOffsets="earliest"), tmp_path).awaitTermination(240)
    # Position 0 is none that a server keeps: to the query it is history that has been removed since.
    batches = [int(one.name) for one in (tmp_path / "checkpoint/offsets").iterdir() if one.name.isdigit()]
    log = tmp_path / f"checkpoint/offsets/{max(batches)}"
    *head, offset = log.read_text().splitlines()
    assert set(json.loads(offset)) == {"0"}
    log.write_text("\n".join([*head, json.dumps({"0": 0})]))
    log.with_name(f".{log.name}.crc").unlink(missing_ok=True)
    fill(streams, 4, first=4)
    frame = stream_of(spark, streams, failOnDataLoss=str(fails).lower())
    if fails:
        with pytest.raises(StreamingQueryException, match=r"starts at position 0 .* was removed.*failOnDataLoss=false"):
            to_files(frame, tmp_path).awaitTermination(240)
        assert in_files(spark, tmp_path) == list(range(4))
    else:
        assert to_files(frame, tmp_path).awaitTermination(240)
        assert set(in_files(spark, tmp_path)) == set(range(8))


def test_query_over_one_stream_has_micro_batches_for_that_stream_only(streams: Streams) -> None:
    streams.append("a", {"n": 1})
    reader = StreamReader(read_options(streams.options(stream="a")), message_schema())
    at = reader.initialOffset()
    limit = reader.getDefaultReadLimit()
    try:
        assert reader.latestOffset(at, limit) == at
        streams.append("b", {"n": 1})
        streams.append("ab", {"n": 1})
        assert reader.latestOffset(at, limit) == at
        streams.flush()
        assert reader.latestOffset(at, limit) == at
        streams.append("a", {"n": 2})
        after = reader.latestOffset(at, limit)
        assert after != at
        rows = rows_of(reader, reader.partitions(at, after))
        assert [json.loads(row["payload"]) for row in rows] == [{"n": 2}]
        streams.append("b", {"n": 3})
        streams.flush()
        assert reader.latestOffset(after, limit) == after
    finally:
        reader.stop()


def test_min_partitions_splits_a_micro_batch(streams: Streams) -> None:
    for number in range(8):
        streams.append(f"run-{number}", *({"n": n, "pad": "x" * 500} for n in range(500)))
    streams.flush()
    for partition_by in ("stream", "position"):
        options = streams.options(startingOffsets="earliest", minPartitions="4", partitionBy=partition_by)
        reader = StreamReader(read_options(options), message_schema())
        start = reader.initialOffset()
        end = reader.latestOffset(start, reader.getDefaultReadLimit())
        partitions = reader.partitions(start, end)
        assert len(partitions) >= 4
        assert len(rows_of(reader, partitions)) == 4_000
        reader.stop()
