"""Encoding segments: messages in the order of the log become rows in the order of segments, and those row groups.

Everything is done to columns: Arrow groups, sorts and compresses them without the interpreter, and Python touches a
stream once to name it, once to index it, and a message once to copy it.
"""

from __future__ import annotations

import zlib
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from operator import sub
from typing import Final, NamedTuple

import pyarrow as arrow
import pyarrow.compute as compute

from millstream.streams.state import Stream
from millstream.tiers.columns import binaries, integer, integers, numbers, order_of, run_ends, runs, texts
from millstream.tiers.hot import Unflushed
from millstream.tiers.segments import (
    ROW_GROUP_BYTES,
    ROW_GROUP_ROWS,
    SCHEMA,
    SHARED,
    Pieces,
    SegmentInfo,
    SegmentWriter,
    encode_extents,
    footer_bytes,
)
from millstream.units import Incarnation, Milliseconds, Offset, Position

SEGMENT_BYTES: Final = 64 << 20
# Buckets of which there is less than both share segments, if there are more of them than this.
OWN_SEGMENT_BYTES: Final = 1 << 20
OWN_SEGMENT_ROWS: Final = 4096
SMALL_BUCKETS_MAX: Final = 16
# So many messages, however small, are put in order at a time: about a hundred bytes of memory for each.
SLAB_ROWS: Final = 1 << 19
DAY_MS: Final = 86_400_000
_NEVER: Final = (1 << 63) - 1


class Slab(NamedTuple):
    """Messages that are put in order together: a stretch of the log, no more than one segment holds."""

    messages: Unflushed
    first: int
    stop: int
    payloads: arrow.Array | None  # the messages themselves, if they came back to back


class Part(NamedTuple):
    """The rows of one segment."""

    bucket: str
    first: int
    stop: int


class EncodedSegment(NamedTuple):
    data: memoryview
    checksum: int
    footer_bytes: int
    footer_checksum: int
    info: SegmentInfo
    extents: bytes  # as `encode_extents` wrote them


class Owners:
    """The streams that messages belong to, as columns. Of one that was trimmed, what ends behind its earliest offset
    counts; the last of them stands for all that were deleted, of which nothing does."""

    def __init__(self, streams: Sequence[Stream], trimmed: Sequence[tuple[Incarnation, Offset]]) -> None:
        earliest = array("q", bytes(8 * (len(streams) + 1)))
        incarnations = array("q", (stream.incarnation for stream in streams))
        places = {incarnation: place for place, incarnation in enumerate(incarnations)} if trimmed else {}
        for incarnation, offset in trimmed:
            earliest[places[incarnation]] = offset
        earliest[-1] = _NEVER
        bucket_of, content_types = [stream.key.bucket for stream in streams], [one.content_type for one in streams]
        self.bucket_of = bucket_of
        self._known = integers(incarnations)
        self._gone = integers(array("i", [len(streams)]), arrow.int32())[0]
        self.stream_names = [*(stream.key.stream for stream in streams), ""]
        self.bucket_names = sorted({*bucket_of, ""})
        self.incarnation_of = array("q", [*incarnations, 0])
        self.streams, self.incarnations = texts(self.stream_names), integers(self.incarnation_of)
        self.buckets = _numbers_of([*bucket_of, ""], self.bucket_names)
        kinds = list(dict.fromkeys([*content_types, ""]))
        self.content_types = texts(kinds).take(_numbers_of([*content_types, ""], kinds))
        self.earliest = integers(earliest)
        # The place of each by bucket, stream and incarnation: sorting a permutation inverts it.
        self.ranks = order_of(order_of(self.buckets, self.streams, self.incarnations))

    def of(self, incarnations: arrow.Array) -> arrow.Array:
        """For each incarnation which of the streams it is."""
        return compute.fill_null(compute.index_in(incarnations, value_set=self._known), self._gone)


def _numbers_of(values: list[str], names: list[str]) -> arrow.Array:
    number_of = {name: number for number, name in enumerate(names)}
    return integers(array("i", map(number_of.__getitem__, values)), arrow.int32())


def slabs(
    messages: Unflushed, joined: memoryview | None, first_position: Position, position: Position
) -> Iterator[Slab]:
    """The messages between two positions, the first included, in pieces that are no larger than a segment."""
    first, stop = bisect_left(messages.positions, first_position), bisect_left(messages.positions, position)
    through = _through(integers(messages.starts), integers(messages.ends))
    while first < stop:
        until = _cut(through, first, stop, SEGMENT_BYTES, SLAB_ROWS)
        begin = through[first - 1] if first else 0
        payloads = None if joined is None else _split(joined[begin : through[until - 1]], messages, first, until)
        yield Slab(messages, first, until, payloads)
        first = until


def _split(joined: memoryview, messages: Unflushed, first: int, stop: int) -> arrow.Array:
    """Messages that lie back to back as a column, without a copy."""
    bounds = array("i", accumulate(map(sub, messages.ends[first:stop], messages.starts[first:stop]), initial=0))
    buffers = [None, arrow.py_buffer(bounds), arrow.py_buffer(joined)]
    return arrow.Array.from_buffers(arrow.binary(), stop - first, buffers)


def _through(starts: arrow.Array, ends: arrow.Array) -> memoryview[int]:
    """For each row, how many bytes there are up to its end."""
    return numbers(compute.cumulative_sum(compute.subtract(ends, starts)))


def _cut(through: memoryview[int], first: int, stop: int, size: int, rows: int) -> int:
    """Up to which row a piece goes that is no larger than it should be, but for a single row that is larger itself."""
    begin = through[first - 1] if first else 0
    return min(max(bisect_right(through, begin + size, first, stop), first + 1), first + rows, stop)


class Arranged:
    """The messages of a slab in the order of segments: by day and bucket, then stream, incarnation and offset."""

    def __init__(self, slab: Slab, owners: Owners) -> None:
        messages, first, count = slab.messages, slab.first, slab.stop - slab.first

        def column(values: array[int]) -> arrow.Array:
            return integers(values).slice(first, count)

        starts, ends, times = column(messages.starts), column(messages.ends), column(messages.times)
        owner = owners.of(column(messages.incarnations))
        rows = compute.indices_nonzero(compute.greater(ends, owners.earliest.take(owner)))
        owner = owner.take(rows)
        day = compute.divide(times, integer(DAY_MS)).take(rows)
        large = self._large_buckets(owners, owner, starts.take(rows), ends.take(rows))
        # Offsets are in order already, and stay so. Buckets that share a segment come first.
        order = order_of(day, *([] if large is None else [large]), owners.ranks.take(owner))
        rows = rows.take(order)
        self._owners = owners
        self._owner = owner.take(order)
        self._slab, self._rows = slab, rows
        self._starts, self._ends, self._times = starts.take(rows), ends.take(rows), times.take(rows)
        self._positions = column(messages.positions).take(rows)
        self._start_of, self._end_of = numbers(self._starts), numbers(self._ends)
        self._through = _through(self._starts, self._ends)
        self.parts = self._cut_parts(day.take(order), None if large is None else large.take(order))

    @staticmethod
    def _large_buckets(
        owners: Owners, owner: arrow.Array, starts: arrow.Array, ends: arrow.Array
    ) -> arrow.Array | None:
        """For each row whether its bucket has enough for a segment of its own; None if all shall have one."""
        if len(owners.bucket_names) - 1 <= SMALL_BUCKETS_MAX:
            return None
        sizes = arrow.table({"bucket": owners.buckets.take(owner), "size": compute.subtract(ends, starts)})
        found = sizes.group_by("bucket", use_threads=False).aggregate([("size", "sum"), ("size", "count")])
        is_large = compute.or_(
            compute.greater_equal(found["size_sum"], integer(OWN_SEGMENT_BYTES)),
            compute.greater_equal(found["size_count"], integer(OWN_SEGMENT_ROWS)),
        )
        if found.num_rows - (compute.sum(is_large).as_py() or 0) <= SMALL_BUCKETS_MAX:
            return None
        large = found.filter(is_large)["bucket"].combine_chunks()
        return compute.cast(compute.is_in(sizes["bucket"], value_set=large), arrow.int8()).combine_chunks()

    def _cut_parts(self, days: arrow.Array, large: arrow.Array | None) -> list[Part]:
        """A segment is of one day, and of one bucket or of all small ones."""
        parts = []
        for day in runs(days):
            first = day.start
            if large is not None:
                first += compute.sum(compute.equal(large.slice(day.start, day.stop - day.start), 0)).as_py() or 0
            if first > day.start:
                parts.append(Part(SHARED, day.start, first))
            parts += self._parts_by_bucket(first, day.stop)
        return parts

    def _parts_by_bucket(self, first: int, stop: int) -> list[Part]:
        names, buckets = self._owners.bucket_names, self._owners.buckets.take(self._owner.slice(first, stop - first))
        return [Part(names[same.value], first + same.start, first + same.stop) for same in runs(buckets)]

    def row_group(self, part: Part, first: int) -> int:
        """Where the row group ends that begins with a row: large streams get several, small ones share one."""
        return _cut(self._through, first, part.stop, ROW_GROUP_BYTES, ROW_GROUP_ROWS)

    def _payloads(self, first: int, stop: int) -> arrow.Array:
        rows = self._rows.slice(first, stop - first)
        if self._slab.payloads is not None:
            return self._slab.payloads.take(rows)
        messages, base = self._slab.messages.messages, self._slab.first
        return binaries([messages[base + row] for row in rows.to_pylist()])

    def pieces(self, bucket: str, first: int, stop: int) -> Pieces:
        """What the rows hold of each stream."""
        streams, incarnations = self._owners.stream_names, self._owners.incarnation_of
        starts, ends = self._start_of[first:stop], self._end_of[first:stop]
        values, stops = run_ends(self._owner.slice(first, stop - first))
        owners, until = values.tolist(), stops.tolist()
        since = [0, *until[:-1]]
        return Pieces(
            [streams[owner] for owner in owners],
            [incarnations[owner] for owner in owners],
            [starts[row] for row in since],
            [ends[row - 1] for row in until],
            list(map(sub, until, since)),
            [self._owners.bucket_of[owner] for owner in owners] if bucket == SHARED else (),
        )

    def batch(self, bucket: str, shard: int, first: int, stop: int) -> arrow.RecordBatch:
        rows = stop - first
        owner = self._owner.slice(first, rows)
        if bucket == SHARED:
            buckets = texts(self._owners.bucket_names).take(self._owners.buckets.take(owner)).dictionary_encode()
        else:
            zeros = integers(array("i", [0]) * rows, arrow.int32())
            buckets = arrow.DictionaryArray.from_arrays(zeros, texts([bucket]))
        columns = [
            buckets,
            self._owners.streams.take(owner),
            self._starts.slice(first, rows),
            self._ends.slice(first, rows),
            integers(array("i", [shard]) * rows, arrow.int32()),
            self._positions.slice(first, rows),
            self._times.slice(first, rows).view(SCHEMA.field("appended_at").type),
            self._owners.content_types.take(owner),
            self._payloads(first, stop),
            self._owners.incarnations.take(owner),
        ]
        return arrow.record_batch(columns, schema=SCHEMA)

    def bounds(self, part: Part) -> tuple[tuple[Position, Position], tuple[Milliseconds, Milliseconds]]:
        """The positions and times that a segment spans."""
        positions, times = (
            compute.min_max(column.slice(part.first, part.stop - part.first)).as_py()
            for column in (self._positions, self._times)
        )
        return (positions["min"], positions["max"]), (times["min"], times["max"])


def encode_segments(
    messages: Unflushed,
    first_position: Position,
    position: Position,
    owners: Owners,
    shard: int,
    joined: memoryview | None = None,
) -> Iterator[EncodedSegment]:
    """The messages between two positions, the first included, as segments.

    They may have come `joined`, back to back in one buffer, instead of one by one.
    """
    for slab in slabs(messages, joined, first_position, position):
        arranged = Arranged(slab, owners)
        for part in arranged.parts:
            yield _encode(arranged, part, shard)


def _encode(arranged: Arranged, part: Part, shard: int) -> EncodedSegment:
    """One segment, row group by row group."""
    sink = arrow.BufferOutputStream()
    writer = SegmentWriter(sink, part.bucket, shard)
    first = part.first
    while first < part.stop:
        stop = arranged.row_group(part, first)
        writer.write(arranged.batch(part.bucket, shard, first, stop), arranged.pieces(part.bucket, first, stop))
        first = stop
    info = writer.close(*arranged.bounds(part))
    data = memoryview(sink.getvalue()).cast("B")
    size = footer_bytes(data[-8:], part.bucket)
    return EncodedSegment(data, zlib.crc32(data), size, zlib.crc32(data[-size:]), info, encode_extents(writer.extents))
