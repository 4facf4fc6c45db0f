"""Finds the rows of a planned piece whose segment a compaction has replaced, and reads them where they are now.

A plan names files, and may be used long after it was made: a DataFrame keeps its plan, and the server deletes replaced
segments after `cold.reclaim_grace`. A piece therefore carries what its rows are, as offsets of streams (`OffsetRange`).
Those never change, so that exactly the planned rows are found in whatever segments the server lists by then. Rows of
streams that were deleted or trimmed since are gone; anything else that is not found is an error.
"""

from __future__ import annotations

import logging
import zlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

import msgspec
import pyarrow as arrow

from millstream.spark.cold_reader import ColdReader
from millstream.spark.errors import SegmentMissing
from millstream.spark.options import Connection
from millstream.spark.source_client import ShardListing, SourceClient
from millstream.streams.records import SegmentRef
from millstream.tiers.segments import Extent, Footer, whole

logger = logging.getLogger("millstream.spark")

# Segments may be replaced again while their rows are looked for.
ATTEMPTS_MAX: Final = 5


class OffsetRange(NamedTuple):
    """The messages of one stream in one row group: those that end behind `start` and not behind `end`."""

    group: int
    incarnation: int
    start: int
    end: int


_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(list[OffsetRange])


def pack(extents: Iterable[Extent], earliest: dict[int, int]) -> bytes:
    """Extents, without what was dead when the read was planned, as a plan carries them: about three bytes each."""
    ranges = []
    for extent in extents:
        start = max(extent.offset_start, earliest.get(extent.incarnation, 0))
        if start < extent.offset_end:
            ranges.append((extent.row_group, extent.incarnation, start, extent.offset_end))
    return zlib.compress(_ENCODER.encode(ranges), 1)


def unpack(packed: Iterable[bytes], groups: Iterable[int]) -> list[OffsetRange]:
    """The ranges that lie in some of the row groups."""
    chosen = set(groups)
    return [one for part in packed for one in _DECODER.decode(zlib.decompress(part)) if one.group in chosen]


class Relocation:
    """The search for rows that are no longer where the plan says."""

    def __init__(self, connection: Connection, bucket: str, shard: int, reader: ColdReader) -> None:
        self._connection = connection
        self._bucket = bucket
        self._shard = shard
        self._reader = reader

    def row_groups(
        self, lost: SegmentRef, ranges: Iterable[OffsetRange], columns: set[str], missing: SegmentMissing
    ) -> Iterator[tuple[SegmentRef, arrow.Table]]:
        """The rows of the ranges, each table with the segment that it is in now."""
        pending = _Pending(ranges)
        client = SourceClient(self._connection)
        try:
            for _ in range(ATTEMPTS_MAX):
                shard = self._listing(client)
                if any(one.path == lost.path for one in shard.refs()):
                    raise missing  # the server still reads it: this machine looks in the wrong place
                pending.forget_dead(client.alive(self._bucket, pending.incarnations()), lost)
                try:
                    yield from self._found(shard, lost, pending, columns)
                except SegmentMissing as error:
                    missing = error
                    continue
                if not pending:
                    return
            raise missing
        finally:
            client.close()

    def _listing(self, client: SourceClient) -> ShardListing:
        return next(one for one in client.cold(self._bucket).shards if one.shard == self._shard)

    def _found(
        self, shard: ShardListing, lost: SegmentRef, pending: _Pending, columns: set[str]
    ) -> Iterator[tuple[SegmentRef, arrow.Table]]:
        candidates = [
            one
            for one in shard.refs()
            if one.first_position <= lost.last_position and one.last_position >= lost.first_position
        ]
        for segment, footer in self._reader.footers(candidates):
            places = _places(footer.of(self._bucket), pending)
            needed = sorted(columns | {"offset_end"})
            for group, table in self._reader.row_groups(segment, footer, sorted(places), needed):
                yield segment, _rows(table, places[group])
                for one in places[group]:
                    pending.remove(one)


class _Pending:
    """By incarnation, the ranges of offsets that were not found yet."""

    def __init__(self, ranges: Iterable[OffsetRange]) -> None:
        self._ranges: dict[int, list[tuple[int, int]]] = {}
        for one in ranges:
            self._ranges.setdefault(one.incarnation, []).append((one.start, one.end))

    def __bool__(self) -> bool:
        return bool(self._ranges)

    def incarnations(self) -> list[int]:
        return sorted(self._ranges)

    def within(self, extent: Extent) -> Iterator[tuple[int, int]]:
        """What of an extent is pending."""
        for start, end in self._ranges.get(extent.incarnation, ()):
            low, high = max(start, extent.offset_start), min(end, extent.offset_end)
            if low < high:
                yield low, high

    def forget_dead(self, alive: dict[int, int], lost: SegmentRef) -> None:
        """Streams that were deleted or trimmed since: what is gone of them is not looked for."""
        before = {key: list(value) for key, value in self._ranges.items()}
        for incarnation in self.incarnations():
            self._cut(incarnation, 0, alive.get(incarnation, 2**63))
        if before != self._ranges:
            logger.warning(
                "segment %s was replaced since this read was planned, and messages of %d of its streams were deleted or"
                " trimmed: they are not read",
                lost.path,
                sum(value != self._ranges.get(key) for key, value in before.items()),
            )

    def remove(self, place: _Place) -> None:
        self._cut(place.extent.incarnation, place.start, place.end)

    def _cut(self, incarnation: int, start: int, end: int) -> None:
        left = [
            part
            for low, high in self._ranges[incarnation]
            for part in ((low, min(high, start)), (max(low, end), high))
            if part[0] < part[1]
        ]
        if left:
            self._ranges[incarnation] = left
        else:
            del self._ranges[incarnation]


class _Place(NamedTuple):
    """A part of an extent."""

    extent: Extent
    start: int
    end: int


def _places(footer: Footer, pending: _Pending) -> dict[int, list[_Place]]:
    """By row group, the parts of a segment's extents that are pending."""
    places: dict[int, list[_Place]] = {}
    for extent in footer.extents:
        for start, end in pending.within(extent):
            places.setdefault(extent.row_group, []).append(_Place(extent, start, end))
    return places


def _rows(table: arrow.Table, places: list[_Place]) -> arrow.Table:
    ends = memoryview(whole(table.column("offset_end")).buffers()[1]).cast("q")
    pieces = []
    for extent, start, end in places:
        stop = extent.row_start + extent.rows
        first = bisect_right(ends, start, extent.row_start, stop)
        pieces.append(table.slice(first, bisect_right(ends, end, first, stop) - first))
    return arrow.concat_tables(pieces)
