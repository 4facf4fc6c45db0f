"""The two jobs of a flush that go through every message and every stream: making segments, and writing the catalog.

They are functions of what they are given and of the catalog so far, so it does not matter where they run: `LocalJobs`
runs them on the thread that calls, `flush_process.py` in a process of its own.

Of most streams that changed, nothing did but that messages were added. For these the messages say what the catalog must
say next, and whoever asks for the flush says nothing more: with very many streams that would be the most of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple, Protocol

from millstream.errors import Corrupt
from millstream.streams.state import Stream
from millstream.tiers.catalog import Catalog
from millstream.tiers.catalog_rows import Checkpoint
from millstream.tiers.columns import integers, last_rows, numbers
from millstream.tiers.hot import Unflushed
from millstream.tiers.manifests import encode_manifest_streams
from millstream.tiers.segment_encoder import EncodedSegment, Owners, encode_segments
from millstream.tiers.stream_rows import decode_captured, encode_stream
from millstream.units import Incarnation, Milliseconds, Offset, Position

_ARRAY: Final = b"\xdd"  # an array whose length follows in four bytes


class FlushInput(NamedTuple):
    """What is to become cold: the streams that changed, but for those that only grew; the incarnations that were
    removed; and all messages between two positions."""

    shard: int
    first_position: Position
    position: Position
    streams: list[bytes]  # as `encode_captured` wrote each
    removed: list[Incarnation]
    messages: Unflushed  # since the catalog's position, which may lie before the first


class Growth(NamedTuple):
    """What messages say of their streams, as columns: where each ends now, and when it was last written to."""

    incarnations: memoryview[Incarnation]
    tails: memoryview[Offset]
    times: memoryview[Milliseconds]


class Rows(NamedTuple):
    """What manifest and catalog are to say of the streams that changed."""

    streams: bytes  # as `encode_manifest_streams` wrote them
    trimmed: list[tuple[Incarnation, Offset]]  # incarnation, earliest offset; nobody reads what lies before


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
        captured = decode_captured(b"".join(captured_array(flush.streams)))
        streams = changed_streams(self._catalog, captured, flush.removed, growth_of(flush.messages))
        rows = rows_of(streams)
        return rows, _segments_of(flush, streams, rows)

    def write(self, checkpoint: Checkpoint) -> None:
        self._catalog.write(checkpoint)


def captured_array(streams: Sequence[bytes]) -> list[bytes]:
    """Captured streams as the pieces of what `decode_captured` reads."""
    return [_ARRAY + len(streams).to_bytes(4, "big"), *streams]


def growth_of(messages: Unflushed) -> Growth:
    if not messages:
        nothing: memoryview[Any] = memoryview(b"").cast("q")
        return Growth(nothing, nothing, nothing)
    incarnations = integers(messages.incarnations)
    rows = last_rows(incarnations)
    columns = incarnations, integers(messages.ends), integers(messages.times)
    return Growth(*(numbers(column.take(rows)) for column in columns))


def changed_streams(
    catalog: Catalog, captured: Sequence[Stream], removed: Sequence[Incarnation], growth: Growth
) -> list[Stream]:
    """All that changed: those that were captured, and those that only grew, of which the catalog has the rest."""
    streams = list(captured)
    known = {stream.incarnation for stream in captured}
    known.update(removed)
    grown = [one for one in zip(*growth, strict=True) if one[0] not in known]
    loaded = catalog.load_all(incarnation for incarnation, _, _ in grown)
    for (incarnation, tail, at_ms), stream in zip(grown, loaded, strict=True):
        if stream is None:
            raise Corrupt(f"incarnation {incarnation} has messages, but the catalog does not have it")
        stream.tail, stream.last_write_at_ms, stream.last_access_ms = tail, at_ms, at_ms
        streams.append(stream)
    return streams


def rows_of(streams: Sequence[Stream]) -> Rows:
    trimmed = [(one.incarnation, one.earliest) for one in streams if one.earliest and not one.forks]
    return Rows(encode_manifest_streams([encode_stream(stream) for stream in streams]), trimmed)


def _segments_of(flush: FlushInput, streams: Sequence[Stream], rows: Rows) -> Segments:
    if flush.messages:
        owners = Owners(streams, rows.trimmed)
        yield from encode_segments(flush.messages, flush.first_position, flush.position, owners, flush.shard)
