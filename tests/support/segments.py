"""Segments made by hand: runs of messages, as they come from the log in any order, encoded without a server."""

from __future__ import annotations

import zlib
from typing import NamedTuple

from millstream.protocol.keys import StreamKey
from millstream.streams.records import SegmentRef
from millstream.streams.state import Stream
from millstream.tiers.hot import HotTier, Unflushed
from millstream.tiers.segment_encoder import EncodedSegment, Owners, encode_segments
from millstream.units import Incarnation, Milliseconds, Offset, Position

START_MS = 1_700_000_000_000


class Run(NamedTuple):
    """Consecutive messages of one incarnation."""

    stream: str
    incarnation: int
    start: int
    messages: list[bytes]
    positions: list[int]
    times: list[int]

    @property
    def content_type(self) -> str:
        return f"text/{self.incarnation}"

    @property
    def ends(self) -> list[int]:
        ends, offset = [], self.start
        for message in self.messages:
            offset += len(message)
            ends.append(offset)
        return ends


def run_of(stream: str, incarnation: int, start: int, messages: list[bytes], position: int = 1) -> Run:
    """One whose messages follow each other in the log, a millisecond apart."""
    positions = list(range(position, position + len(messages)))
    return Run(stream, incarnation, start, messages, positions, [START_MS + one for one in positions])


def unflushed_of(runs: list[Run]) -> Unflushed:
    """The messages of all runs in the order of the log."""
    rows = sorted(
        (position, time, run.incarnation, end - len(message), message)
        for run in runs
        for position, time, end, message in zip(run.positions, run.times, run.ends, run.messages, strict=True)
    )
    hot = HotTier()
    owners = {run.incarnation: _stream_of("any", run) for run in runs}
    for position, time, incarnation, start, message in rows:
        hot.publish(owners[incarnation], Offset(start), Position(position - 1), Milliseconds(time), [message])
    return hot.unflushed


def streams_of(runs: list[tuple[str, Run]]) -> list[Stream]:
    """The streams of runs that come with their buckets."""
    return [
        _stream_of(bucket, run) for bucket, run in {run.incarnation: (bucket, run) for bucket, run in runs}.values()
    ]


def _stream_of(bucket: str, run: Run) -> Stream:
    return Stream.created(
        Incarnation(run.incarnation), StreamKey(bucket, run.stream), run.content_type, Milliseconds(START_MS)
    )


def encode_segment(bucket: str, shard: int, runs: list[Run]) -> EncodedSegment:
    """The runs of one bucket and day as one segment."""
    owners = Owners(streams_of([(bucket, run) for run in runs]), [])
    (encoded,) = encode_segments(unflushed_of(runs), Position(0), Position(1 << 62), owners, shard)
    return encoded


def segment_ref(path: str, encoded: EncodedSegment, bucket: str = "b") -> SegmentRef:
    """What the catalog would say of an encoded segment."""
    info = encoded.info
    return SegmentRef(
        path,
        bucket,
        len(encoded.data),
        zlib.crc32(encoded.data),
        info.rows,
        info.payload_bytes,
        info.first_position,
        info.last_position,
        info.first_at_ms,
        info.last_at_ms,
        encoded.footer_bytes,
        encoded.footer_checksum,
    )
