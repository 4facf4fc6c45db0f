"""Pieces of a read: some row groups of a segment, or a stretch of the feed; and how a task turns them into batches.

A piece says exactly which rows it stands for, whatever happens to the server meanwhile: rows of a segment that were
dead when the read was planned are listed with it, and a stretch of the feed has both its ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import and_
from typing import Final

import pyarrow as arrow
import pyarrow.compute as compute
from pyspark.sql.datasource import Filter, InputPartition

from millstream.spark import typed
from millstream.spark.cold_reader import ColdReader
from millstream.spark.columns import Layout, message_arrays
from millstream.spark.errors import SegmentMissing
from millstream.spark.filters import HIGHEST, LOWEST, Selection, row_condition, stored_columns
from millstream.spark.options import Connection, ReadOptions
from millstream.spark.relocation import Relocation, unpack
from millstream.spark.source_client import SourceClient
from millstream.streams.records import SegmentRef
from millstream.tiers.objects import ObjectStoreSettings
from millstream.tiers.segments import SHARED

# An offset beyond every message: nothing of a stream that "starts" here is alive.
NOTHING_ALIVE: Final = 2**62
BATCH_ROWS: Final = 100_000
TIME_MAX_MS: Final = 253_402_300_799_999  # the last millisecond of the year 9999

_MILLISECONDS: Final = arrow.timestamp("ms", tz="UTC")


@dataclass(frozen=True)
class SegmentPiece:
    """Row groups of a segment. `earliest` has the streams some of whose rows may be dead.

    `ranges` says which messages these are (see `relocation.py`), in case the segment is replaced before it is read.
    """

    shard: int
    segment: SegmentRef
    groups: tuple[int, ...]
    earliest: dict[int, int]
    payload_bytes: int
    ranges: tuple[bytes, ...]


@dataclass(frozen=True)
class FeedPiece:
    """The bucket's messages from position `start` up to, and without, position `end`, through the server."""

    shard: int
    start: int
    end: int


@dataclass
class Partition(InputPartition):
    """What one task reads. (All of it is in here: Spark copies a reader to its tasks before it plans.)"""

    cold: ObjectStoreSettings | None
    selection: Selection
    segments: list[SegmentPiece] = field(default_factory=list)
    feed: list[FeedPiece] = field(default_factory=list)


@dataclass(frozen=True)
class RowRules:
    """Which rows of the pieces count: a range of positions, the names asked for, and Spark's filters."""

    bucket: str
    selection: Selection
    filters: tuple[Filter, ...]

    def conditions(self, first: SegmentRef | None = None) -> tuple[set[str], compute.Expression | None]:
        """What a row must satisfy, and the columns that takes; of a segment only what does not hold all through."""
        selection = self.selection
        columns = stored_columns(self.filters)
        terms = [term for term in (row_condition(self.filters),) if term is not None]
        if first is not None and first.bucket == SHARED:
            columns.add("bucket")
            terms.append(compute.field("bucket").cast(arrow.string()) == self.bucket)
        if selection.streams is not None:
            terms.append(compute.field("stream").isin(sorted(selection.streams)))
        terms += [compute.starts_with(compute.field("stream"), prefix) for prefix in selection.prefixes]
        if selection.names.low:
            terms.append(compute.field("stream") >= selection.names.low)
        if selection.names.high is not None:
            terms.append(compute.field("stream") < selection.names.high)
        if not selection.is_of_all_names:
            columns.add("stream")
        lowest, highest = (first.first_position, first.last_position) if first is not None else (LOWEST, HIGHEST)
        if not selection.position.holds(lowest, highest):
            columns.add("position")
            terms += [
                compute.field("position") >= selection.position.low,
                compute.field("position") <= selection.position.high,
            ]
        lowest, highest = (first.first_at_ms, first.last_at_ms) if first is not None else (LOWEST, HIGHEST)
        if not selection.at_ms.holds(lowest, highest):
            columns.add("appended_at")
            low, high = (max(min(one, TIME_MAX_MS), 0) for one in (selection.at_ms.low, selection.at_ms.high))
            at = compute.field("appended_at")
            terms += [at >= arrow.scalar(low, _MILLISECONDS), at <= arrow.scalar(high, _MILLISECONDS)]
        return columns, reduce(and_, terms) if terms else None


def segment_tables(
    connection: Connection,
    reader: ColdReader,
    pieces: Sequence[SegmentPiece],
    columns: set[str],
    rules: RowRules,
    on_dead: Callable[[int], None] = lambda rows: None,
) -> Iterator[arrow.Table]:
    """The rows of some pieces that count, with a segment's column names; `on_dead` is told how many no longer do."""
    for piece in pieces:
        tested, condition = rules.conditions(piece.segment)
        needed = columns | tested | ({"incarnation", "offset_end"} if piece.earliest else set())
        left = set(piece.groups)
        try:
            footer = reader.footer(piece.segment)
            for groups, table in reader.tables(piece.segment, footer, piece.groups, sorted(needed)):
                left -= set(groups)
                chosen = table if condition is None else table.filter(condition)
                alive = chosen.filter(_is_alive(chosen, piece.earliest)) if piece.earliest else chosen
                if alive.num_rows < chosen.num_rows:
                    on_dead(chosen.num_rows - alive.num_rows)
                yield alive
        except SegmentMissing as missing:
            yield from _relocated(connection, reader, piece, left, columns, rules, missing)


def _relocated(
    connection: Connection,
    reader: ColdReader,
    piece: SegmentPiece,
    groups: set[int],
    columns: set[str],
    rules: RowRules,
    missing: SegmentMissing,
) -> Iterator[arrow.Table]:
    """What some row groups of a piece held, read from the segments that have replaced the piece's."""
    relocation = Relocation(connection, rules.bucket, piece.shard, reader)
    # Compaction moves messages between segments of one bucket and those that buckets share: test everything.
    tested, condition = rules.conditions()
    ranges = unpack(piece.ranges, groups)
    for _, table in relocation.row_groups(piece.segment, ranges, columns | tested, missing):
        yield table if condition is None else table.filter(condition)


def _is_alive(table: arrow.Table, earliest: dict[int, int]) -> arrow.ChunkedArray:
    """For each row, whether it lies behind the earliest offset of its stream."""
    incarnations = arrow.array(list(earliest), arrow.int64())
    offsets = arrow.array(list(earliest.values()), arrow.int64())
    found = compute.index_in(table.column("incarnation"), value_set=incarnations)
    limits = compute.fill_null(compute.take(offsets, found), 0)
    return compute.greater(table.column("offset_end"), limits)


def feed_tables(connection: Connection, pieces: Sequence[FeedPiece], rules: RowRules) -> Iterator[arrow.Table]:
    _, condition = rules.conditions()
    client = SourceClient(connection)
    try:
        for piece in pieces:
            yield from _feed(client, piece, rules, condition)
    finally:
        client.close()


def _feed(
    client: SourceClient, piece: FeedPiece, rules: RowRules, condition: compute.Expression | None
) -> Iterator[arrow.Table]:
    after, last = piece.start - 1, piece.end - 1
    # The server sorts out by one prefix what it need not send; the rules decide.
    prefix = max(_prefixes(rules.selection), key=len, default="")
    while after < last:
        page = client.feed(rules.bucket, piece.shard, after, prefix)
        is_wanted = (compute.field("event") == "message") & (compute.field("position") <= last)
        table = page.table.filter(is_wanted if condition is None else is_wanted & condition)
        if table.num_rows:
            yield table
        if page.position <= after:
            return  # the server was restored to a position before the planned one: there is no more
        after = page.position


def _prefixes(selection: Selection) -> list[str]:
    if selection.streams is not None and len(selection.streams) == 1:
        return [*selection.prefixes, next(iter(selection.streams))]
    return list(selection.prefixes)


def batches_of(table: arrow.Table, layout: Layout, options: ReadOptions) -> Iterator[arrow.RecordBatch]:
    """A table with a segment's columns as batches with the columns that were asked for."""
    for start in range(0, table.num_rows, BATCH_ROWS):
        piece = table.slice(start, BATCH_ROWS) if table.num_rows > BATCH_ROWS else table
        batch = _batch(piece, layout, options)
        if batch.num_rows:
            yield batch


def _batch(table: arrow.Table, layout: Layout, options: ReadOptions) -> arrow.RecordBatch:
    arrays = {}
    if layout.typed.fields or layout.corrupt is not None:
        found = typed.parse(table, layout)
        columns = found.columns
        if found.fits is not None:
            if options.mode == "FAILFAST":
                typed.check(table, found.fits)
            if options.mode == "DROPMALFORMED":
                table = table.filter(found.fits)
                columns = [column.filter(found.fits) for column in columns]
        arrays = {field.name: column for field, column in zip(layout.typed.fields, columns, strict=True)}
        if layout.corrupt is not None:
            arrays[layout.corrupt] = _corrupt_texts(table, found.fits, options.mode)
    arrays |= message_arrays(options.bucket, table, layout)
    return arrow.record_batch([arrays[name] for name in layout.arrow_schema.names], schema=layout.arrow_schema)


def _corrupt_texts(table: arrow.Table, fits: arrow.Array | None, mode: str) -> arrow.Array:
    """The text of the records that do not fit, null for those that do."""
    if fits is None or mode == "DROPMALFORMED":
        return arrow.nulls(table.num_rows, arrow.string())
    texts = [
        None if is_good else bytes(payload).decode(errors="replace")
        for payload, is_good in zip(table.column("payload").to_pylist(), fits.to_pylist(), strict=True)
    ]
    return arrow.array(texts, arrow.string())
