"""Encoding a segment: runs of messages become row groups, one after another.

Making columns is Python's work and compressing them is not. `encoding` therefore says what it does step by step: the
one it does itself, a slice between two steps, the other it hands out. Whoever drives it lets requests in between the
slices and does the rest on a thread; `encode_segment` just does everything.
"""

from __future__ import annotations

import zlib
from array import array
from bisect import bisect_right
from collections.abc import Callable, Generator, Iterable
from functools import partial
from itertools import accumulate, chain, repeat
from typing import Any, Final, NamedTuple

import msgspec
import pyarrow as arrow

from millstream.protocol.keys import StreamKey
from millstream.tiers.segments import (
    ROW_GROUP_BYTES,
    ROW_GROUP_ROWS,
    SCHEMA,
    Extent,
    SegmentInfo,
    SegmentWriter,
    footer_bytes,
)

SLICE_RUNS: Final = 256


class StreamRun(msgspec.Struct, frozen=True, gc=False):
    """Consecutive messages of one incarnation, on their way into a segment; the arrays run in parallel."""

    key: StreamKey
    incarnation: int
    content_type: str
    start: int
    messages: list[bytes]
    ends: array[int]
    positions: array[int]
    times: array[int]


class EncodedSegment(NamedTuple):
    data: memoryview
    checksum: int
    footer_bytes: int
    footer_checksum: int
    info: SegmentInfo
    extents: list[Extent]


Step = Callable[[], object]
Encoding = Generator[Step | None, None, EncodedSegment]
"""Yields work that needs no interpreter, or None where others may have a turn; returns the segment."""


def order(run: StreamRun) -> tuple[str, int, int]:
    """How the runs of a segment are sorted."""
    return run.key.stream, run.incarnation, run.start


def encode_segment(bucket: str, shard: int, runs: Iterable[StreamRun]) -> EncodedSegment:
    """One bucket's runs, in any order, as a segment."""
    steps = encoding(bucket, shard, sorted(runs, key=order))
    while True:
        try:
            step = next(steps)
        except StopIteration as finished:
            encoded: EncodedSegment = finished.value
            return encoded
        if step is not None:
            step()


def encoding(bucket: str, shard: int, runs: Iterable[StreamRun]) -> Encoding:
    """One bucket's runs, in order, as a segment; large streams get several row groups, small ones share one."""
    sink = arrow.BufferOutputStream()
    writer = SegmentWriter(sink, bucket, shard)
    bounds = _Bounds()
    group = _Columns()
    for count, run in enumerate(runs, 1):
        first, rows = 0, len(run.ends)
        while first < rows:
            first = group.take(run, first)
            if first < rows or group.is_full:
                yield _write(writer, bounds, group, bucket, shard)
                group = _Columns()
        if count % SLICE_RUNS == 0:
            yield None
    if group.messages:
        yield _write(writer, bounds, group, bucket, shard)
    finished: list[EncodedSegment] = []
    yield lambda: finished.append(_finish(writer, sink, bounds, bucket))
    return finished[0]


def _write(writer: SegmentWriter, bounds: _Bounds, group: _Columns, bucket: str, shard: int) -> Step:
    bounds.include(group)
    writer.describe(group.pieces)
    return partial(writer.write_batch, group.batch(bucket, shard))


def _finish(writer: SegmentWriter, sink: Any, bounds: _Bounds, bucket: str) -> EncodedSegment:
    info = writer.close((bounds.first_position, bounds.last_position), (bounds.first_at_ms, bounds.last_at_ms))
    data = memoryview(sink.getvalue()).cast("B")
    size = footer_bytes(data[-8:], bucket)
    return EncodedSegment(data, zlib.crc32(data), size, zlib.crc32(data[-size:]), info, writer.extents)


class _Bounds:
    """The positions and times that a segment spans."""

    def __init__(self) -> None:
        self.first_position = self.first_at_ms = 1 << 63
        self.last_position = self.last_at_ms = 0

    def include(self, group: _Columns) -> None:
        self.first_position = min(self.first_position, min(group.positions))
        self.last_position = max(self.last_position, max(group.positions))
        self.first_at_ms = min(self.first_at_ms, min(group.times))
        self.last_at_ms = max(self.last_at_ms, max(group.times))


class _Columns:
    """A row group that is being gathered; a piece is what it has of one run."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []
        self.pieces: list[tuple[str, int, int, int, int]] = []  # as `SegmentWriter.describe` wants them
        self.positions, self.times = array("q"), array("q")
        self._starts, self._ends = array("q"), array("q")
        self._content_types: list[str] = []
        self._bytes = 0

    @property
    def is_full(self) -> bool:
        return self._bytes >= ROW_GROUP_BYTES or len(self.messages) >= ROW_GROUP_ROWS

    def take(self, run: StreamRun, first: int) -> int:
        """Take messages from the first on, as many as there is room for; returns the one to go on with."""
        start = run.ends[first - 1] if first else run.start
        stop = self._fitting(run, first, start)
        if stop == first:
            return first
        end = run.ends[stop - 1]
        if stop - first == 1:
            self.messages.append(run.messages[first])
            self._starts.append(start)
            self._ends.append(end)
            self.positions.append(run.positions[first])
            self.times.append(run.times[first])
        else:
            self.messages += run.messages[first:stop]
            self._starts.append(start)
            self._starts += run.ends[first : stop - 1]
            self._ends += run.ends[first:stop]
            self.positions += run.positions[first:stop]
            self.times += run.times[first:stop]
        self.pieces.append((run.key.stream, run.incarnation, start, end, stop - first))
        self._content_types.append(run.content_type)
        self._bytes += end - start
        return stop

    def _fitting(self, run: StreamRun, first: int, start: int) -> int:
        """Up to which message the run fits; into an empty row group always one."""
        rows, room = len(run.ends), ROW_GROUP_BYTES - self._bytes
        rows_max = first + ROW_GROUP_ROWS - len(self.messages)
        if run.ends[-1] - start <= room and rows <= rows_max:
            return rows
        least = first if self.messages else first + 1
        return min(max(bisect_right(run.ends, start + room, first), least), rows_max)

    def batch(self, bucket: str, shard: int) -> arrow.RecordBatch:
        rows = len(self.messages)
        if rows == len(self.pieces):
            which = None
        else:
            lengths = enumerate(piece[4] for piece in self.pieces)
            numbers = chain.from_iterable(repeat(number, length) for number, length in lengths)
            which = _integers(array("i", numbers), arrow.int32())  # for each row, the piece it belongs to

        def spread(column: arrow.Array) -> arrow.Array:
            """One value for each piece, repeated for each of its rows."""
            return column if which is None else column.take(which)

        zeros = _integers(array("i", [0]) * rows, arrow.int32())
        if len(set(self._content_types)) == 1:
            content_types = _texts(self._content_types[:1]).take(zeros)
        else:
            content_types = spread(_texts(self._content_types))
        columns = [
            arrow.DictionaryArray.from_arrays(zeros, _texts([bucket])),
            spread(_texts([piece[0] for piece in self.pieces])),
            _integers(self._starts, arrow.int64()),
            _integers(self._ends, arrow.int64()),
            _integers(array("i", [shard]) * rows, arrow.int32()),
            _integers(self.positions, arrow.int64()),
            _integers(self.times, arrow.timestamp("ms", tz="UTC")),
            content_types,
            _payloads(self.messages, arrow.binary()),
            spread(_integers(array("q", [piece[1] for piece in self.pieces]), arrow.int64())),
        ]
        return arrow.record_batch(columns, schema=SCHEMA)


def _texts(values: list[str]) -> arrow.Array:
    return _payloads([value.encode() for value in values], arrow.string())


def _integers(values: array[int], kind: arrow.DataType) -> arrow.Array:
    return arrow.Array.from_buffers(kind, len(values), [None, arrow.py_buffer(values)])


def _payloads(messages: list[bytes], kind: arrow.DataType) -> arrow.Array:
    """A column over one joined buffer: a copy, but no object per value (and no look at each, as `arrow.array` has)."""
    offsets = array("i", accumulate(map(len, messages), initial=0))
    buffers = [None, arrow.py_buffer(offsets), arrow.py_buffer(b"".join(messages))]
    return arrow.Array.from_buffers(kind, len(messages), buffers)
