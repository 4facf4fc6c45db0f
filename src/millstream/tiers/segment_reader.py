"""Reads segment files, for the server, for Spark and for the jobs: footers, and some columns of some row groups.

Where objects are files, Arrow reads them itself. From any other store the byte ranges of the wanted columns are fetched
and Arrow reads from those. Page checksums are verified on every read. All calls wait for the store and decode on the
calling thread; the server makes them on threads of its own.

Errors: `NotFound` for a segment that is not in the store, `Unavailable` while the store cannot be reached, `Corrupt`
for bytes that cannot be decoded.
"""

from __future__ import annotations

import io
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

import pyarrow as arrow
import pyarrow.parquet as parquet

from millstream.errors import Corrupt, NotFound, Unavailable
from millstream.streams.records import SegmentRef
from millstream.tiers.objects import Objects
from millstream.tiers.segments import SCHEMA, Footer, chunk_start, decode_footer

BATCH_BYTES: Final = 2 << 20  # small enough to stay in the processor's cache until it is sent on
GAP_BYTES: Final = 256 << 10  # a hole smaller than this is fetched with what surrounds it
FOOTERS_AT_ONCE: Final = 16


class FetchedRange(NamedTuple):
    """Bytes of a file, and where in it they start."""

    start: int
    data: bytes


class FetchedFile(io.RawIOBase):
    """A file of which only some ranges were fetched. A read outside of them is an error."""

    def __init__(self, ranges: Sequence[FetchedRange]) -> None:
        self._ranges = sorted(ranges)
        self._starts = [one.start for one in self._ranges]
        self._size = max((one.start + len(one.data) for one in ranges), default=0)
        self._at = 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        index = bisect_right(self._starts, self._at) - 1
        start, data = self._ranges[index] if index >= 0 else FetchedRange(self._at + 1, b"")
        first = self._at - start
        if not 0 <= first <= len(data):
            raise OSError(f"byte {self._at} was not fetched")
        piece = data[first : first + size if size >= 0 else None]
        self._at += len(piece)
        return piece


class SegmentReader:
    """Reads the segments of one object store."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects

    def footer(self, segment: SegmentRef) -> Footer:
        start, size, path = segment.size - segment.footer_bytes, segment.size, segment.path
        file = self._objects.file(path)
        if file is not None:
            with _file_errors(path), file.open("rb") as stored:
                stored.seek(start)
                tail = stored.read(segment.footer_bytes)
        else:
            (tail,) = self._objects.get_ranges_now(path, [(start, size)])
        return decode_footer(tail, path, segment.footer_checksum)

    def footers(self, segments: Iterable[SegmentRef]) -> Iterator[tuple[SegmentRef, Footer]]:
        """The segments in their order, each with its footer; from a remote store several are fetched at a time."""
        if self._objects.file("") is not None:
            for segment in segments:
                yield segment, self.footer(segment)
            return
        waiting: deque[tuple[SegmentRef, Future[Footer]]] = deque()
        with ThreadPoolExecutor(FOOTERS_AT_ONCE, thread_name_prefix="millstream-footers") as threads:
            try:
                for segment in segments:
                    waiting.append((segment, threads.submit(self.footer, segment)))
                    if len(waiting) > FOOTERS_AT_ONCE:
                        first, future = waiting.popleft()
                        yield first, future.result()
                for first, future in waiting:
                    yield first, future.result()
            finally:
                for _, future in waiting:
                    future.cancel()

    def row_group(
        self, segment: SegmentRef, metadata: parquet.FileMetaData, group: int, columns: list[str]
    ) -> arrow.Table:
        """Some columns of one row group."""
        with self._opened(segment, metadata, [group], columns) as file:
            return _decode(file, [group], columns, segment.path)

    def row_groups(
        self, segment: SegmentRef, metadata: parquet.FileMetaData, groups: Sequence[int], columns: list[str]
    ) -> Iterator[tuple[int, arrow.Table]]:
        """Some columns of some row groups, each by itself, in the order of `groups`."""
        for batch, file in self._batches(segment, metadata, groups, columns):
            for group in batch:
                yield group, _decode(file, [group], columns, segment.path)

    def tables(
        self, segment: SegmentRef, metadata: parquet.FileMetaData, groups: Sequence[int], columns: list[str]
    ) -> Iterator[tuple[list[int], arrow.Table]]:
        """The same, with as many row groups in a table as have `BATCH_BYTES` together; each with their numbers."""
        for batch, file in self._batches(segment, metadata, groups, columns):
            yield batch, _decode(file, batch, columns, segment.path)

    def _batches(
        self, segment: SegmentRef, metadata: parquet.FileMetaData, groups: Sequence[int], columns: list[str]
    ) -> Iterator[tuple[list[int], parquet.ParquetFile]]:
        """Batches of row groups, each with a file to read it from.

        From a remote store the next batch is fetched while one is decoded, so memory holds two of them.
        """
        batches = _batches_of(metadata, groups, columns)
        if self._objects.file("") is not None:
            # Opened once for all batches: it costs as much as decoding a good part of one.
            with self._opened(segment, metadata, groups, columns) as file:
                for batch in batches:
                    yield batch, file
            return
        with ThreadPoolExecutor(1, thread_name_prefix="millstream-fetch") as thread:
            ahead: Future[FetchedFile] | None = None
            for number, batch in enumerate(batches):
                fetched = ahead.result() if ahead is not None else self._fetch(segment, metadata, batch, columns)
                if number + 1 < len(batches):
                    ahead = thread.submit(self._fetch, segment, metadata, batches[number + 1], columns)
                with _parquet_file(arrow.PythonFile(fetched, mode="r"), metadata, segment.path) as file:
                    yield batch, file

    @contextmanager
    def _opened(
        self, segment: SegmentRef, metadata: parquet.FileMetaData, groups: Sequence[int], columns: list[str]
    ) -> Iterator[parquet.ParquetFile]:
        path = self._objects.file(segment.path)
        if path is not None:
            source = _open_file(path, segment.path)
        else:
            source = arrow.PythonFile(self._fetch(segment, metadata, groups, columns), mode="r")
        with source, _parquet_file(source, metadata, segment.path) as file:
            yield file

    def _fetch(
        self, segment: SegmentRef, metadata: parquet.FileMetaData, groups: Sequence[int], columns: list[str]
    ) -> FetchedFile:
        ranges = _ranges_of(metadata, groups, columns)
        found = self._objects.get_ranges_now(segment.path, ranges)
        return FetchedFile([FetchedRange(start, data) for (start, _), data in zip(ranges, found, strict=True)])


def decode_columns(
    metadata: parquet.FileMetaData, group: int, fetched: FetchedRange, path: str, columns: list[str]
) -> arrow.Table:
    """Some columns of a row group from bytes that are at hand already: those at `row_group_range`."""
    source = arrow.PythonFile(FetchedFile([fetched]), mode="r")
    with source, _parquet_file(source, metadata, path) as file:
        return _decode(file, [group], columns, path)


def _open_file(file: Path, path: str) -> arrow.NativeFile:
    # Not mapped into memory: that is no faster, and a file that is cut short while it is mapped ends the process.
    with _file_errors(path):
        return arrow.OSFile(str(file))


@contextmanager
def _file_errors(path: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise NotFound(f"the object {path} is not in the store", code="object_not_found") from None
    except OSError as error:
        raise Unavailable(f"segment {path} cannot be read: {error}", code="object_store_unavailable") from None


def _parquet_file(source: arrow.NativeFile, metadata: parquet.FileMetaData, path: str) -> parquet.ParquetFile:
    try:
        return parquet.ParquetFile(source, metadata=metadata, page_checksum_verification=True, pre_buffer=False)
    except (arrow.ArrowException, OSError) as error:
        raise Corrupt(f"segment {path} cannot be read: {error}") from None


def _decode(file: parquet.ParquetFile, groups: list[int], columns: list[str], path: str) -> arrow.Table:
    try:
        return file.read_row_groups(groups, columns=columns, use_threads=False)
    except (arrow.ArrowException, OSError) as error:
        numbers = ", ".join(map(str, groups))
        raise Corrupt(f"row group {numbers} of segment {path} cannot be read: {error}") from None


def _batches_of(metadata: parquet.FileMetaData, groups: Sequence[int], columns: list[str]) -> list[list[int]]:
    """The row groups in runs of about `BATCH_BYTES`, as they lie in memory."""
    indexes = _indexes(columns)
    batches: list[list[int]] = []
    size = BATCH_BYTES
    for group in groups:
        row_group = metadata.row_group(group)
        length = sum(row_group.column(index).total_uncompressed_size for index in indexes)
        if size + length > BATCH_BYTES:
            batches.append([])
            size = 0
        batches[-1].append(group)
        size += length
    return batches


def _ranges_of(metadata: parquet.FileMetaData, groups: Sequence[int], columns: list[str]) -> list[tuple[int, int]]:
    """Where the wanted columns lie, with small holes closed."""
    indexes = _indexes(columns)
    chunks = []
    for group in groups:
        row_group = metadata.row_group(group)
        for index in indexes:
            column = row_group.column(index)
            start = chunk_start(column)
            chunks.append((start, start + column.total_compressed_size))
    merged: list[tuple[int, int]] = []
    for start, end in sorted(chunks):
        if merged and start - merged[-1][1] <= GAP_BYTES:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def _indexes(columns: list[str]) -> list[int]:
    return [SCHEMA.get_field_index(name) for name in columns]
