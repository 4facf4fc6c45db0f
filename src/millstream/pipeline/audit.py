"""audit: prove that the cold tier is whole and that the server agrees with it.

- Every segment is read: file and page checksums, footer, index against rows.
- Of every stream every offset is there once, without gaps, from where it is kept to its tail as of the last flush.
- Every object that something refers to is there, and every object is referred to by something.
- The server lists the same segments, and the same streams with tails that are not behind.

Objects younger than `orphan_seconds` that nothing names are not judged: a flush or a compaction may be about to.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyarrow as arrow

from millstream.errors import Corrupt, MillstreamError, NotFound
from millstream.pipeline.audit_server import compare_with_server
from millstream.pipeline.planning import DAY_MS
from millstream.pipeline.server import JobServer, connected, store_of
from millstream.pipeline.tasks import map_tasks
from millstream.pipeline.view import View, load_only_view
from millstream.spark.options import ColdRoot, Connection
from millstream.streams.records import SegmentRef
from millstream.tiers.inspection import Inspection
from millstream.tiers.objects import ObjectStoreSettings, open_objects

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PROBLEMS_MAX: Final = 1_000
TASK_BYTES: Final = 256 << 20
_COLUMNS: Final = "problem string, path string, stream string, incarnation long, first long, last long, messages long"
_SCHEMA: Final = arrow.schema(
    [
        ("problem", arrow.string()),
        ("path", arrow.string()),
        ("stream", arrow.string()),
        ("incarnation", arrow.int64()),
        ("first", arrow.int64()),
        ("last", arrow.int64()),
        ("messages", arrow.int64()),
    ]
)


@dataclass(frozen=True)
class AuditOptions:
    connection: Connection
    cold: ColdRoot
    orphan_seconds: float = 3600.0


class Problem(NamedTuple):
    kind: str
    where: str
    what: str


class SegmentFigure(NamedTuple):
    bucket: str
    day: int
    payload_bytes: int
    stored_bytes: int
    live_bytes: int


class AuditReport(NamedTuple):
    through: int
    segments: int
    messages: int
    payload_bytes: int
    streams: int
    problems: list[Problem]
    figures: list[SegmentFigure]
    seconds: float


class _Task(NamedTuple):
    store: ObjectStoreSettings
    segments: list[SegmentRef]


def audit(spark: SparkSession, options: AuditOptions) -> AuditReport:
    with connected(options.connection) as server:
        return _audit(spark, options, server)


def _audit(spark: SparkSession, options: AuditOptions, server: JobServer) -> AuditReport:
    started = time.monotonic()
    settings = store_of(server, options.cold)
    view = asyncio.run(_view(settings))
    segments = list(view.cold.segments.values())
    if not segments:
        problems = asyncio.run(_check_objects(settings, view, options.orphan_seconds))
        problems += _check_server(server, settings, view, set())
        return AuditReport(view.through - 1, 0, 0, 0, len(view.streams), problems, [], time.monotonic() - started)
    found = map_tasks(spark, list(_tasks(settings, segments)), _inspect, _COLUMNS).persist()
    try:
        problems = [
            Problem("segment", row["path"], row["problem"])
            for row in found.where("problem is not null").limit(PROBLEMS_MAX).collect()
        ]
        runs = found.where("problem is null")
        problems += _check_streams(spark, runs, view)
        live = _live_bytes(spark, runs, view)
    finally:
        found.unpersist()
    problems += asyncio.run(_check_objects(settings, view, options.orphan_seconds))
    problems += _check_server(server, settings, view, set(live))
    figures = [
        SegmentFigure(one.bucket, one.first_at_ms // DAY_MS, one.payload_bytes, one.size, live.get(one.path, 0))
        for one in segments
    ]
    return AuditReport(
        view.through - 1,
        len(segments),
        sum(one.rows for one in segments),
        sum(one.payload_bytes for one in segments),
        len(view.streams),
        problems[:PROBLEMS_MAX],
        figures,
        time.monotonic() - started,
    )


async def _view(settings: ObjectStoreSettings) -> View:
    return await load_only_view(open_objects(settings))


def _tasks(settings: ObjectStoreSettings, segments: list[SegmentRef]) -> Iterator[_Task]:
    chosen: list[SegmentRef] = []
    size = 0
    for segment in segments:
        if chosen and size + segment.size > TASK_BYTES:
            yield _Task(settings, chosen)
            chosen, size = [], 0
        chosen.append(segment)
        size += segment.size
    yield _Task(settings, chosen)


# -- segments --------------------------------------------------------------------------------------------------------


def _inspect(task: _Task) -> Iterator[arrow.RecordBatch]:
    """What is wrong with the segments, and the runs of messages that they hold."""
    for segment in task.segments:
        rows = asyncio.run(_inspect_segment(task.store, segment))
        yield arrow.RecordBatch.from_pylist([dict(zip(_SCHEMA.names, row, strict=True)) for row in rows], _SCHEMA)


async def _inspect_segment(store: ObjectStoreSettings, segment: SegmentRef) -> list[tuple[Any, ...]]:
    objects = open_objects(store)
    try:
        inspection = await Inspection.begin(objects, segment)
    except (Corrupt, NotFound) as error:
        return [(error.message, segment.path, None, None, None, None, None)]
    rows: list[tuple[Any, ...]] = [
        (None, segment.path, one.stream, one.incarnation, one.offset_start, one.offset_end, one.rows)
        for one in inspection.footer.extents
    ]
    try:
        await inspection.read(objects)
    except (Corrupt, NotFound) as error:
        rows.append((error.message, segment.path, None, None, None, None, None))
    return rows


# -- streams ---------------------------------------------------------------------------------------------------------


def _streams(spark: SparkSession, view: View) -> DataFrame:
    """What the manifests expect: from where to where each stream's messages must be there."""
    from pyspark.sql.types import LongType, StringType, StructField, StructType

    rows = [
        (stream.incarnation, str(stream.key), _begin(stream.kept_from, stream.fork), stream.tail)
        for stream in view.streams.values()
    ]
    names = [("incarnation", LongType()), ("name", StringType()), ("kept_from", LongType()), ("tail", LongType())]
    return spark.createDataFrame(rows, StructType([StructField(name, kind) for name, kind in names]))


def _begin(kept_from: int, fork: tuple[int, int] | None) -> int:
    """A fork's own messages begin where it left its source."""
    return max(kept_from, fork[1] if fork is not None else 0)


def _check_streams(spark: SparkSession, runs: DataFrame, view: View) -> list[Problem]:
    from pyspark.sql import Window, functions

    streams = _streams(spark, view)
    kept = runs.join(streams, "incarnation").where("last > kept_from")
    before = functions.lag("last").over(Window.partitionBy("incarnation").orderBy("first", "last"))
    edges = kept.withColumn("before", before).where("before is not null and before != first")
    problems = [
        Problem(
            "stream",
            row["name"],
            f"offsets {row['before']} to {row['first']} are missing"
            if row["before"] < row["first"]
            else f"offsets {row['first']} to {row['before']} are there twice",
        )
        for row in edges.limit(PROBLEMS_MAX).collect()
    ]
    ends = kept.groupBy("incarnation").agg(functions.min("first").alias("low"), functions.max("last").alias("high"))
    wrong = (
        streams.join(ends, "incarnation", "left")
        .where("tail > kept_from and (low is null or low > kept_from or high != tail)")
        .limit(PROBLEMS_MAX)
        .collect()
    )
    for row in wrong:
        there = "none are" if row["low"] is None else f"only {row['low']} to {row['high']} are"
        what = f"offsets {row['kept_from']} to {row['tail']} should be there, and {there}"
        problems.append(Problem("stream", row["name"], what))
    return problems


def _live_bytes(spark: SparkSession, runs: DataFrame, view: View) -> dict[str, int]:
    """By segment, how much of it counts."""
    from pyspark.sql import functions

    kept = runs.join(_streams(spark, view), "incarnation").where("last > kept_from")
    length = functions.expr("last - greatest(first, kept_from)")
    return {row["path"]: row["live"] for row in kept.groupBy("path").agg(functions.sum(length).alias("live")).collect()}


# -- objects and the server ------------------------------------------------------------------------------------------


async def _check_objects(settings: ObjectStoreSettings, view: View, orphan_seconds: float) -> list[Problem]:
    """Objects that are missing, and objects that nothing refers to."""
    objects = open_objects(settings)
    blobs = {f"snapshots/{stream.snapshot}" for stream in view.streams.values() if stream.snapshot is not None}
    needed = view.cold.segments.keys() | view.notes | blobs
    known = needed | view.cold.retired
    judged_before_ms = (time.time() - orphan_seconds) * 1000
    seen: set[str] = set()
    problems: list[Problem] = []
    for prefix in ("segments/", "notes/", "snapshots/"):
        async for entry in objects.list(prefix):
            seen.add(entry.path)
            if entry.path not in known and entry.modified_ms <= judged_before_ms:
                problems.append(Problem("object", entry.path, "nothing refers to this object"))
    gone = needed - seen
    if gone:
        # A flush or a compaction may have removed them since the manifests were read.
        fresh = await load_only_view(objects)
        still = {f"snapshots/{stream.snapshot}" for stream in fresh.streams.values() if stream.snapshot is not None}
        gone &= fresh.cold.segments.keys() | fresh.notes | still
    return problems + [Problem("object", path, "this object is referred to and not there") for path in sorted(gone)]


def _check_server(server: JobServer, settings: ObjectStoreSettings, view: View, alive: set[str]) -> list[Problem]:
    try:
        return [Problem("server", *found) for found in compare_with_server(server, settings, view, alive)]
    except MillstreamError as error:
        return [Problem("server", "the server", error.message)]
