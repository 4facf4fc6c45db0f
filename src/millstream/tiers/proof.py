"""The proof that new segments hold the live messages of old ones, and that every byte of them is as it should be.

Old and new rows are each read once, row group by row group. Of every live run of rows (an extent of an old segment) the
old side leaves a digest; the new side must come upon the same runs with the same digests, in order of stream,
incarnation and offset. Memory is a few row groups and about a hundred bytes for each run.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from itertools import groupby, pairwise
from typing import Any, Final, NamedTuple

from millstream.errors import Corrupt, InvalidRequest
from millstream.protocol.keys import StreamKey
from millstream.streams.records import SegmentRef
from millstream.tiers.catalog_rows import Kept
from millstream.tiers.inspection import Inspection, runs_of
from millstream.tiers.objects import Objects
from millstream.tiers.segment_reader import FetchedRange, decode_columns
from millstream.tiers.segments import SHARED, Extent, Footer, RowGroup, row_group_range, whole
from millstream.units import Incarnation, Offset

DIGEST_BYTES: Final = 16
THREADS: Final = 2
_OLD_COLUMNS: Final = ["payload", "offset_end", "position", "appended_at"]


class LiveRun(NamedTuple):
    """An extent of old segment number `which` that the index refers to, from `earliest` on."""

    extent: Extent
    which: int
    earliest: Offset


class _Expected(NamedTuple):
    start: Offset
    end: Offset
    digest: bytes


class _Rows:
    """Feeds runs of rows into one digest; it comes out the same however the rows are cut into row groups."""

    def __init__(self) -> None:
        self._parts = [blake2b(digest_size=DIGEST_BYTES) for _ in range(4)]

    def add(self, group: RowGroup, first: int, stop: int) -> None:
        payload, ends, positions, times = self._parts
        payload.update(group.bytes_of(first, stop))
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
        self._at: Offset | None = None  # inside a run: the offset its next row must start at
        self.matched = 0

    def take(self, group: RowGroup, extent: Extent, first: int, start: Offset, earliest: Offset | None) -> int:
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
        self._at = Offset(group.ends[bound - 1])
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
        self._expected: dict[Incarnation, list[_Expected]] = {}
        self._matched = 0
        self._walks: dict[Incarnation, _Walk] = {}

    async def take_old(self, segments: Sequence[tuple[SegmentRef, Footer]]) -> None:
        """Read the old segments, several at a time: what they leave behind has no order."""
        waiting = iter(enumerate(segments))

        async def take_some() -> None:
            for which, (segment, footer) in waiting:
                await self._take_old(which, segment, footer)

        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(THREADS):
                    tasks.create_task(take_some())
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None

    async def _take_old(self, which: int, segment: SegmentRef, footer: Footer) -> None:
        runs = self._by_segment.pop(which, [])
        for number, of_group in groupby(runs, key=lambda run: run.extent.row_group):
            start, end = row_group_range(footer.metadata, number)
            data = await self._objects.get_range(segment.path, start, end)
            found = await self._in_thread(_digests, footer, number, start, data, segment.path, list(of_group))
            for incarnation, expected in found:
                self._expected.setdefault(incarnation, []).append(expected)

    async def take_new(self, segment: SegmentRef, kept: Callable[[Incarnation], Kept | None]) -> None:
        """Read a new segment from its first byte to its last; they come in order of stream and offset."""
        if self._bucket not in (SHARED, segment.bucket):
            raise mismatch(f"{segment.path} belongs to another bucket than {self._bucket}")
        try:
            inspection = await Inspection.begin(self._objects, segment)
            for number in inspection.row_groups:
                before, end = inspection.end_of(number - 1), inspection.end_of(number)
                data = await self._objects.get_range(segment.path, before, end)
                streams = {one.incarnation: kept(one.incarnation) for one in inspection.extents_of(number)}
                await self._in_thread(self._check_group, inspection, number, data, streams)
            end = inspection.end_of(len(inspection.row_groups) - 1)
            tail = await self._objects.get_range(segment.path, end, segment.size)
            inspection.finish(tail, (await self._objects.head(segment.path)).size)
        except Corrupt as error:
            raise mismatch(error.message) from None

    def finish(self) -> None:
        matched = self._matched + sum(walk.matched for walk in self._walks.values())
        if matched != self._runs:
            raise mismatch(f"{self._runs - matched:,} of {self._runs:,} live runs of messages are not in them")

    async def _in_thread(self, work: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)

    def _check_group(
        self, inspection: Inspection, number: int, data: bytes, streams: dict[Incarnation, Kept | None]
    ) -> None:
        table, rows, extents, buckets = inspection.take(number, data)
        for bucket, extent in zip(buckets, extents, strict=True):
            known = streams[extent.incarnation]
            if known is not None and known.key != StreamKey(bucket, extent.stream):
                raise mismatch(f"messages of {known.key} are called {bucket}/{extent.stream}")
        types = whole(table.column("content_type"))
        for incarnation, of_stream in groupby(extents, key=lambda extent: extent.incarnation):
            found, stream = list(of_stream), streams[incarnation]
            first, count = found[0].row_start, sum(extent.rows for extent in found)
            if stream is not None and runs_of(types.slice(first, count)) != [(stream.content_type, count)]:
                raise mismatch(f"stream {found[0].stream!r} has another content type")
            for extent in found:
                self._walk(rows, extent, stream)

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
            start = Offset(group.ends[row - 1])


def _digests(
    footer: Footer, number: int, start: int, data: bytes, path: str, runs: list[LiveRun]
) -> list[tuple[Incarnation, _Expected]]:
    group = RowGroup(decode_columns(footer.metadata, number, FetchedRange(start, data), path, _OLD_COLUMNS))
    found = []
    for extent, _, earliest in runs:
        stop = extent.row_start + extent.rows
        first = bisect_right(group.ends, earliest, extent.row_start, stop)
        rows = _Rows()
        rows.add(group, first, stop)
        begin = Offset(group.ends[first - 1]) if first > extent.row_start else extent.offset_start
        found.append((extent.incarnation, _Expected(begin, extent.offset_end, rows.digest())))
    return found


def mismatch(reason: str) -> InvalidRequest:
    return InvalidRequest(f"the new segments do not stand for the old ones: {reason}", code="compaction_mismatch")
