"""audit: prove that the cold tier is whole and that the server agrees with it.

- Every segment is read: file and page checksums, footer, index against rows.
- Of every stream every offset is there once, without gaps, from where it is kept to its tail as of the last flush.
- Every object that something refers to is there, and every object is referred to by something.
- The server lists the same segments, and the same streams with tails that are not behind.

Objects younger than `orphan_seconds` that nothing names are not judged: a flush or a compaction may be about to.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyarrow as arrow

from millstream.clock import SystemClock, monotonic_seconds
from millstream.errors import Corrupt, MillstreamError, NotFound
from millstream.pipeline.audit_server import compare_with_server
from millstream.pipeline.job_client import JobClient, job_client, store_of
from millstream.pipeline.planning import DAY_MS
from millstream.pipeline.tasks import map_tasks
from millstream.pipeline.view import View, load_views
from millstream.spark.options import ColdRoot, Connection
from millstream.streams.records import SegmentRef
from millstream.tiers.inspection import Inspection
from millstream.tiers.objects import ObjectStoreSettings, open_objects

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PROBLEMS_MAX: Final = 1_000
TASK_BYTES: Final = 256 << 20
_COLUMNS: Final = (
    "problem string, path string, shard long, stream string, incarnation long, first long, last long, messages long"
)
_SCHEMA: Final = arrow.schema(
    [
        ("problem", arrow.string()),
        ("path", arrow.string()),
        ("shard", arrow.int64()),
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
    through: dict[int, int]
    """By shard, the position up to which the store was checked."""
    segments: int
    messages: int
    payload_bytes: int
    streams: int
    problems: list[Problem]
    figures: list[SegmentFigure]
    seconds: float


class _Task(NamedTuple):
    store: ObjectStoreSettings
    segments: list[tuple[int, SegmentRef]]
    """Each with its shard."""


# What tells streams apart, of all shards.
_STREAM: Final = ["shard", "incarnation"]


def audit(spark: SparkSession, options: AuditOptions) -> AuditReport:
    with job_client(options.connection) as client:
        return _audit(spark, options, client)


def _audit(spark: SparkSession, options: AuditOptions, client: JobClient) -> AuditReport:
    started = monotonic_seconds()
    settings = store_of(client, options.cold)
    views = asyncio.run(_views(settings))
    through = {view.shard: view.through - 1 for view in views}
    streams = sum(len(view.streams) for view in views)
    placed = [(view.shard, segment) for view in views for segment in view.cold.segments.values()]
    if not placed:
        problems = asyncio.run(_check_objects(settings, views, options.orphan_seconds))
        problems += _check_server(client, settings, views, set())
        return AuditReport(through, 0, 0, 0, streams, problems, [], monotonic_seconds() - started)
    found = map_tasks(spark, list(_tasks(settings, placed)), _inspect, _COLUMNS).persist()
    try:
        problems = [
            Problem("segment", row["path"], row["problem"])
            for row in found.where("problem is not null").limit(PROBLEMS_MAX).collect()
        ]
        runs = found.where("problem is null")
        problems += _check_streams(spark, runs, views)
        live = _live_bytes(spark, runs, views)
    finally:
        found.unpersist()
    problems += asyncio.run(_check_objects(settings, views, options.orphan_seconds))
    problems += _check_server(client, settings, views, set(live))
    segments = [segment for _, segment in placed]
    figures = [
        SegmentFigure(
            one.bucket or "(shared)", one.first_at_ms // DAY_MS, one.payload_bytes, one.size, live.get(one.path, 0)
        )
        for one in segments
    ]
    return AuditReport(
        through,
        len(segments),
        sum(one.rows for one in segments),
        sum(one.payload_bytes for one in segments),
        streams,
        problems[:PROBLEMS_MAX],
        figures,
        monotonic_seconds() - started,
    )


async def _views(settings: ObjectStoreSettings) -> list[View]:
    return await load_views(open_objects(settings))


def _tasks(settings: ObjectStoreSettings, placed: list[tuple[int, SegmentRef]]) -> Iterator[_Task]:
    chosen: list[tuple[int, SegmentRef]] = []
    size = 0
    for shard, segment in placed:
        if chosen and size + segment.size > TASK_BYTES:
            yield _Task(settings, chosen)
            chosen, size = [], 0
        chosen.append((shard, segment))
        size += segment.size
    yield _Task(settings, chosen)


# -- segments --------------------------------------------------------------------------------------------------------


def _inspect(task: _Task) -> Iterator[arrow.RecordBatch]:
    """What is wrong with the segments, and the runs of messages that they hold."""
    for shard, segment in task.segments:
        rows = asyncio.run(_inspect_segment(task.store, shard, segment))
        yield arrow.RecordBatch.from_pylist([dict(zip(_SCHEMA.names, row, strict=True)) for row in rows], _SCHEMA)


async def _inspect_segment(store: ObjectStoreSettings, shard: int, segment: SegmentRef) -> list[tuple[Any, ...]]:
    objects = open_objects(store)
    try:
        inspection = await Inspection.begin(objects, segment)
    except (Corrupt, NotFound) as error:
        return [(error.message, segment.path, shard, None, None, None, None, None)]
    rows: list[tuple[Any, ...]] = [
        (None, segment.path, shard, one.stream, one.incarnation, one.offset_start, one.offset_end, one.rows)
        for one in inspection.footer.extents
    ]
    try:
        await inspection.read(objects)
    except (Corrupt, NotFound) as error:
        rows.append((error.message, segment.path, shard, None, None, None, None, None))
    return rows


# -- streams ---------------------------------------------------------------------------------------------------------


def _streams(spark: SparkSession, views: list[View]) -> DataFrame:
    """What the manifests expect: from where to where each stream's messages must be there."""
    from pyspark.sql.types import LongType, StringType, StructField, StructType

    rows = [
        (view.shard, stream.incarnation, str(stream.key), _begin(stream.kept_from, stream.fork), stream.tail)
        for view in views
        for stream in view.streams.values()
    ]
    numbers = ("shard", "incarnation", "kept_from", "tail")
    names = ("shard", "incarnation", "name", "kept_from", "tail")
    fields = [StructField(name, LongType() if name in numbers else StringType()) for name in names]
    return spark.createDataFrame(rows, StructType(fields))


def _begin(kept_from: int, fork: tuple[int, int] | None) -> int:
    """A fork's own messages begin where it left its source."""
    return max(kept_from, fork[1] if fork is not None else 0)


def _check_streams(spark: SparkSession, runs: DataFrame, views: list[View]) -> list[Problem]:
    from pyspark.sql import Window, functions

    streams = _streams(spark, views)
    kept = runs.join(streams, _STREAM).where("last > kept_from")
    before = functions.lag("last").over(Window.partitionBy(*_STREAM).orderBy("first", "last"))
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
    ends = kept.groupBy(*_STREAM).agg(functions.min("first").alias("low"), functions.max("last").alias("high"))
    wrong = (
        streams.join(ends, _STREAM, "left")
        .where("tail > kept_from and (low is null or low > kept_from or high != tail)")
        .limit(PROBLEMS_MAX)
        .collect()
    )
    for row in wrong:
        there = "none are" if row["low"] is None else f"only {row['low']} to {row['high']} are"
        what = f"offsets {row['kept_from']} to {row['tail']} should be there, and {there}"
        problems.append(Problem("stream", row["name"], what))
    return problems


def _live_bytes(spark: SparkSession, runs: DataFrame, views: list[View]) -> dict[str, int]:
    """By segment, how much of it counts."""
    from pyspark.sql import functions

    kept = runs.join(_streams(spark, views), _STREAM).where("last > kept_from")
    length = functions.expr("last - greatest(first, kept_from)")
    return {row["path"]: row["live"] for row in kept.groupBy("path").agg(functions.sum(length).alias("live")).collect()}


# -- objects and the server ------------------------------------------------------------------------------------------


async def _check_objects(settings: ObjectStoreSettings, views: list[View], orphan_seconds: float) -> list[Problem]:
    """Objects that are missing, and objects that nothing refers to."""
    objects = open_objects(settings)
    needed = _needed(views)
    known = needed.union(*(view.cold.retired for view in views))
    judged_before_ms = SystemClock().now_ms() - orphan_seconds * 1000
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
        gone &= _needed(await load_views(objects))
    return problems + [Problem("object", path, "this object is referred to and not there") for path in sorted(gone)]


def _needed(views: list[View]) -> set[str]:
    """The objects that something refers to."""
    needed: set[str] = set()
    for view in views:
        needed |= view.cold.segments.keys() | view.notes
        needed |= {f"snapshots/{stream.snapshot}" for stream in view.streams.values() if stream.snapshot is not None}
    return needed


def _check_server(
    client: JobClient, settings: ObjectStoreSettings, views: list[View], alive: set[str]
) -> list[Problem]:
    try:
        return [Problem("server", *found) for found in compare_with_server(client, settings, views, alive)]
    except MillstreamError as error:
        return [Problem("server", "the server", error.message)]
