"""The proof that new segments hold the live messages of old ones, and that every byte of them is as it should be.

Old and new rows are each read once, row group by row group. Of every live run of rows (an extent of an old segment) the
old side leaves a digest; the new side must come upon the same runs with the same digests, in order of stream,
incarnation and offset. Memory is a few row groups and about a hundred bytes for each run.
"""

from __future__ import annotations

import asyncio
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from itertools import groupby, pairwise
from typing import Any, Final, NamedTuple

import pyarrow as arrow
import pyarrow.compute as compute

from millstream.errors import InvalidRequest
from millstream.streams.records import SegmentRef
from millstream.tiers.catalog import Kept
from millstream.tiers.objects import Objects
from millstream.tiers.segments import (
    SCHEMA,
    Extent,
    Footer,
    RowGroup,
    decode_footer,
    read_row_group,
    row_group_range,
    whole,
)

DIGEST_BYTES: Final = 16
_OLD_COLUMNS: Final = ["payload", "offset_end", "position", "appended_at"]
_ALL_COLUMNS: Final = SCHEMA.names


class LiveRun(NamedTuple):
    """An extent of old segment number `which` that the index refers to, from `earliest` on."""

    extent: Extent
    which: int
    earliest: int


class _Expected(NamedTuple):
    start: int
    end: int
    digest: bytes


class _Rows:
    """Feeds runs of rows into one digest; it comes out the same however the rows are cut into row groups."""

    def __init__(self) -> None:
        self._parts = [blake2b(digest_size=DIGEST_BYTES) for _ in range(4)]

    def add(self, group: RowGroup, first: int, stop: int) -> None:
        payload, ends, positions, times = self._parts
        payload.update(group.view_of(first, stop))
        ends.update(group.ends[first:stop])
        positions.update(group.positions[first:stop])
        times.update(group.times[first:stop])

    def digest(self) -> bytes:
        return blake2b(b"".join(part.digest() for part in self._parts), digest_size=DIGEST_BYTES).digest()


class _Walk:
    """Where in the expected runs of one incarnation the new rows have come to."""

    def __init__(self, expected: Sequence[_Expected]) -> None:
        self._expected = expected
        self._index = 0
        self._rows = _Rows()
        self._at: int | None = None  # inside a run: the offset its next row must start at
        self.matched = 0

    def take(self, group: RowGroup, extent: Extent, first: int, start: int, earliest: int | None) -> int:
        """Account for rows of a new extent from row `first`, which starts at offset `start`; returns the next row."""
        stop = extent.row_start + extent.rows
        while self._index < len(self._expected) and self._expected[self._index].end <= start:
            self._index += 1  # one that was not found is missed at the end
            self._at = None
        run = self._expected[self._index] if self._index < len(self._expected) else None
        if run is None or start < run.start:
            bound = bisect_right(group.ends, run.start, first, stop) if run is not None else stop
            if bound == first:
                raise mismatch(f"stream {extent.stream!r} has a message at offset {start} that the old segments lack")
            if earliest is not None and group.ends[bound - 1] > earliest:
                raise mismatch(f"stream {extent.stream!r} has messages at offset {start} that the old segments lack")
            return bound
        if self._at is None and start == run.start:
            self._rows, self._at = _Rows(), start
        if self._at != start:
            raise mismatch(f"stream {extent.stream!r} lacks messages before offset {start}, or has them twice")
        bound = bisect_left(group.ends, run.end, first, stop)
        bound = min(bound + 1, stop)
        self._rows.add(group, first, bound)
        self._at = group.ends[bound - 1]
        if self._at == run.end:
            if self._rows.digest() != run.digest:
                raise mismatch(f"the messages of stream {extent.stream!r} from offset {run.start} to {run.end} differ")
            self.matched += 1
            self._index, self._at = self._index + 1, None
        return bound


class Proof:
    def __init__(self, objects: Objects, bucket: str, runs: Iterable[LiveRun], threads: ThreadPoolExecutor) -> None:
        self._objects = objects
        self._bucket = bucket
        self._threads = threads
        self._by_segment: dict[int, list[LiveRun]] = {}
        for run in runs:
            self._by_segment.setdefault(run.which, []).append(run)
        self._runs = sum(map(len, self._by_segment.values()))
        self._expected: dict[int, list[_Expected]] = {}
        self._matched = 0
        self._walks: dict[int, _Walk] = {}
        self._last_key: tuple[str, int, int] = ("", -1, -1)

    async def take_old(self, which: int, segment: SegmentRef, footer: Footer) -> None:
        runs = self._by_segment.pop(which, [])
        for number, of_group in groupby(runs, key=lambda run: run.extent.row_group):
            start, end = row_group_range(footer.metadata, number)
            data = await self._objects.get_range(segment.path, start, end)
            found = await self._in_thread(_digests, footer, number, start, data, segment.path, list(of_group))
            for incarnation, expected in found:
                self._expected.setdefault(incarnation, []).append(expected)

    async def take_new(self, segment: SegmentRef, kept: Callable[[int], Kept | None]) -> None:
        """Read a new segment from its first byte to its last; they come in order of stream and offset."""
        tail = await self._objects.get_range(segment.path, segment.size - segment.footer_bytes, segment.size)
        footer = decode_footer(tail, segment.path, segment.footer_checksum)
        self._check_reference(segment, footer)
        checksum, at = 0, 0
        totals: list[_GroupTotals] = []
        extents = {number: list(of) for number, of in groupby(footer.extents, key=lambda extent: extent.row_group)}
        for number in range(footer.metadata.num_row_groups):
            start, end = row_group_range(footer.metadata, number)
            data = await self._objects.get_range(segment.path, at, end)
            checksum = zlib.crc32(data, checksum)
            group_extents = extents.pop(number, [])
            streams = {extent.incarnation: kept(extent.incarnation) for extent in group_extents}
            totals.append(
                await self._in_thread(
                    self._check_group, segment, footer, number, start, data[start - at :], group_extents, streams
                )
            )
            at = end
        checksum = zlib.crc32(await self._objects.get_range(segment.path, at, segment.size), checksum)
        if checksum != segment.checksum or (await self._objects.head(segment.path)).size != segment.size:
            raise mismatch(f"size or checksum of {segment.path} differ from what was proposed")
        if extents:
            raise mismatch(f"the index of {segment.path} names row groups that it does not have")
        _check_totals(segment, totals)

    def finish(self) -> None:
        matched = self._matched + sum(walk.matched for walk in self._walks.values())
        if matched != self._runs:
            raise mismatch(f"{self._runs - matched:,} of {self._runs:,} live runs of messages are not in them")

    async def _in_thread(self, work: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)

    def _check_reference(self, segment: SegmentRef, footer: Footer) -> None:
        info = footer.info
        described = (info.bucket, info.rows, info.payload_bytes, info.first_position, info.last_position)
        proposed = (self._bucket, segment.rows, segment.payload_bytes, segment.first_position, segment.last_position)
        times = (info.first_at_ms, info.last_at_ms) == (segment.first_at_ms, segment.last_at_ms)
        if described != proposed or segment.bucket != self._bucket or not times:
            raise mismatch(f"the footer of {segment.path} says something else than the proposal")

    def _check_group(
        self,
        segment: SegmentRef,
        footer: Footer,
        number: int,
        start: int,
        data: bytes,
        extents: list[Extent],
        streams: dict[int, Kept | None],
    ) -> _GroupTotals:
        table = read_row_group(footer.metadata, number, start, data, segment.path, _ALL_COLUMNS)
        group = RowGroup(table)
        _check_columns(segment, footer, table, extents, streams)
        starts = memoryview(whole(table.column("offset_start")).buffers()[1]).cast("q")
        incarnations = memoryview(whole(table.column("incarnation")).buffers()[1]).cast("q")
        row = 0
        for extent in extents:
            key = (extent.stream, extent.incarnation, extent.offset_start)
            stop = row + extent.rows
            if extent.row_start != row or extent.rows < 1 or stop > table.num_rows or key <= self._last_key:
                raise mismatch(f"the index of {segment.path} does not follow its rows")
            self._last_key = (extent.stream, extent.incarnation, extent.offset_end - 1)
            if (
                starts[row] != extent.offset_start
                or group.ends[stop - 1] != extent.offset_end
                or bytes(starts[row + 1 : stop]) != bytes(group.ends[row : stop - 1])
                or bytes(incarnations[row:stop]) != extent.incarnation.to_bytes(8, "little", signed=True) * extent.rows
                or group.length_of(row, stop) != extent.offset_end - extent.offset_start
            ):
                raise mismatch(f"the index of {segment.path} does not match the rows of stream {extent.stream!r}")
            self._walk(group, extent, streams[extent.incarnation])
            row = stop
        if row != table.num_rows:
            raise mismatch(f"the index of {segment.path} leaves out rows")
        return _totals(group, table.num_rows)

    def _walk(self, group: RowGroup, extent: Extent, kept: Kept | None) -> None:
        walk = self._walks.get(extent.incarnation)
        if walk is None:
            expected = sorted(self._expected.pop(extent.incarnation, []))
            for before, after in pairwise(expected):
                if before.end > after.start:
                    raise mismatch(f"the old segments hold messages of stream {extent.stream!r} twice")
            # Earlier incarnations are behind us: rows come in order.
            self._matched += sum(walk.matched for walk in self._walks.values())
            self._walks = {extent.incarnation: (walk := _Walk(expected))}
        row, stop = extent.row_start, extent.row_start + extent.rows
        start = extent.offset_start
        while row < stop:
            row = walk.take(group, extent, row, start, kept.earliest if kept is not None else None)
            start = group.ends[row - 1]


class _GroupTotals(NamedTuple):
    rows: int
    payload_bytes: int
    first_position: int
    last_position: int
    first_at_ms: int
    last_at_ms: int


def _totals(group: RowGroup, rows: int) -> _GroupTotals:
    positions, times = group.positions, group.times
    return _GroupTotals(rows, group.length_of(0, rows), min(positions), max(positions), min(times), max(times))


def _check_totals(segment: SegmentRef, totals: list[_GroupTotals]) -> None:
    found = _GroupTotals(
        sum(one.rows for one in totals),
        sum(one.payload_bytes for one in totals),
        min((one.first_position for one in totals), default=0),
        max((one.last_position for one in totals), default=0),
        min((one.first_at_ms for one in totals), default=0),
        max((one.last_at_ms for one in totals), default=0),
    )
    proposed = _GroupTotals(
        segment.rows,
        segment.payload_bytes,
        segment.first_position,
        segment.last_position,
        segment.first_at_ms,
        segment.last_at_ms,
    )
    if found != proposed:
        raise mismatch(f"rows, bytes, positions or times of {segment.path} are not those that were proposed")


def _check_columns(
    segment: SegmentRef,
    footer: Footer,
    table: arrow.Table,
    extents: list[Extent],
    streams: dict[int, Kept | None],
) -> None:
    """The columns that only other readers use: names, shard and content types."""
    if _runs_of(table.column("bucket")) != [(segment.bucket, table.num_rows)]:
        raise mismatch(f"{segment.path} has rows of another bucket")
    if _runs_of(table.column("shard")) != [(footer.info.shard, table.num_rows)]:
        raise mismatch(f"{segment.path} has rows of another shard")
    if _runs_of(table.column("stream")) != _merged((extent.stream, extent.rows) for extent in extents):
        raise mismatch(f"the index of {segment.path} does not match the streams of its rows")
    types = whole(table.column("content_type"))
    for incarnation, of_stream in groupby(extents, key=lambda extent: extent.incarnation):
        rows = list(of_stream)
        kept = streams[incarnation]
        first, count = rows[0].row_start, sum(extent.rows for extent in rows)
        if kept is not None and _runs_of(types.slice(first, count)) != [(kept.content_type, count)]:
            raise mismatch(f"{segment.path} has another content type for stream {rows[0].stream!r}")


def _runs_of(column: Any) -> list[tuple[Any, int]]:
    """A column as values and how often each is repeated."""
    array_ = whole(column) if isinstance(column, arrow.ChunkedArray) else column
    if arrow.types.is_dictionary(array_.type):
        array_ = array_.dictionary_decode()
    encoded = compute.run_end_encode(array_)
    ends = encoded.run_ends.to_pylist()
    lengths = [end - before for before, end in pairwise([0, *ends])]
    return list(zip(encoded.values.to_pylist(), lengths, strict=True))


def _merged(runs: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    return [(name, sum(count for _, count in of)) for name, of in groupby(runs, key=lambda run: run[0])]


def _digests(
    footer: Footer, number: int, start: int, data: bytes, path: str, runs: list[LiveRun]
) -> list[tuple[int, _Expected]]:
    group = RowGroup(read_row_group(footer.metadata, number, start, data, path, _OLD_COLUMNS))
    found = []
    for extent, _, earliest in runs:
        stop = extent.row_start + extent.rows
        first = bisect_right(group.ends, earliest, extent.row_start, stop)
        rows = _Rows()
        rows.add(group, first, stop)
        begin = group.ends[first - 1] if first > extent.row_start else extent.offset_start
        found.append((extent.incarnation, _Expected(begin, extent.offset_end, rows.digest())))
    return found


def mismatch(reason: str) -> InvalidRequest:
    return InvalidRequest(f"the new segments do not stand for the old ones: {reason}", code="compaction_mismatch")
