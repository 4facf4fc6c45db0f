"""History in the order of the log: the messages of a bucket that lie in segments, sorted by position.

Segments are sorted by stream, so order has to be made. A window is one pass over the row groups that may hold
positions from some point on; it keeps those of the lowest positions, about `WINDOW_BYTES` of them, as one Arrow table,
and reaches over as many flushes as fit: a compacted segment spans very many. So memory is bounded however large a flush
or a segment is, and each is read a few times at most. Rows become objects of Python only when somebody reads them.
"""

from __future__ import annotations

import asyncio
from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterator
from typing import Final, NamedTuple

import pyarrow as arrow
import pyarrow.compute as compute
import pyarrow.parquet as parquet

from millstream.streams.records import SegmentRef
from millstream.tiers.catalog import Catalog
from millstream.tiers.cold import ColdTier
from millstream.tiers.columns import integer, integers
from millstream.tiers.segments import SHARED, overlaps, whole
from millstream.units import Incarnation, Milliseconds, Offset, Position

WINDOW_BYTES: Final = 16 << 20
WINDOWS_KEPT: Final = 4
FLUSHES_MAX: Final = 1_000
SLICE_ROWS: Final = 512
_COLUMNS: Final = [
    "stream",
    "offset_start",
    "offset_end",
    "position",
    "appended_at",
    "content_type",
    "payload",
    "incarnation",
]


class Row(NamedTuple):
    """A message as a segment has it."""

    stream: str
    offset_start: Offset
    offset_end: Offset
    position: Position
    at_ms: Milliseconds
    content_type: str
    payload: bytes
    incarnation: Incarnation


class Window:
    """Every message of a bucket's segments between two positions, the first included, the last not."""

    def __init__(self, bucket: str, first: Position, until: Position, table: arrow.Table | None) -> None:
        self.bucket = bucket
        self.first = first
        self.until = until
        self._table = table
        self._positions: memoryview[int] = memoryview(b"").cast("q")
        if table is not None and table.num_rows:
            self._positions = memoryview(whole(table.column("position")).buffers()[1]).cast("q")

    def covers(self, bucket: str, position: Position) -> bool:
        return bucket == self.bucket and self.first <= position < self.until

    def rows(self, after: Position, until: Position, prefix: str) -> Iterator[Row]:
        """The messages between two positions, both excluded, of streams whose names begin so."""
        start, stop = bisect_right(self._positions, after), bisect_left(self._positions, until)
        if self._table is None:
            return
        for first in range(start, stop, SLICE_ROWS):
            table = self._table.slice(first, min(SLICE_ROWS, stop - first))
            if prefix:
                table = table.filter(compute.starts_with(table.column("stream"), prefix))
            columns = [table.column(name).to_pylist() for name in _COLUMNS]
            yield from map(Row, *columns)


class History:
    def __init__(self, catalog: Catalog, cold: ColdTier) -> None:
        self._catalog = catalog
        self._cold = cold
        self._windows: deque[Window] = deque(maxlen=WINDOWS_KEPT)
        self._lock = asyncio.Lock()

    async def window(self, bucket: str, position: Position) -> Window:
        """A window that holds this position, which must lie in a flush. They are made one at a time."""
        window = self._kept(bucket, position)
        if window is not None:
            return window
        async with self._lock:
            window = self._kept(bucket, position)
            if window is None:
                window = await self._gather(bucket, position)
                self._windows.append(window)
            return window

    def _kept(self, bucket: str, position: Position) -> Window | None:
        for index, window in enumerate(self._windows):
            if window.covers(bucket, position):
                # The one that was used longest ago is at the front, and goes first.
                del self._windows[index]
                self._windows.append(window)
                return window
        return None

    async def _gather(self, bucket: str, first: Position) -> Window:
        segments, until = self._segments(bucket, first)
        tables: list[arrow.Table] = []
        size = 0
        for segment in segments:
            with self._cold.objects.damage.noticed(segment.path):
                footer = await self._cold.footer(segment)
            for group in range(footer.metadata.num_row_groups):
                if not overlaps(footer.metadata, group, first, until):
                    continue
                with self._cold.objects.damage.noticed(segment.path):
                    table = await self._cold.in_thread(
                        self._rows, bucket, segment, footer.metadata, group, first, until
                    )
                tables.append(table)
                size += table.nbytes
                if size > 2 * WINDOW_BYTES:
                    tables = [await self._cold.in_thread(_lowest, tables)]
                    until, size = tables[0].column("position")[-1].as_py() + 1, tables[0].nbytes
        self._cold.memory_was_used()
        table = await self._cold.in_thread(_sorted, tables) if tables else None
        return Window(bucket, first, until, table)

    def _segments(self, bucket: str, first: Position) -> tuple[list[SegmentRef], Position]:
        """The segments of as many flushes as may fill a window, and the position that the last of these ends at."""
        found: dict[int, SegmentRef] = {}
        size, until = 0, first
        for _ in range(FLUSHES_MAX):
            flush = self._catalog.flush_after(Position(until - 1))
            if flush is None:
                break
            until = flush[0]
            for number in flush[1].segments:
                segment = self._catalog.segment(number)
                if number not in found and segment is not None and self._catalog.holds(number, segment, bucket):
                    found[number] = segment
                    size += segment.payload_bytes
            if size >= WINDOW_BYTES:
                break
        return list(found.values()), until

    def _rows(
        self,
        bucket: str,
        segment: SegmentRef,
        metadata: parquet.FileMetaData,
        group: int,
        first: Position,
        until: Position,
    ) -> arrow.Table:
        if segment.bucket == SHARED:
            table = self._cold.read_columns(segment, metadata, group, [*_COLUMNS, "bucket"])
            table = table.filter(compute.equal(table.column("bucket").cast(arrow.string()), bucket)).select(_COLUMNS)
        else:
            table = self._cold.read_columns(segment, metadata, group, _COLUMNS)
        positions = table.column("position")
        is_wanted = compute.and_(
            compute.greater_equal(positions, integer(first)), compute.less(positions, integer(until))
        )
        at = table.schema.get_field_index("appended_at")
        table = table.set_column(at, "appended_at", table.column(at).cast(arrow.int64()))
        return table.select(_COLUMNS).filter(is_wanted)


def _sorted(tables: list[arrow.Table]) -> arrow.Table:
    table = arrow.concat_tables(tables)
    return table.take(compute.sort_indices(table.column("position"))).combine_chunks()


def _lowest(tables: list[arrow.Table]) -> arrow.Table:
    """The messages of the lowest positions, about a window of them, and at least one."""
    table = _sorted(tables)
    lengths = compute.binary_length(table.column("payload")).cast(arrow.int64())
    # What a row takes besides its payload counts too: of very small messages it is nearly everything.
    besides = (table.nbytes - compute.sum(lengths).as_py()) // table.num_rows
    sums = compute.cumulative_sum(compute.add(lengths, integer(besides)))
    kept = max(compute.sum(compute.less_equal(sums, integer(WINDOW_BYTES))).as_py(), 1)
    # A copy of their own: a slice would keep all the others in memory.
    return table.take(integers(array("q", range(kept))))
