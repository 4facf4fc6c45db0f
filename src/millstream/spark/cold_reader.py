"""Reads cold segments from the object store: footers, and of row groups the columns that are wanted.

Files in a folder are mapped into memory; from any other store the byte ranges of the wanted columns are fetched, one
bunch of row groups ahead of the one that is being decoded. Memory holds two bunches at a time, whatever a segment's
size. Knows nothing of Spark.
"""

from __future__ import annotations

import io
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, NamedTuple

import obstore
import pyarrow as arrow
import pyarrow.parquet as parquet
from obstore import exceptions

from millstream.spark.errors import SourceError
from millstream.spark.options import ColdRoot
from millstream.spark.server import Store
from millstream.streams.records import SegmentRef
from millstream.tiers.objects import ObjectStoreSettings, open_store
from millstream.tiers.segments import SCHEMA, Footer, chunk_start, decode_footer

BUNCH_BYTES: Final = 2 << 20  # small enough to stay in the processor's cache until it is sent on
GAP_BYTES: Final = 256 << 10  # a hole smaller than this is fetched with what surrounds it
FOOTERS_AT_ONCE: Final = 16


def settings_of(store: Store, root: ColdRoot) -> ObjectStoreSettings | None:
    """Where the object store is: what the option `cold` says, or else the server; None if only the server has it."""
    if root.root is not None:
        return ObjectStoreSettings(root.root.backend, root.root.path, root.root.options | root.credentials)
    if store.backend == "memory":
        return None
    return ObjectStoreSettings(store.backend, Path(store.path), store.options | root.credentials)


class _Range(NamedTuple):
    start: int
    end: int


class ColdReader:
    def __init__(self, settings: ObjectStoreSettings) -> None:
        self._settings = settings
        self._folder = settings.path if settings.backend == "fs" else None
        self._store: Any = open_store(settings) if self._folder is None else None

    def footers(self, segments: Sequence[SegmentRef]) -> Iterable[Footer]:
        """The segments' footers, in order, several fetched at a time."""
        if len(segments) <= 1 or self._folder is not None:
            return map(self.footer, segments)
        with ThreadPoolExecutor(FOOTERS_AT_ONCE, thread_name_prefix="millstream-footers") as threads:
            return list(threads.map(self.footer, segments))

    def footer(self, segment: SegmentRef) -> Footer:
        start = segment.size - segment.footer_bytes
        if self._folder is not None:
            try:
                with (self._folder / segment.path).open("rb") as file:
                    file.seek(start)
                    tail = file.read(segment.footer_bytes)
            except OSError as error:
                raise self._unreadable(segment.path, error) from None
        else:
            tail = self._fetch(segment.path, [_Range(start, segment.size)])[0]
        return decode_footer(tail, segment.path, segment.footer_checksum)

    def tables(
        self, segment: SegmentRef, footer: Footer, groups: Sequence[int], columns: list[str]
    ) -> Iterator[arrow.Table]:
        """The wanted columns of the wanted row groups, a bunch of row groups at a time."""
        bunches = _bunches(footer.metadata, groups, columns)
        if self._folder is not None:
            yield from self._mapped(segment, footer, bunches, columns)
            return
        with ThreadPoolExecutor(1, thread_name_prefix="millstream-fetch") as thread:
            ahead: Future[_Sparse] | None = None
            for number, bunch in enumerate(bunches):
                file = ahead.result() if ahead is not None else self._sparse(segment, footer, bunch, columns)
                if number + 1 < len(bunches):
                    ahead = thread.submit(self._sparse, segment, footer, bunches[number + 1], columns)
                reader = _opened(arrow.PythonFile(file, mode="r"), footer, segment.path)
                yield _decode(reader, bunch, columns, segment.path)

    def _mapped(
        self, segment: SegmentRef, footer: Footer, bunches: list[list[int]], columns: list[str]
    ) -> Iterator[arrow.Table]:
        assert self._folder is not None
        try:
            file = arrow.memory_map(str(self._folder / segment.path))
        except OSError as error:
            raise self._unreadable(segment.path, error) from None
        with file:
            # Opened once for all bunches: it costs as much as decoding a good part of one.
            reader = _opened(file, footer, segment.path)
            for bunch in bunches:
                yield _decode(reader, bunch, columns, segment.path)

    def _sparse(self, segment: SegmentRef, footer: Footer, bunch: list[int], columns: list[str]) -> _Sparse:
        ranges = _ranges(footer.metadata, bunch, columns)
        return _Sparse(ranges, self._fetch(segment.path, ranges), segment.size)

    def _fetch(self, path: str, ranges: list[_Range]) -> list[bytes]:
        try:
            found: Any = obstore.get_ranges(
                self._store, path, starts=[one.start for one in ranges], ends=[one.end for one in ranges]
            )
        except (exceptions.BaseError, OSError) as error:
            raise self._unreadable(path, error) from None
        return [bytes(one) for one in found]

    def _unreadable(self, path: str, error: Exception) -> SourceError:
        where = self._folder or f"{self._settings.backend} {self._settings.options.get('bucket', '')}"
        reason = str(error).partition("\n")[0][:300]
        if isinstance(error, FileNotFoundError | exceptions.NotFoundError):
            return SourceError(
                f"segment {path} is not in the cold tier at {where}",
                hint="if the store is mounted elsewhere on this machine, say where with the option 'cold'; if a job may"
                " take longer than the server's cold.reclaim_grace, raise that",
            )
        return SourceError(
            f"segment {path} cannot be read from the cold tier at {where}: {reason}",
            hint="check that this machine reaches the store, and its credentials: AWS_ACCESS_KEY_ID and the like in the"
            " environment, or the options cold.accessKeyId, cold.secretAccessKey",
        )


def _bunches(metadata: parquet.FileMetaData, groups: Sequence[int], columns: list[str]) -> list[list[int]]:
    """The row groups in runs of about `BUNCH_BYTES`, as they lie in memory."""
    indexes = _indexes(columns)
    bunches: list[list[int]] = []
    size = BUNCH_BYTES
    for group in groups:
        row_group = metadata.row_group(group)
        length = sum(row_group.column(index).total_uncompressed_size for index in indexes)
        if size + length > BUNCH_BYTES:
            bunches.append([])
            size = 0
        bunches[-1].append(group)
        size += length
    return bunches


def _ranges(metadata: parquet.FileMetaData, groups: list[int], columns: list[str]) -> list[_Range]:
    """Where the wanted columns lie, with small holes closed."""
    indexes = _indexes(columns)
    pieces = []
    for group in groups:
        row_group = metadata.row_group(group)
        for index in indexes:
            column = row_group.column(index)
            start = chunk_start(column)
            pieces.append(_Range(start, start + column.total_compressed_size))
    merged: list[_Range] = []
    for piece in sorted(pieces):
        if merged and piece.start - merged[-1].end <= GAP_BYTES:
            merged[-1] = _Range(merged[-1].start, max(merged[-1].end, piece.end))
        else:
            merged.append(piece)
    return merged


def _indexes(columns: list[str]) -> list[int]:
    return [SCHEMA.get_field_index(name) for name in columns]


def _opened(file: Any, footer: Footer, path: str) -> parquet.ParquetFile:
    try:
        return parquet.ParquetFile(
            file, metadata=footer.metadata, page_checksum_verification=True, pre_buffer=False, read_dictionary=[]
        )
    except (arrow.ArrowException, OSError) as error:
        raise _damaged(path, error) from None


def _decode(reader: parquet.ParquetFile, groups: list[int], columns: list[str], path: str) -> arrow.Table:
    try:
        return reader.read_row_groups(groups, columns=columns, use_threads=False)
    except (arrow.ArrowException, OSError) as error:
        raise _damaged(path, error) from None


def _damaged(path: str, error: Exception) -> SourceError:
    return SourceError(
        f"segment {path} is damaged: {error}", hint="run `millstream cold verify`, and restore the object"
    )


class _Sparse(io.RawIOBase):
    """A file of which only some ranges are at hand."""

    def __init__(self, ranges: list[_Range], pieces: list[bytes], size: int) -> None:
        self._starts = [one.start for one in ranges]
        self._pieces = pieces
        self._size = size
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
        first = self._at - self._starts[index] if index >= 0 else -1
        if first < 0 or first > len(self._pieces[index]):
            raise OSError(f"byte {self._at} was not fetched")
        piece = self._pieces[index][first : first + size if size >= 0 else None]
        self._at += len(piece)
        return piece
