"""Batch reads: from segments and feed, joined at one position, and what filters keep from being read at all."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql.datasource import EqualTo, Filter, GreaterThan, GreaterThanOrEqual, In, LessThan, StringStartsWith
from pyspark.sql.types import StructType

from millstream.spark.columns import typed_schema
from millstream.spark.errors import SourceError
from support.cold import S3Prefix
from support.s3 import shared_s3_server
from support.server import ServerProcess
from support.spark_source import SETTINGS, TEXT, Row, Streams, payloads, read, reader_of, rows_of, server_at

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def fill(streams: Streams, names: int = 5, messages: int = 8) -> dict[str, list[Any]]:
    """Some history that is cold, some that is not; what each stream holds."""
    expected: dict[str, list[Any]] = {}
    for part in range(2):
        for number in range(names):
            name = f"run-{number}"
            values = [{"n": part * messages + one, "of": name} for one in range(messages)]
            streams.append(name, *values)
            expected.setdefault(name, []).extend(values)
        if part == 0:
            streams.flush()
    return expected


def test_read_is_every_message_once_across_the_join(streams: Streams) -> None:
    expected = fill(streams)
    shard = streams.cold()["shards"][0]
    assert shard["segments"] and shard["flushed"] < shard["latest"]
    rows = read(streams.options())
    assert payloads(rows) == expected
    assert {name: streams.messages(name) for name in expected} == expected
    positions = [row["position"] for row in rows]
    assert len(set(positions)) == len(positions)


def test_columns_say_where_a_message_is(streams: Streams) -> None:
    before = datetime.now(UTC)
    fill(streams, names=2, messages=3)
    rows = sorted(read(streams.options(stream="run-1")), key=lambda row: int(row["offset_start"]))
    at = 0
    for row in rows:
        assert row["bucket"] == streams.bucket
        assert row["content_type"] == "application/json"
        assert (row["offset_start"], row["offset_end"]) == (at, at + len(row["payload"]))
        assert before - timedelta(seconds=1) <= row["appended_at"] <= datetime.now(UTC) + timedelta(seconds=1)
        at = row["offset_end"]
    assert [row["position"] for row in rows] == sorted(row["position"] for row in rows)


def test_dead_rows_do_not_appear(streams: Streams) -> None:
    fill(streams, names=4)
    # Deleted while cold, deleted and created again, trimmed inside what is cold.
    streams.client.delete(f"/{streams.bucket}/run-0")
    streams.client.delete(f"/{streams.bucket}/run-1")
    streams.append("run-1", {"again": True})
    tail = int(streams.client.head(f"/{streams.bucket}/run-2").headers["stream-next-offset"].partition("_")[2])
    kept = [row for row in read(streams.options(stream="run-2")) if row["offset_end"] > tail // 4]
    cut = min(row["offset_start"] for row in kept)
    answer = streams.client.put(f"/{streams.bucket}/run-2/snapshot/{0:016d}_{cut:016d}", headers=TEXT, content=b"sum")
    assert answer.status_code in (200, 201, 204), answer.text

    def check() -> None:
        found = payloads(read(streams.options()))
        assert "run-0" not in found
        assert found["run-1"] == [{"again": True}]
        assert found["run-2"] == [
            json.loads(row["payload"]) for row in sorted(kept, key=lambda row: row["offset_start"])
        ]
        assert len(found["run-3"]) == 16

    check()
    streams.flush()
    check()


def test_planned_read_stays_right_whatever_happens_before_it_runs(streams: Streams) -> None:
    expected = fill(streams)
    reader = reader_of(streams.options())
    partitions = reader.partitions()
    streams.append("run-0", {"late": True})
    streams.append("later", {"late": True})
    streams.flush()
    assert payloads(rows_of(reader, partitions)) == expected


def test_prefix_and_stream_choose(streams: Streams) -> None:
    expected = fill(streams, names=12)
    found = payloads(read(streams.options(prefix="run-1")))
    assert found == {name: expected[name] for name in ("run-1", "run-10", "run-11")}
    assert payloads(read(streams.options(stream="run-1"))) == {"run-1": expected["run-1"]}


def test_columns_option_reads_only_those(streams: Streams) -> None:
    fill(streams, names=2, messages=2)
    rows = read(streams.options(columns="position, stream"))
    assert [list(row) for row in rows] == [["position", "stream"]] * 8


def as_filtered(rows: list[Row], one: Filter) -> list[Row]:
    """What a filter leaves, worked out row by row."""
    tests = {
        EqualTo: lambda value, wanted: value == wanted,
        GreaterThan: lambda value, wanted: value > wanted,
        GreaterThanOrEqual: lambda value, wanted: value >= wanted,
        LessThan: lambda value, wanted: value < wanted,
        In: lambda value, wanted: value in wanted,
        StringStartsWith: lambda value, wanted: value.startswith(wanted),
    }
    name, wanted = one.attribute[0], one.value
    return [row for row in rows if tests[type(one)](row[name], wanted)]


def test_filters_leave_exactly_what_they_should(streams: Streams) -> None:
    fill(streams)
    rows = read(streams.options())
    middle = sorted(row["position"] for row in rows)[len(rows) // 2]
    moment = sorted(row["appended_at"] for row in rows)[len(rows) // 2]
    for one in (
        EqualTo(("stream",), "run-3"),
        EqualTo(("bucket",), "another"),
        In(("stream",), ("run-1", "run-4", "none")),
        StringStartsWith(("stream",), "run-"),
        GreaterThan(("position",), middle),
        LessThan(("position",), middle),
        GreaterThanOrEqual(("offset_start",), 60),
        LessThan(("offset_end",), 60),
        GreaterThanOrEqual(("appended_at",), moment),
        LessThan(("appended_at",), moment),
        EqualTo(("content_type",), "text/plain"),
        GreaterThan(("stream",), "run-2"),
    ):
        expected = as_filtered(rows, one)
        found = read(streams.options(), filters=[one])
        key = lambda row: row["position"]  # noqa: E731
        assert sorted(found, key=key) == sorted(expected, key=key), one


def row_groups(partitions: list[Any]) -> int:
    return sum(len(piece.groups) for partition in partitions for piece in partition.segments)


def test_filters_prune_segments_and_row_groups(streams: Streams) -> None:
    text = "x" * 1000
    for part in range(2):
        for number in range(4):
            streams.append(f"run-{number}", *[{"text": text, "n": part} for _ in range(500)])
        streams.flush()
    rows = read(streams.options(columns="position,appended_at,stream,offset_start"))
    all_groups = row_groups(reader_of(streams.options()).partitions())
    assert all_groups >= 4
    middle = sorted(row["position"] for row in rows)[len(rows) // 2]
    later = max(row["appended_at"] for row in rows) + timedelta(days=1)
    for one, groups_max in (
        (EqualTo(("stream",), "run-0"), all_groups // 2),
        (StringStartsWith(("stream",), "none"), 0),
        (GreaterThan(("position",), middle), all_groups // 2 + 1),
        (GreaterThan(("appended_at",), later), 0),
        (GreaterThan(("offset_start",), 10**9), 0),
    ):
        planned = row_groups(reader_of(streams.options(), filters=[one]).partitions())
        assert planned <= groups_max, one


def test_bounds_cut_by_position_and_time(streams: Streams) -> None:
    fill(streams)
    rows = read(streams.options())
    places = sorted(row["position"] for row in rows)
    low, high = places[10], places[60]
    between = read(streams.options(startingOffsets=str(low), endingOffsets=json.dumps({"0": high})))
    assert sorted(row["position"] for row in between) == places[10:60]
    moment = sorted(row["appended_at"] for row in rows)[40]
    since = read(streams.options(startingOffsets=moment.isoformat()))
    assert sorted(row["position"] for row in since) == sorted(
        row["position"] for row in rows if row["appended_at"] >= moment
    )
    until = read(streams.options(endingTimestamp=str(int(moment.timestamp() * 1000))))
    assert len(until) + len(since) == len(rows)
    assert read(streams.options(startingOffsets="latest")) == []


@pytest.fixture
def typed(spark: SparkSession) -> StructType:
    """Fields of JSON beside message columns. (Only a session can read a schema's text.)"""
    return typed_schema("n INT, who STRING, at STRUCT<x: DOUBLE>, _corrupt_record STRING", ("stream", "offset_start"))


GOOD = [{"n": 1, "who": "ada", "at": {"x": 1.5}}, {"who": "joe"}, {"n": None, "more": [1]}]
BAD = [{"n": "seven", "who": "eve"}, 17, {"n": 1.5}]


def test_typed_columns_from_json(streams: Streams, typed: StructType) -> None:
    streams.append("typed", *GOOD)
    rows = sorted(read(streams.options(), typed), key=lambda row: int(row["offset_start"]))
    assert [(row["n"], row["who"], row["at"]) for row in rows] == [
        (1, "ada", {"x": 1.5}),
        (None, "joe", None),
        (None, None, None),
    ]
    assert all(row["_corrupt_record"] is None for row in rows)


def test_bad_records_are_kept_dropped_or_refused_by_mode(streams: Streams, typed: StructType) -> None:
    streams.append("typed", *GOOD, *BAD)
    kept = sorted(read(streams.options(), typed), key=lambda row: int(row["offset_start"]))
    assert [row["who"] for row in kept] == ["ada", "joe", None, "eve", None, None]
    assert [json.loads(row["_corrupt_record"]) for row in kept[3:]] == BAD
    dropped = read(streams.options(mode="dropMalformed"), typed)
    assert [row["who"] for row in sorted(dropped, key=lambda row: int(row["offset_start"]))] == ["ada", "joe", None]
    with pytest.raises(SourceError, match=r"stream 'typed' at offset .* does not fit the schema.*PERMISSIVE"):
        read(streams.options(mode="FAILFAST"), typed)


def test_typed_columns_of_every_type_survive_a_bad_neighbour(spark: SparkSession, streams: Streams) -> None:
    fields = (
        "flag BOOLEAN, small SMALLINT, big BIGINT, ratio DOUBLE, price DECIMAL(10,2), day DATE, at TIMESTAMP,"
        " raw BINARY, tags ARRAY<STRING>, labels MAP<STRING, INT>, text STRING"
    )
    record = {
        "flag": True,
        "small": 7,
        "big": 2**40,
        "ratio": 0.5,
        "price": 12.34,
        "day": "2026-01-31",
        "at": "2026-01-31T12:00:00Z",
        "raw": "aGk=",
        "tags": ["a", None],
        "labels": {"x": 1},
        "text": {"as": "it is"},
    }
    streams.append("typed", record, {"flag": "no"})
    rows = sorted(
        read(streams.options(), typed_schema(fields, ("offset_start",))), key=lambda row: int(row["offset_start"])
    )
    first = rows[0]
    assert (first["flag"], first["small"], first["big"], first["ratio"]) == (True, 7, 2**40, 0.5)
    assert (str(first["price"]), first["day"].isoformat(), first["raw"]) == ("12.34", "2026-01-31", b"hi")
    assert first["at"] == datetime(2026, 1, 31, 12, tzinfo=UTC)
    assert (first["tags"], first["labels"], first["text"]) == (["a", None], [("x", 1)], '{"as":"it is"}')
    assert rows[1]["flag"] is None


def test_byte_streams_are_read_as_they_are(streams: Streams, typed: StructType) -> None:
    streams.create("log", {"content-type": "application/octet-stream"})
    for message in (b"\x00\x01", b"plain\n", b"\xff" * 10):
        streams.client.post(
            f"/{streams.bucket}/log", headers={"content-type": "application/octet-stream"}, content=message
        )
    rows = sorted(read(streams.options(stream="log")), key=lambda row: int(row["offset_start"]))
    assert [row["payload"] for row in rows] == [b"\x00\x01", b"plain\n", b"\xff" * 10]
    with pytest.raises(SourceError, match="'log' is of type 'application/octet-stream'"):
        read(streams.options(stream="log"), typed)


@pytest.fixture
def memory_server(tmp_path: Path) -> Iterator[ServerProcess]:
    with server_at(tmp_path / "data", "cold.backend=memory", "hot.keep_bytes=0B") as running:
        yield running


def test_history_in_the_servers_memory_comes_through_the_feed(memory_server: ServerProcess) -> None:
    with Streams(memory_server) as streams:
        assert payloads(read(streams.options())) == {}
        expected = fill(streams)
        assert payloads(read(streams.options())) == expected


def test_read_from_s3_with_credentials_from_the_options(tmp_path: Path) -> None:
    store = S3Prefix(shared_s3_server())
    process = ServerProcess(tmp_path / "data", settings=(*SETTINGS, *store.settings), environment=store.environment)
    with process as server, Streams(server) as streams:
        expected = fill(streams)
        described = streams.cold()["store"]
        assert described["backend"] == "s3" and "secret_access_key" not in described["options"]
        keys = {"cold.accessKeyId": "any", "cold.secretAccessKey": "thing"}
        assert payloads(read(streams.options(**keys))) == expected
        # Only the columns that are wanted are fetched, in ranges.
        narrow = read(streams.options(columns="position", **keys))
        assert len(narrow) == sum(len(messages) for messages in expected.values())


def test_through_spark(spark: SparkSession, streams: Streams) -> None:
    expected = fill(streams)
    frame = spark.read.format("millstream").options(**streams.options()).load()
    rows = [row.asDict() for row in frame.collect()]
    assert payloads(rows) == expected
    assert {type(row["payload"]) for row in rows} <= {bytes, bytearray}
    pushing = spark.read.format("millstream").options(**streams.options(pushFilters="true")).load()
    narrow = pushing.where("stream in ('run-1', 'run-2') and offset_start >= 20 and appended_at > '2020-01-01'")
    assert narrow.count() == sum(1 for row in rows if row["stream"] in ("run-1", "run-2") and row["offset_start"] >= 20)
    chosen = spark.read.format("millstream").options(**streams.options(prefix="run-1", startingOffsets="20")).load()
    expected_places = sorted(row["position"] for row in rows if row["stream"] == "run-1" and row["position"] >= 20)
    assert sorted(row.position for row in chosen.select("position").collect()) == expected_places
    # Spark has nothing left to filter: the source took it all.
    assert "Filter" not in narrow._jdf.queryExecution().executedPlan().toString().replace("RuntimeFilters", "")
    fields = spark.read.format("millstream").options(**streams.options()).schema(typed_schema("n INT, of STRING"))
    found = fields.load().selectExpr("max(n)", "count_if(of <> stream)").first()
    assert found is not None and tuple(found) == (15, 0)


def test_a_frame_can_be_used_again_after_a_filter(spark: SparkSession, streams: Streams) -> None:
    expected = fill(streams)
    frame = spark.read.format("millstream").options(**streams.options()).load()
    one, two = frame.where("stream = 'run-1'"), frame.where("stream = 'run-2'")
    assert one.count() == len(expected["run-1"])
    assert payloads([row.asDict() for row in frame.collect()]) == expected
    both = payloads([row.asDict() for row in one.union(two).collect()])
    assert both == {name: expected[name] for name in ("run-1", "run-2")}


def test_count_of_an_empty_bucket_is_zero(spark: SparkSession, streams: Streams) -> None:
    assert spark.read.format("millstream").options(**streams.options()).load().count() == 0


def test_a_bucket_that_shares_its_segment_reads_its_own_rows_only(tmp_path: Path) -> None:
    expected = {"run-1": [{"n": 1}, {"n": 2}], "run-2": [{"n": 3}]}
    with server_at(tmp_path / "data", "hot.keep_bytes=0B") as running, Streams(running) as streams:
        for name, values in expected.items():
            streams.append(name, *values)
        for number in range(40):
            path, json_type = f"/v1/stream/other{number}/run-1", {"content-type": "application/json"}
            answer = streams.client.put(path, content=b'[{"n":"foreign"}]', headers=json_type)
            assert answer.status_code == 201
        streams.flush()
        assert [one["bucket"] for one in streams.cold()["shards"][0]["segments"]] == [""]
        assert "other" not in str(streams.cold()["shards"])
        assert payloads(read(streams.options())) == expected
        assert payloads(read(streams.options(stream="run-1"))) == {"run-1": expected["run-1"]}


def test_partitions_are_sized_by_payload_not_by_stored_bytes(streams: Streams) -> None:
    """Payloads that compress to nearly nothing are as much work for a task as any others."""
    for number in range(8):
        streams.append(f"run-{number}", *({"pad": "x" * 500} for _ in range(2_500)))
    streams.flush()
    stored = sum(one["size"] for one in streams.cold()["shards"][0]["segments"])
    assert stored < 1 << 20
    partitions = reader_of(streams.options(maxPartitionBytes="2m")).partitions()
    assert 4 <= len(partitions) <= 8
    assert len(reader_of(streams.options()).partitions()) == 1


def test_min_partitions_splits_a_small_read(streams: Streams) -> None:
    for number in range(8):
        streams.append(f"run-{number}", *({"n": n, "pad": "x" * 500} for n in range(2_500)))
    streams.flush()
    reader = reader_of(streams.options(minPartitions="4"))
    partitions = reader.partitions()
    assert 4 <= len(partitions) <= 6
    assert len(rows_of(reader, partitions)) == 20_000
    streams.append("run-0", *({"n": n} for n in range(20)))
    assert len(read(streams.options(minPartitions="3"))) == 20_020
