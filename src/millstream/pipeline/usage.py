"""usage: bytes, messages and streams by bucket and day, from the index in the segments' footers.

Counts what is alive as of the last flush. Payloads are not read; where a trim has cut through a run of messages, the
offsets of that run are.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as arrow

from millstream.pipeline import charts
from millstream.pipeline.job_client import job_client, store_of
from millstream.pipeline.planning import DAY_MS
from millstream.pipeline.tasks import map_tasks
from millstream.pipeline.view import View, load_views
from millstream.sizes import human_bytes
from millstream.spark.options import ColdRoot, Connection
from millstream.streams.records import SegmentRef
from millstream.tiers.objects import ObjectStoreSettings, open_objects
from millstream.tiers.segment_reader import SegmentReader
from millstream.tiers.segments import SHARED, Extent, Footer, whole

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_COLUMNS = "bucket string, day long, incarnation long, messages long, bytes long, stored long"


@dataclass(frozen=True)
class UsageOptions:
    connection: Connection
    cold: ColdRoot
    buckets: tuple[str, ...] = ()
    segments_per_task: int = 64


class UsageRow(NamedTuple):
    bucket: str
    day: str
    streams: int
    messages: int
    payload_bytes: int
    stored_bytes: int
    """What the segments of that day take in the store, dead messages included."""


class _Task(NamedTuple):
    store: ObjectStoreSettings
    segments: list[SegmentRef]
    kept_from: dict[int, int]
    """Only the incarnations of these segments, which are of one shard; what is not in it is gone."""


def usage(spark: SparkSession, options: UsageOptions) -> list[UsageRow]:
    with job_client(options.connection) as client:
        settings = store_of(client, options.cold)
    tasks = asyncio.run(_plan(settings, options))
    if not tasks:
        return []
    from pyspark.sql import functions

    counted = map_tasks(spark, tasks, _count, _COLUMNS)
    totals = (
        counted.groupBy("bucket", "day")
        .agg(
            # A bucket is in one shard, so its streams have different incarnations.
            functions.countDistinct("incarnation").alias("streams"),
            functions.sum("messages").alias("messages"),
            functions.sum("bytes").alias("bytes"),
            functions.sum("stored").alias("stored"),
        )
        .orderBy("bucket", "day")
        .collect()
    )
    return [
        UsageRow(row["bucket"], day_of(row["day"]), row["streams"], row["messages"], row["bytes"], row["stored"])
        for row in totals
    ]


def day_of(day: int) -> str:
    return datetime.fromtimestamp(day * DAY_MS / 1000, UTC).date().isoformat()


async def _plan(settings: ObjectStoreSettings, options: UsageOptions) -> list[_Task]:
    objects = open_objects(settings)
    reader = SegmentReader(objects)
    return [task for view in await load_views(objects) for task in _plan_shard(reader, settings, view, options)]


def _plan_shard(reader: SegmentReader, settings: ObjectStoreSettings, view: View, options: UsageOptions) -> list[_Task]:
    selection = {*options.buckets, SHARED}
    segments = [one for one in view.cold.segments.values() if not options.buckets or one.bucket in selection]
    tasks: list[_Task] = []
    chosen: list[SegmentRef] = []
    kept: dict[int, int] = {}
    for segment, footer in reader.footers(segments):
        chosen.append(segment)
        kept |= _kept(footer, view, options)
        if len(chosen) >= options.segments_per_task:
            tasks.append(_Task(settings, chosen, kept))
            chosen, kept = [], {}
    return [*tasks, _Task(settings, chosen, kept)] if chosen else tasks


def _kept(footer: Footer, view: View, options: UsageOptions) -> dict[int, int]:
    found = {
        extent.incarnation: view.kept_from(extent.incarnation)
        for bucket, extent in zip(footer.buckets(), footer.extents, strict=True)
        if not options.buckets or bucket in options.buckets
    }
    return {incarnation: offset for incarnation, offset in found.items() if offset is not None}


def _count(task: _Task) -> Iterator[arrow.RecordBatch]:
    rows: list[tuple[Any, ...]] = _count_segments(task)
    columns: list[Any] = list(zip(*rows, strict=True)) if rows else [()] * 6
    kinds = [arrow.string(), *[arrow.int64()] * 5]
    names = ["bucket", "day", "incarnation", "messages", "bytes", "stored"]
    yield arrow.record_batch([arrow.array(c, k) for c, k in zip(columns, kinds, strict=True)], names)


def _count_segments(task: _Task) -> list[tuple[Any, ...]]:
    reader = SegmentReader(open_objects(task.store))
    rows: list[tuple[Any, ...]] = []
    for segment, footer in reader.footers(task.segments):
        day = segment.first_at_ms // DAY_MS
        counts: dict[int, list[int]] = {}
        bucket_of: dict[int, str] = {}
        for bucket, extent in zip(footer.buckets(), footer.extents, strict=True):
            bucket_of[extent.incarnation] = bucket
            messages, size = _live(reader, segment, footer, extent, task.kept_from.get(extent.incarnation))
            if messages:
                total = counts.setdefault(extent.incarnation, [0, 0])
                total[0] += messages
                total[1] += size
        for number, (incarnation, (messages, size)) in enumerate(counts.items()):
            # The file counts once, whatever number of streams it holds; buckets that share it by what they have in it.
            stored = 0 if number else segment.size
            if segment.bucket == SHARED:
                stored = segment.size * size // max(segment.payload_bytes, 1)
            rows.append((bucket_of[incarnation], day, incarnation, messages, size, stored))
    return rows


def _live(
    reader: SegmentReader, segment: SegmentRef, footer: Footer, extent: Extent, kept_from: int | None
) -> tuple[int, int]:
    """Messages and bytes of an extent that count."""
    if kept_from is None or extent.offset_end <= kept_from:
        return 0, 0
    if kept_from <= extent.offset_start:
        return extent.rows, extent.offset_end - extent.offset_start
    table = reader.row_group(segment, footer.metadata, extent.row_group, ["offset_end"])
    ends = memoryview(whole(table.column("offset_end")).buffers()[1]).cast("q")
    stop = extent.row_start + extent.rows
    first = bisect_right(ends, kept_from, extent.row_start, stop)
    begin = ends[first - 1] if first > extent.row_start else extent.offset_start
    return stop - first, extent.offset_end - begin


def render(rows: Iterable[UsageRow]) -> str:
    """The same as a page with charts."""
    found = list(rows)
    days = sorted({row.day for row in found})
    blocks = []
    palette = charts.Palette(sorted({row.bucket for row in found}))
    for title, unit, field in (
        ("Payload by day", "B", "payload_bytes"),
        ("Messages by day", "", "messages"),
        ("Streams with messages of that day", "", "streams"),
    ):
        series = []
        for bucket in sorted({row.bucket for row in found}):
            by_day = {row.day: float(getattr(row, field)) for row in found if row.bucket == bucket}
            series.append(charts.Series(bucket, [by_day.get(day, 0.0) for day in days]))
        blocks.append(f"<h2>{title}</h2>" + charts.stacked_bars(days, series, unit, palette))
    headings = ("bucket", "day", "streams", "messages", "payload", "stored")
    lines = [(*row[:4], human_bytes(row.payload_bytes), human_bytes(row.stored_bytes)) for row in found]
    return charts.page("Usage", *blocks, "<h2>Table</h2>", charts.table(headings, lines))
