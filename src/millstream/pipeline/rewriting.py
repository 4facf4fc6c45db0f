"""Rewriting: the live messages of many segments between two keys, sorted, as one new segment.

Works on one executor core with bounded memory: the messages of the part once as they are read and once in a row, plus a
row group. Nothing is decided here; `planning.py` has cut the parts.
"""

from __future__ import annotations

import asyncio
import zlib
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, NamedTuple

import pyarrow as arrow
import pyarrow.compute as compute

from millstream.errors import Corrupt
from millstream.streams.records import SegmentRef
from millstream.tiers.columns import integers
from millstream.tiers.objects import ObjectStoreSettings, open_objects
from millstream.tiers.segment_reader import SegmentReader
from millstream.tiers.segments import (
    ROW_GROUP_BYTES,
    ROW_GROUP_ROWS,
    SCHEMA,
    SHARED,
    Extent,
    Footer,
    Pieces,
    SegmentInfo,
    SegmentWriter,
    footer_bytes,
    whole,
)
from millstream.units import Offset

CRC_CHUNK_BYTES: Final = 4 << 20
_CONSTANT: Final = ("bucket", "shard")
_COLUMNS: Final = [name for name in SCHEMA.names if name not in _CONSTANT]

Key = tuple[str, int, int]
"""Stream, incarnation, offset: the order of rows."""


class Part(NamedTuple):
    """One new segment to be written: what the sources hold from `first` (included) to `last` (not)."""

    store: ObjectStoreSettings
    path: str
    bucket: str
    shard: int
    sources: list[SegmentRef]
    first: Key
    last: Key | None
    kept_from: dict[int, int]
    """By incarnation, the offset from which messages count; incarnations that are not in it are gone."""


class _Run(NamedTuple):
    key: Key
    row: int  # of the gathered table
    rows: int


def rewrite(part: Part) -> SegmentRef:
    """Read, sort, write, store; returns the new segment."""
    return asyncio.run(rewrite_part(part))


async def rewrite_part(part: Part) -> SegmentRef:
    objects = open_objects(part.store)
    table, runs = _gather(SegmentReader(objects), part)
    with TemporaryDirectory(prefix="millstream-compact-") as scratch:
        file = Path(scratch) / "segment.parquet"
        info = _write(file, part, table, runs)
        del table
        size = file.stat().st_size
        checksum, footer, footer_checksum = _checksums(file, size)
        await objects.put(part.path, file)
    return SegmentRef(
        part.path,
        part.bucket,
        size,
        checksum,
        info.rows,
        info.payload_bytes,
        info.first_position,
        info.last_position,
        info.first_at_ms,
        info.last_at_ms,
        footer,
        footer_checksum,
    )


# -- reading ---------------------------------------------------------------------------------------------------------


def shared_name(bucket: str, stream: str) -> str:
    """What stands for the stream's name in the key of a row that shares its segment with other buckets'."""
    return f"{bucket}\0{stream}"


def chosen(footer: Footer, part: Part) -> Iterator[tuple[str, Extent]]:
    """The extents of the part that hold something alive, each with the name in its key."""
    for bucket, extent in zip(footer.buckets(), footer.extents, strict=True):
        name = shared_name(bucket, extent.stream) if part.bucket == SHARED else extent.stream
        key = (name, extent.incarnation, extent.offset_start)
        kept_from = part.kept_from.get(extent.incarnation)
        if kept_from is None or extent.offset_end <= kept_from or key < part.first:
            continue
        if part.last is None or key < part.last:
            yield name, extent


def _gather(reader: SegmentReader, part: Part) -> tuple[arrow.Table, list[_Run]]:
    """Every row of the part in one table, and where each run of them is."""
    tables: list[arrow.Table] = []
    runs: list[_Run] = []
    row = 0
    for segment in part.sources:
        footer = reader.footer(segment)
        by_group: dict[int, list[tuple[str, Extent]]] = {}
        for name, extent in chosen(footer, part):
            by_group.setdefault(extent.row_group, []).append((name, extent))
        for group, table in reader.row_groups(segment, footer.metadata, list(by_group), _COLUMNS):
            kept, lengths = _kept_rows(table, by_group[group], part)
            tables.append(kept)
            for key, rows in lengths:
                runs.append(_Run(key, row, rows))
                row += rows
    if not tables:
        raise Corrupt(f"there is nothing to write into {part.path}")
    gathered = arrow.concat_tables(tables).combine_chunks()
    runs.sort()
    return gathered, runs


def _kept_rows(
    table: arrow.Table, extents: list[tuple[str, Extent]], part: Part
) -> tuple[arrow.Table, list[tuple[Key, int]]]:
    """The rows of the part in a row group, without what was trimmed."""
    ends = memoryview(whole(table.column("offset_end")).buffers()[1]).cast("q")
    pieces: list[tuple[int, int]] = []
    lengths: list[tuple[Key, int]] = []
    for name, extent in extents:
        first, stop = extent.row_start, extent.row_start + extent.rows
        start = extent.offset_start
        kept_from = part.kept_from[extent.incarnation]
        if kept_from > start:
            first = bisect_right(ends, kept_from, first, stop)
            start = Offset(ends[first - 1]) if first > extent.row_start else start
        pieces.append((first, stop))
        lengths.append(((name, extent.incarnation, start), stop - first))
    if pieces[0][0] == 0 and sum(stop - first for first, stop in pieces) == table.num_rows:
        return table, lengths
    rows = array("q")
    for first, stop in pieces:
        rows.extend(range(first, stop))
    return table.take(integers(rows)), lengths


# -- writing ---------------------------------------------------------------------------------------------------------


def _write(file: Path, part: Part, table: arrow.Table, runs: list[_Run]) -> SegmentInfo:
    positions = compute.min_max(table.column("position")).as_py()
    times = compute.min_max(table.column("appended_at").cast(arrow.int64())).as_py()
    ends = memoryview(whole(table.column("offset_end")).buffers()[1]).cast("q")
    with file.open("wb") as sink:
        writer = SegmentWriter(sink, part.bucket, part.shard)
        for group in _groups(runs, ends):
            writer.write(_batch(part, _taken(table, group), group), _pieces(part, group, ends))
        return writer.close((positions["min"], positions["max"]), (times["min"], times["max"]))


def _groups(runs: list[_Run], ends: memoryview[int]) -> Iterator[list[_Run]]:
    """Cut the sorted runs into row groups."""
    group: list[_Run] = []
    size = rows = 0
    for (stream, incarnation, start), row, count in runs:
        done = 0
        while done < count:
            begin = ends[row + done - 1] if done else start
            stop = bisect_right(ends, begin + ROW_GROUP_BYTES - size, row + done, row + count) - row
            stop = min(max(stop, done + 1 if not group else done), done + ROW_GROUP_ROWS - rows)
            if stop > done:
                group.append(_Run((stream, incarnation, begin), row + done, stop - done))
                size += ends[row + stop - 1] - begin
                rows += stop - done
                done = stop
            if done < count or size >= ROW_GROUP_BYTES or rows >= ROW_GROUP_ROWS:
                yield group
                group, size, rows = [], 0, 0
    if group:
        yield group


def _pieces(part: Part, group: list[_Run], ends: memoryview[int]) -> Pieces:
    """The extents of a row group: runs that follow one another in a stream are one."""
    pieces: list[tuple[str, int, int, int, int]] = []
    for (stream, incarnation, start), row, count in group:
        end = ends[row + count - 1]
        if pieces and pieces[-1][:2] == (stream, incarnation) and pieces[-1][3] == start:
            _, _, first, _, rows = pieces.pop()
            pieces.append((stream, incarnation, first, end, rows + count))
        else:
            pieces.append((stream, incarnation, start, end, count))
    found = Pieces(*zip(*pieces, strict=True))
    if part.bucket != SHARED:
        return found
    buckets, _, streams = zip(*(name.partition("\0") for name in found.streams), strict=True)
    return found._replace(streams=streams, buckets=buckets)


def _taken(table: arrow.Table, group: list[_Run]) -> arrow.Table:
    """The rows of some runs, in their order; without a copy if they lie so."""
    if all(before.row + before.rows == after.row for before, after in pairwise(group)):
        return table.slice(group[0].row, sum(run.rows for run in group))
    rows = array("q")
    for _, first, count in group:
        rows.extend(range(first, first + count))
    return table.take(integers(rows))


def _batch(part: Part, taken: arrow.Table, group: list[_Run]) -> arrow.RecordBatch:
    rows = taken.num_rows
    columns: list[arrow.Array] = []
    for field in SCHEMA:
        if field.name == "bucket" and part.bucket == SHARED:
            names = [run.key[0].partition("\0")[0] for run in group for _ in range(run.rows)]
            columns.append(arrow.array(names).dictionary_encode())
        elif field.name == "bucket":
            indexes = integers(array("i", [0]) * rows, arrow.int32())
            columns.append(arrow.DictionaryArray.from_arrays(indexes, arrow.array([part.bucket])))
        elif field.name == "shard":
            columns.append(arrow.repeat(arrow.scalar(part.shard, arrow.int32()), rows))
        else:
            columns.append(whole(taken.column(field.name)))
    return arrow.record_batch(columns, schema=SCHEMA)


def _checksums(file: Path, size: int) -> tuple[int, int, int]:
    """The file's CRC-32, and its footer's length and CRC-32."""
    checksum = 0
    with file.open("rb") as stored:
        while data := stored.read(CRC_CHUNK_BYTES):
            checksum = zlib.crc32(data, checksum)
        stored.seek(size - 8)
        length = footer_bytes(stored.read(8), str(file))
        stored.seek(size - length)
        return checksum, length, zlib.crc32(stored.read(length))
