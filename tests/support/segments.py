"""Segments made by hand: runs of messages, as they come from the log in any order, encoded without a server."""

from __future__ import annotations

from typing import NamedTuple

from millstream.protocol.keys import StreamKey
from millstream.tiers.hot import HotTier, Unflushed
from millstream.tiers.segment_encoder import Arranged, EncodedSegment, OwnerColumns, Owners, encoding, slabs

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
    for position, time, incarnation, start, message in rows:
        hot.publish(incarnation, start, position - 1, time, [message])
    return hot.unflushed


def owners_of(runs: list[tuple[str, Run]]) -> Owners:
    """The streams of runs that come with their buckets."""
    owners = Owners()
    for incarnation, (bucket, run) in {run.incarnation: (bucket, run) for bucket, run in runs}.items():
        owners.add(StreamKey(bucket, run.stream), incarnation, run.content_type)
    return owners


def encode_segment(bucket: str, shard: int, runs: list[Run]) -> EncodedSegment:
    """The runs of one bucket and day as one segment."""
    (slab,) = slabs(unflushed_of(runs), 0, 1 << 62)
    arranged = Arranged(slab, OwnerColumns(owners_of([(bucket, run) for run in runs]), []))
    (part,) = arranged.parts
    steps = encoding(arranged, part, shard)
    while True:
        try:
            step = next(steps)
        except StopIteration as finished:
            encoded: EncodedSegment = finished.value
            return encoded
        if step is not None:
            step()
