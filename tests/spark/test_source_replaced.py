"""Reads that were planned before a compaction, and run after the server has deleted the old segments."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

import millstream.spark
from millstream.spark.batch import BatchReader
from millstream.spark.columns import message_schema
from millstream.spark.errors import SourceError
from millstream.spark.options import Connection, read_options
from millstream.tiers.objects import ObjectStoreSettings
from millstream.tiers.segments import Extent
from support.cold import FolderStore, names, server_on, wait_until
from support.compaction import plan, proposal, write
from support.pipeline import Scene, fill
from support.spark_source import read, rows_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SETTINGS = ("cold.flush_interval=100ms", "hot.keep_bytes=0B", "cold.reclaim_grace=0s")
COLUMNS = ("stream", "offset_start", "offset_end", "position", "incarnation", "payload")


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    """A server that deletes replaced segments at once."""
    store = FolderStore(tmp_path / "cold")
    with (
        server_on(tmp_path / "data", store, *SETTINGS) as server,
        httpx.Client(base_url=server.url, timeout=30) as client,
    ):
        yield Scene(server, client, store, Connection(server.url, None, 30.0))


def compact(scene: Scene) -> None:
    """Compact everything, and wait until the old segments are gone."""
    settings = ObjectStoreSettings("fs", scene.store.folder, {})
    for group in asyncio.run(plan(settings)):
        body = proposal(group, asyncio.run(write(settings, group)))
        answer = scene.client.post("/cluster/compactions", json=body)
        assert answer.status_code in (200, 201), answer.text
        old = {source.path for source in group.sources}
        scene.append("/other/s", 1)  # something to flush, which moves the index and frees the old segments
        wait_until(lambda old=old: not old & names(scene.store, "segments"), "old segments to be deleted")


def planned(scene: Scene, **more: str) -> tuple[BatchReader, list[Any]]:
    options = read_options({"url": scene.connection.url, "bucket": "runs", "columns": ",".join(COLUMNS), **more})
    reader = BatchReader(options, message_schema(COLUMNS))
    return reader, reader.partitions()


def rows(scene: Scene, **more: str) -> list[dict[str, Any]]:
    found = read({"url": scene.connection.url, "bucket": "runs", "columns": ",".join(COLUMNS), **more})
    return sorted(found, key=lambda row: row["position"])


@pytest.fixture
def filled(scene: Scene) -> Scene:
    scene.bucket("other")
    scene.create("/other/s")
    fill(scene, "runs", flushes=5, streams=6)
    return scene


def test_planned_read_returns_the_same_rows_after_a_compaction(filled: Scene) -> None:
    before = rows(filled)
    all_rows = planned(filled, maxPartitionBytes="1k")
    few = planned(filled, prefix="s1")
    late = planned(filled, startingOffsets=str(before[20]["position"]), endingOffsets=str(before[70]["position"]))
    compact(filled)
    assert sorted(rows_of(*all_rows), key=lambda row: row["position"]) == before
    assert len(all_rows[1]) > 1
    assert sorted(rows_of(*few), key=lambda row: row["position"]) == [row for row in before if row["stream"] == "s1"]
    assert sorted(rows_of(*late), key=lambda row: row["position"]) == before[20:70]


def test_some_tasks_before_and_some_after_two_compactions_give_every_row_once(filled: Scene) -> None:
    before = rows(filled)
    reader, partitions = planned(filled, maxPartitionBytes="1k")
    random.Random(3).shuffle(partitions)
    third = len(partitions) // 3
    found = rows_of(reader, partitions[:third])
    compact(filled)
    found += rows_of(reader, partitions[third : 2 * third])
    for number in range(6):
        if number % 2 == 0:
            filled.append(f"/runs/s{number}", {"later": True})
    filled.flushed()
    compact(filled)
    found += rows_of(reader, partitions[2 * third :])
    assert sorted(found, key=lambda row: row["position"]) == before


def test_messages_deleted_and_trimmed_since_are_left_out_and_the_rest_is_there(filled: Scene) -> None:
    before = rows(filled)
    reader, partitions = planned(filled)
    assert filled.client.delete("/runs/s0").status_code == 204
    middle = [row for row in before if row["stream"] == "s2"][12]["offset_end"]
    at = f"{0:016d}_{middle:016d}"
    answer = filled.client.put(f"/runs/s2/snapshot/{at}", content=b"{}", headers={"content-type": "application/json"})
    assert answer.status_code in (200, 201, 204), answer.text
    compact(filled)
    gone = {(row["stream"], row["position"]) for row in before if row["stream"] == "s0"}
    gone |= {
        (row["stream"], row["position"]) for row in before if row["stream"] == "s2" and row["offset_end"] <= middle
    }
    expected = [row for row in before if (row["stream"], row["position"]) not in gone]
    assert sorted(rows_of(reader, partitions), key=lambda row: row["position"]) == expected


def test_segment_that_was_lost_and_not_replaced_is_an_error(filled: Scene) -> None:
    reader, partitions = planned(filled)
    for path in names(filled.store, "segments"):
        if "bucket=runs" in path:
            (filled.store.folder / path).unlink()
    with pytest.raises(SourceError, match=r"segment .* is not in the cold tier at"):
        rows_of(reader, partitions)
    with pytest.raises(SourceError, match=r"segment .* is not in the cold tier at"):
        reader.partitions()


def test_dataframe_and_view_outlive_a_compaction_and_are_refreshed(spark: SparkSession, filled: Scene) -> None:
    frame = spark.read.format("millstream").options(url=filled.connection.url, bucket="runs").load()
    frame.createOrReplaceTempView("runs_now")
    count = len(rows(filled))
    assert frame.count() == count
    filled.append("/runs/s0", {"n": 1}, {"n": 2})
    filled.flushed()
    compact(filled)
    assert frame.count() == count
    assert spark.sql("SELECT * FROM runs_now").count() == count
    assert millstream.spark.refresh(frame).count() == count + 2
    assert spark.sql("SELECT * FROM runs_now").count() == count + 2
    filled.append("/runs/s0", {"n": 3})
    assert millstream.spark.refresh(spark.table("runs_now")).count() == count + 3
    with pytest.raises(SourceError, match="does not read millstream"):
        millstream.spark.refresh(spark.range(3))


def test_refresh_finds_sources_in_subqueries(spark: SparkSession, filled: Scene) -> None:
    frame = spark.read.format("millstream").options(url=filled.connection.url, bucket="runs").load()
    frame.createOrReplaceTempView("runs_sub")
    query = spark.sql("SELECT 1 AS one WHERE (SELECT count(*) FROM runs_sub) > 0")
    assert query.count() == 1
    assert millstream.spark.refresh(query).count() == 1


def test_packed_ranges_leave_out_what_is_dead() -> None:
    from millstream.spark.relocation import OffsetRange, pack, unpack

    extents = [Extent("a", 1, 0, 10, 0, 0, 2), Extent("b", 2, 5, 9, 0, 2, 1), Extent("b", 2, 9, 20, 1, 0, 3)]
    packed = pack(extents, {1: 2**62, 2: 12})
    assert unpack([packed], [0, 1]) == [OffsetRange(1, 2, 12, 20)]
    assert unpack([packed], [0]) == []
    assert unpack([pack(extents, {})], [0]) == [OffsetRange(0, 1, 0, 10), OffsetRange(0, 2, 5, 9)]
