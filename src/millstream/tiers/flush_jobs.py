"""The two jobs of a flush that go through every message and every stream: making segments, and writing the catalog.

They are functions of what they are given, so it does not matter where they run: `LocalJobs` runs them on the thread
that calls, `flush_process.py` in a process of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple, Protocol

from millstream.streams.state import Stream
from millstream.tiers.catalog import Catalog
from millstream.tiers.catalog_rows import Checkpoint, encode_stream, thaw_streams
from millstream.tiers.hot import Unflushed
from millstream.tiers.manifests import encode_rows
from millstream.tiers.segment_encoder import EncodedSegment, Owners, encode_segments

_ARRAY: Final = b"\xdd"  # an array whose length follows in four bytes


class FlushInput(NamedTuple):
    """What is to become cold: the streams that changed, and all messages between two positions."""

    shard: int
    first_position: int
    position: int
    streams: list[bytes]  # as `freeze_stream` wrote each
    messages: Unflushed


class Rows(NamedTuple):
    """What manifest and catalog are to say of the streams that changed."""

    streams: bytes  # as `encode_rows` wrote them
    trimmed: list[tuple[int, int]]  # incarnation, earliest offset; nobody reads what lies before


Segments = Iterator[EncodedSegment]


class FlushJobs(Protocol):
    def begin(self, flush: FlushInput) -> tuple[Rows, Segments]:
        """The rows at once, the segments one by one as they are asked for."""

    def write(self, checkpoint: Checkpoint) -> None:
        """Move the catalog to a checkpoint, all or nothing; if this fails, the catalog itself tells which."""


class LocalJobs:
    """For small flushes: they are done before a process of their own would have been told about them."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    def begin(self, flush: FlushInput) -> tuple[Rows, Segments]:
        streams = thaw_streams(b"".join(frozen_array(flush.streams)))
        rows = rows_of(streams)
        return rows, _segments_of(flush, streams, rows)

    def write(self, checkpoint: Checkpoint) -> None:
        self._catalog.write(checkpoint)


def frozen_array(streams: Sequence[bytes]) -> list[bytes]:
    """Frozen streams as the pieces of what `thaw_streams` reads."""
    return [_ARRAY + len(streams).to_bytes(4, "big"), *streams]


def rows_of(streams: Sequence[Stream]) -> Rows:
    trimmed = [(one.incarnation, one.earliest) for one in streams if one.earliest and not one.forks]
    return Rows(encode_rows([encode_stream(stream) for stream in streams]), trimmed)


def _segments_of(flush: FlushInput, streams: Sequence[Stream], rows: Rows) -> Segments:
    if flush.messages:
        owners = Owners(streams, rows.trimmed)
        yield from encode_segments(flush.messages, flush.first_position, flush.position, owners, flush.shard)
