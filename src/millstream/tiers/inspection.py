"""Inspecting a segment: that its file, its footer, its index and its rows say the same.

Row groups are handed over one after another, each with the bytes before it that are no row group's, so that the whole
file passes by once and its checksum comes out. Memory is one row group.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from itertools import groupby, islice, pairwise
from typing import Any, Final, NamedTuple

import pyarrow as arrow
import pyarrow.compute as compute

from millstream.errors import Corrupt
from millstream.streams.records import SegmentRef
from millstream.tiers.objects import Objects
from millstream.tiers.segment_reader import FetchedRange, decode_columns
from millstream.tiers.segments import (
    SCHEMA,
    SHARED,
    Extent,
    Footer,
    RowGroup,
    decode_footer,
    row_group_range,
    whole,
)
from millstream.units import Milliseconds, Position

STREAMS_NAMED_MAX: Final = 5


class Inspected(NamedTuple):
    """A row group that is as its index says."""

    table: arrow.Table
    rows: RowGroup
    extents: list[Extent]
    buckets: list[str]  # for each extent whose it is


class _Totals(NamedTuple):
    rows: int
    payload_bytes: int
    first_position: Position
    last_position: Position
    first_at_ms: Milliseconds
    last_at_ms: Milliseconds


class Inspection:
    def __init__(self, segment: SegmentRef, footer: Footer) -> None:
        self.segment = segment
        self.footer = footer
        self._extents = {number: list(of) for number, of in groupby(footer.extents, key=_row_group_of)}
        if sum(count for _, count in footer.info.shared_by) != (len(footer.extents) if segment.bucket == SHARED else 0):
            raise self._differs("its index does not say whose its streams are")
        self._buckets = iter(footer.buckets())
        self._totals: list[_Totals] = []
        self._checksum = 0
        self._last_key: tuple[str, str, int, int] = ("", "", -1, -1)
        self._check_reference()

    @staticmethod
    async def begin(objects: Objects, segment: SegmentRef) -> Inspection:
        tail = await objects.get_range(segment.path, segment.size - segment.footer_bytes, segment.size)
        return Inspection(segment, decode_footer(tail, segment.path, segment.footer_checksum))

    @property
    def row_groups(self) -> range:
        return range(self.footer.metadata.num_row_groups)

    def extents_of(self, number: int) -> list[Extent]:
        return self._extents.get(number, [])

    def end_of(self, number: int) -> int:
        """Where row group `number` ends in the file; before the first, that is 0."""
        return row_group_range(self.footer.metadata, number)[1] if number >= 0 else 0

    def take(self, number: int, data: bytes) -> Inspected:
        """The next row group, from the bytes between the end of the one before it and its own."""
        segment, metadata = self.segment, self.footer.metadata
        self._checksum = zlib.crc32(data, self._checksum)
        start = row_group_range(metadata, number)[0]
        window = data[start - self.end_of(number - 1) :]
        table = decode_columns(metadata, number, FetchedRange(start, window), segment.path, SCHEMA.names)
        rows = RowGroup(table)
        extents = self._extents.pop(number, [])
        buckets = list(islice(self._buckets, len(extents)))
        self._check_names(table, extents, buckets)
        self._check_index(table, rows, extents, buckets)
        self._totals.append(
            _Totals(
                table.num_rows,
                rows.length_of(0, table.num_rows),
                *_extremes(table.column("position")),
                *_extremes(table.column("appended_at")),
            )
        )
        return Inspected(table, rows, extents, buckets)

    def finish(self, tail: bytes, size: int) -> None:
        """The rest of the file, and how long the store says it is."""
        segment, totals = self.segment, self._totals
        if zlib.crc32(tail, self._checksum) != segment.checksum or size != segment.size:
            raise self._differs("its size or checksum is not the one that was recorded")
        if self._extents:
            raise self._differs("its index names row groups that it does not have")
        found = _Totals(
            sum(one.rows for one in totals),
            sum(one.payload_bytes for one in totals),
            min((one.first_position for one in totals), default=Position(0)),
            max((one.last_position for one in totals), default=Position(0)),
            min((one.first_at_ms for one in totals), default=Milliseconds(0)),
            max((one.last_at_ms for one in totals), default=Milliseconds(0)),
        )
        if found != self._recorded():
            raise self._differs("its rows, bytes, positions or times are not those that were recorded")

    async def read(self, objects: Objects) -> None:
        """The whole file at once, for those who want nothing else of it."""
        path = self.segment.path
        for number in self.row_groups:
            self.take(number, await objects.get_range(path, self.end_of(number - 1), self.end_of(number)))
        tail = await objects.get_range(path, self.end_of(self.footer.metadata.num_row_groups - 1), self.segment.size)
        self.finish(tail, (await objects.head(path)).size)

    def _recorded(self) -> _Totals:
        one = self.segment
        return _Totals(
            one.rows, one.payload_bytes, one.first_position, one.last_position, one.first_at_ms, one.last_at_ms
        )

    def _check_reference(self) -> None:
        info = self.footer.info
        described = _Totals(
            info.rows, info.payload_bytes, info.first_position, info.last_position, info.first_at_ms, info.last_at_ms
        )
        if info.bucket != self.segment.bucket or described != self._recorded():
            raise self._differs("its footer says something else than what was recorded of it")

    def _check_names(self, table: arrow.Table, extents: list[Extent], buckets: list[str]) -> None:
        owned = _merged((bucket, extent.rows) for bucket, extent in zip(buckets, extents, strict=True))
        if runs_of(table.column("bucket")) != owned:
            raise self._differs("it has rows of another bucket")
        if runs_of(table.column("shard")) != [(self.footer.info.shard, table.num_rows)]:
            raise self._differs("it has rows of another shard")
        named = _merged((extent.stream, extent.rows) for extent in extents)  # of two buckets, too
        if runs_of(table.column("stream")) != named:
            raise self._differs("its index does not match the streams of its rows")

    def _check_index(self, table: arrow.Table, rows: RowGroup, extents: list[Extent], buckets: list[str]) -> None:
        starts = memoryview(whole(table.column("offset_start")).buffers()[1]).cast("q")
        incarnations = memoryview(whole(table.column("incarnation")).buffers()[1]).cast("q")
        row = 0
        for bucket, extent in zip(buckets, extents, strict=True):
            key = (bucket, extent.stream, extent.incarnation, extent.offset_start)
            stop = row + extent.rows
            if extent.row_start != row or extent.rows < 1 or stop > table.num_rows or key <= self._last_key:
                raise self._differs("its index does not follow its rows")
            self._last_key = (bucket, extent.stream, extent.incarnation, extent.offset_end - 1)
            if (
                starts[row] != extent.offset_start
                or rows.ends[stop - 1] != extent.offset_end
                or bytes(starts[row + 1 : stop]) != bytes(rows.ends[row : stop - 1])
                or bytes(incarnations[row:stop]) != extent.incarnation.to_bytes(8, "little", signed=True) * extent.rows
                or rows.length_of(row, stop) != extent.offset_end - extent.offset_start
            ):
                raise self._differs(f"its index does not match the rows of stream {extent.stream!r}")
            row = stop
        if row != table.num_rows:
            raise self._differs("its index leaves out rows")

    def _differs(self, what: str) -> Corrupt:
        return Corrupt(f"segment {self.segment.path} is not as it should be: {what}")


def _row_group_of(extent: Extent) -> int:
    return extent.row_group


def _extremes(column: arrow.ChunkedArray) -> tuple[Any, Any]:
    found = compute.min_max(column.cast(arrow.int64()))
    return found["min"].as_py() or 0, found["max"].as_py() or 0


def runs_of(column: Any) -> list[tuple[Any, int]]:
    """A column as values and how often each is repeated."""
    array_ = whole(column) if isinstance(column, arrow.ChunkedArray) else column
    if arrow.types.is_dictionary(array_.type):
        array_ = array_.dictionary_decode()
    encoded = compute.run_end_encode(array_)
    lengths = [end - before for before, end in pairwise([0, *encoded.run_ends.to_pylist()])]
    return list(zip(encoded.values.to_pylist(), lengths, strict=True))


def _merged(runs: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    return [(name, sum(count for _, count in of)) for name, of in groupby(runs, key=lambda run: run[0])]


def what_it_holds(segment: SegmentRef, tail: bytes = b"") -> str:
    """What is lost with a segment, for people; whose messages they are is in its footer, if that is whole."""
    positions = f"{segment.first_position}–{segment.last_position}"
    held = f"{segment.rows:,} messages of bucket {segment.bucket or '(shared)'}, positions {positions}"
    try:
        footer = decode_footer(tail[-segment.footer_bytes :], segment.path, segment.footer_checksum)
    except Corrupt:
        return f"{held}; its index cannot be read either"
    names = sorted({f"{bucket}/{one.stream}" for bucket, one in zip(footer.buckets(), footer.extents, strict=True)})
    more = f" and {len(names) - STREAMS_NAMED_MAX:,} more" if len(names) > STREAMS_NAMED_MAX else ""
    return f"{held}, of the streams {', '.join(names[:STREAMS_NAMED_MAX])}{more}"
