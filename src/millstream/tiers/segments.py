"""Cold segments: a piece of the log, sorted by stream and offset, as one Parquet file. See docs/formats/segment.md.

One row is one message. Rows are sorted by stream, incarnation and offset, row groups are about a mebibyte, and the
footer says for each stream which rows of which row group are its own, so that a read of one stream fetches little
else. Pages carry checksums. Any engine reads these files; nothing in them needs millstream to be understood.

An `Extent` is a run of one stream's messages inside one row group: the unit the index is made of.

This module has the format: the schema, the writer, the footer, a decoded row group. `segment_reader.py` reads files.
"""

from __future__ import annotations

import io
import zlib
from array import array
from collections.abc import Sequence
from itertools import accumulate, groupby, pairwise, repeat
from typing import Any, Final, NamedTuple

import msgspec
import pyarrow as arrow
import pyarrow.compute as compute
import pyarrow.parquet as parquet

from millstream.errors import Corrupt, OtherFormat
from millstream.tiers.columns import binaries, integers
from millstream.units import Incarnation, Milliseconds, Offset, Position

FORMAT: Final = 1
ROW_GROUP_BYTES: Final = 1 << 20
ROW_GROUP_ROWS: Final = 16_384

SCHEMA: Final = arrow.schema(
    [
        # A dictionary, which is what engines make of the folders' names; in the file it is a string like the others.
        ("bucket", arrow.dictionary(arrow.int32(), arrow.string())),
        ("stream", arrow.string()),
        ("offset_start", arrow.int64()),
        ("offset_end", arrow.int64()),
        ("shard", arrow.int32()),
        ("position", arrow.int64()),
        ("appended_at", arrow.timestamp("ms", tz="UTC")),
        ("content_type", arrow.string()),
        ("payload", arrow.binary()),
        ("incarnation", arrow.int64()),
    ]
)

# What stands for the bucket of a segment that several small ones share.
SHARED: Final = ""
_POSITION: Final = SCHEMA.get_field_index("position")
# What a reader of one stream needs of a row group, and what the feed and a fork need besides.
BYTES_COLUMNS: Final = ["payload", "offset_end"]
ORDER_COLUMNS: Final = ["position", "appended_at"]
_INDEX_KEY: Final = b"millstream.index"
_SEGMENT_KEY: Final = b"millstream.segment"


class Extent(msgspec.Struct, array_like=True, frozen=True, gc=False):
    stream: str
    incarnation: Incarnation
    offset_start: Offset
    offset_end: Offset
    row_group: int
    row_start: int
    rows: int


class Pieces(NamedTuple):
    """Consecutive runs of rows, each of one incarnation, as columns."""

    streams: Sequence[str]
    incarnations: Sequence[int]
    starts: Sequence[int]
    ends: Sequence[int]
    rows: Sequence[int]
    buckets: Sequence[str] = ()  # only in a segment that buckets share


class SegmentInfo(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What a segment's footer says of the whole."""

    format: int
    shard: int
    bucket: str
    first_position: Position
    last_position: Position
    first_at_ms: Milliseconds
    last_at_ms: Milliseconds
    rows: int
    payload_bytes: int
    # Of a segment that buckets share: each of them, in order, and how many of the extents are its own.
    shared_by: list[tuple[str, int]] = []


encode_extents: Final = msgspec.msgpack.Encoder().encode
decode_extents: Final = msgspec.msgpack.Decoder(list[Extent]).decode
_INFO: Final = msgspec.msgpack.Decoder(SegmentInfo)
_ENCODER: Final = msgspec.msgpack.Encoder()


class SegmentWriter:
    """Writes a segment row group by row group into a sink; the caller keeps the order of rows."""

    def __init__(self, sink: Any, bucket: str, shard: int) -> None:
        self._writer = parquet.ParquetWriter(
            sink,
            SCHEMA,
            compression="zstd",
            use_dictionary=["bucket", "stream", "content_type", "shard"],
            write_page_checksum=True,
            write_statistics=True,
            store_schema=True,
        )
        self._bucket = bucket
        self._shard = shard
        self.extents: list[Extent] = []
        self._groups = self._rows = self._payload_bytes = 0
        self._shared_by: list[tuple[str, int]] = []

    def write(self, batch: arrow.RecordBatch, pieces: Pieces) -> None:
        """One row group, of which the pieces are all there is."""
        *firsts, _ = accumulate(pieces.rows, initial=0)
        self.extents += map(
            Extent,
            pieces.streams,
            pieces.incarnations,
            pieces.starts,
            pieces.ends,
            repeat(self._groups),
            firsts,
            pieces.rows,
        )
        for bucket, same in groupby(pieces.buckets):
            count = len(list(same))
            if self._shared_by and self._shared_by[-1][0] == bucket:
                count += self._shared_by.pop()[1]
            self._shared_by.append((bucket, count))
        self._payload_bytes += sum(pieces.ends) - sum(pieces.starts)
        self._writer.write_batch(batch, row_group_size=batch.num_rows)
        self._rows += batch.num_rows
        self._groups += 1

    def close(self, positions: tuple[Position, Position], times: tuple[Milliseconds, Milliseconds]) -> SegmentInfo:
        info = SegmentInfo(
            FORMAT,
            self._shard,
            self._bucket,
            *positions,
            *times,
            self._rows,
            self._payload_bytes,
            self._shared_by,
        )
        self._writer.add_key_value_metadata(
            {_INDEX_KEY: _as_text(encode_extents(self.extents)), _SEGMENT_KEY: _as_text(_ENCODER.encode(info))}
        )
        self._writer.close()
        return info


def _as_text(data: bytes) -> bytes:
    # Parquet key-value metadata is text; latin-1 keeps every byte, escaped as UTF-8.
    return data.decode("latin-1").encode("utf-8")


def _as_bytes(text: bytes) -> bytes:
    return text.decode("utf-8").encode("latin-1")


class Footer(NamedTuple):
    metadata: parquet.FileMetaData
    info: SegmentInfo
    extents: list[Extent]

    def of(self, bucket: str) -> Footer:
        """The same with nothing but the bucket's extents."""
        first = 0
        for name, count in self.info.shared_by or [(self.info.bucket, len(self.extents))]:
            if name == bucket:
                return self._replace(extents=self.extents[first : first + count])
            first += count
        return self._replace(extents=[])

    def buckets(self) -> list[str]:
        """For each extent whose it is."""
        return [
            name for name, count in self.info.shared_by or [(self.info.bucket, len(self.extents))] for _ in range(count)
        ]


def footer_bytes(tail: bytes | memoryview, path: str) -> int:
    """How many bytes at a file's end hold its footer, by its last eight."""
    if len(tail) < 8 or tail[-4:] != b"PAR1":
        raise Corrupt(f"{path} is not a whole Parquet file")
    return int.from_bytes(tail[-8:-4], "little") + 8


def decode_footer(tail: bytes, path: str, checksum: int) -> Footer:
    """The footer from exactly its bytes. Parquet readers trust it without a checksum of it, so ours comes first."""
    if zlib.crc32(tail) != checksum:
        raise Corrupt(f"the footer of segment {path} is damaged: its checksum differs from the one that was recorded")
    try:
        metadata = parquet.read_metadata(io.BytesIO(b"PAR1" + tail))
        values = metadata.metadata or {}
        info = _INFO.decode(_as_bytes(values[_SEGMENT_KEY]))
        extents = decode_extents(_as_bytes(values[_INDEX_KEY]))
    except (arrow.ArrowException, OSError, KeyError, msgspec.MsgspecError, UnicodeError) as error:
        raise Corrupt(f"the footer of segment {path} cannot be read: {error}") from None
    if info.format != FORMAT:
        raise OtherFormat(f"segment {path}", found=info.format, known=FORMAT)
    return Footer(metadata, info, extents)


def row_group_range(metadata: parquet.FileMetaData, group: int) -> tuple[int, int]:
    """Where in the file the row group's column chunks lie."""
    row_group = metadata.row_group(group)
    starts, ends = [], []
    for index in range(row_group.num_columns):
        column = row_group.column(index)
        starts.append(chunk_start(column))
        ends.append(starts[-1] + column.total_compressed_size)
    return min(starts), max(ends)


def chunk_start(column: parquet.ColumnChunkMetaData) -> int:
    """Where in the file a column of a row group begins: with its dictionary, if it has one."""
    if column.dictionary_page_offset is None:
        return int(column.data_page_offset)
    return int(min(column.data_page_offset, column.dictionary_page_offset))


def overlaps(metadata: parquet.FileMetaData, group: int, first: Position, until: Position) -> bool:
    """Whether a row group may hold positions between two, the first included, the last not."""
    statistics = metadata.row_group(group).column(_POSITION).statistics
    if statistics is None or not statistics.has_min_max:
        return True
    return bool(statistics.min < until and statistics.max >= first)


def whole(column: arrow.ChunkedArray) -> arrow.Array:
    """A column as one array that starts at the start of its buffers."""
    array_ = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    if isinstance(array_, arrow.ChunkedArray):
        array_ = array_.chunk(0)
    return array_ if array_.offset == 0 else arrow.concat_arrays([array_])


_NONE: Final[memoryview[int]] = memoryview(b"").cast("q")


class RowGroup:
    """A decoded row group: its payloads back to back, where each ends, and, if asked for, when it was appended."""

    __slots__ = ("_data", "_offsets", "_payload", "ends", "positions", "size", "times")

    def __init__(self, table: arrow.Table) -> None:
        self._payload = whole(table.column("payload"))
        _, offsets, data = self._payload.buffers()
        self._offsets = memoryview(offsets).cast("i")
        self._data = memoryview(data) if data is not None else memoryview(b"")
        # Views, not lists: most reads look at a few of them.
        self.ends: memoryview[int] = memoryview(whole(table.column("offset_end")).buffers()[1]).cast("q")
        self.size = len(self._data) + 4 * len(self._offsets) + 8 * len(self.ends)
        self.positions: memoryview[int] = _NONE
        self.times: memoryview[int] = _NONE
        if "position" in table.column_names:
            self.positions = memoryview(whole(table.column("position")).buffers()[1]).cast("q")
            self.times = memoryview(whole(table.column("appended_at")).buffers()[1]).cast("q")
            self.size += 16 * table.num_rows

    def bytes_of(self, first: int, stop: int) -> memoryview:
        return self._data[self._offsets[first] : self._offsets[stop]]

    def joined(self, first: int, stop: int, separator: bytes) -> memoryview:
        """The same with a separator between messages; no object is made of each."""
        if not separator or stop - first == 1:
            return self.bytes_of(first, stop)
        messages = self._payload.slice(first, stop - first)
        lists = arrow.ListArray.from_arrays(integers(array("i", [0, stop - first]), arrow.int32()), messages)
        between = binaries([separator])[0]
        return memoryview(compute.binary_join(lists, between)[0].as_buffer()).cast("B")

    def length_of(self, first: int, stop: int) -> int:
        return self._offsets[stop] - self._offsets[first]

    def messages(self, first: int, stop: int) -> list[bytes]:
        # One copy of the whole, then slices of it: a third of the time of a slice of a view for each.
        offsets = self._offsets[first : stop + 1].tolist()
        base = offsets[0]
        data = bytes(self._data[base : offsets[-1]])
        if base:
            offsets = [offset - base for offset in offsets]
        return [data[start:end] for start, end in pairwise(offsets)]
