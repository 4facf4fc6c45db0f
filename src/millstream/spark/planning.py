"""Planning a read, on the driver: which row groups of which segments hold what is wanted, and where the feed begins.

One answer of the server fixes two positions: what lies before the first comes from the segments it lists, what lies
between the two from the feed. Nothing that is written, flushed, compacted or deleted later changes what a planned
read returns, except that the feed no longer has messages of streams that were deleted since.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Final

from millstream.spark.cold_reader import ColdReader, store_settings
from millstream.spark.filters import Selection, Span
from millstream.spark.options import Bound, ReadOptions
from millstream.spark.pieces import NOTHING_ALIVE, FeedPiece, Partition, SegmentPiece
from millstream.spark.source_client import ColdListing, ShardListing, SourceClient
from millstream.streams.records import SegmentRef
from millstream.tiers.segments import Footer, row_group_start

# The feed is cut at this many positions, so that a long one has several readers.
FEED_POSITIONS: Final = 250_000
# A feed this short is not worth a task of its own.
FEW_POSITIONS: Final = 10_000
PIECES_PER_PARTITION: Final = 8


def selection_of(options: ReadOptions) -> Selection:
    """What the options ask for, before any filter."""
    return Selection(
        streams=frozenset({options.stream}) if options.stream is not None else None,
        prefixes=(options.prefix,) if options.prefix else (),
    )


def positioned(selection: Selection, span: Span) -> Selection:
    return replace(selection, position=selection.position.intersection(span))


def within(selection: Selection, shard: ShardListing, starting: Bound | None, ending: Bound | None) -> Selection:
    """The same between two bounds: positions from the first on, up to and without the second."""
    position, at_ms = selection.position.intersection(Span(0, shard.latest)), selection.at_ms
    for bound, is_start in ((starting, True), (ending, False)):
        if bound is None:
            continue
        if bound.kind == "positions":
            value = bound.positions.get(shard.shard, 0 if is_start else shard.latest + 1)
            position = position.intersection(Span(low=value) if is_start else Span(high=value - 1))
        elif bound.kind == "time":
            at_ms = at_ms.intersection(Span(low=bound.at_ms) if is_start else Span(high=bound.at_ms - 1))
        elif (bound.kind == "latest") == is_start:
            position = Span(0, -1)  # from the end on, or up to the beginning: nothing
    return replace(selection, position=position, at_ms=at_ms)


def plan(
    options: ReadOptions, client: SourceClient, cold: ColdListing, selection: Selection, shard: ShardListing
) -> list[Partition]:
    """The partitions of a shard's part of the read. The selection has the positions it is bounded by."""
    settings = store_settings(cold.store, options.cold)
    if selection.position.low > selection.position.high:
        return []
    pieces: list[SegmentPiece] = []
    flushed = shard.flushed
    if settings is None:
        flushed = shard.earliest  # a store in the server's memory: everything comes through the feed
    else:
        pieces = segment_pieces(ColdReader(settings), client, options.bucket, shard.refs(), selection, options)
    partitions = [Partition(settings, selection, segments=one) for one in _grouped(pieces, options.partition_bytes)]
    start = max(flushed + 1, selection.position.low)
    end = min(shard.latest, selection.position.high) + 1
    if partitions and 0 < end - start <= FEW_POSITIONS:
        partitions[-1].feed.append(FeedPiece(shard.shard, start, end))
        return partitions
    for at in range(start, end, FEED_POSITIONS):
        partitions.append(
            Partition(settings, selection, feed=[FeedPiece(shard.shard, at, min(at + FEED_POSITIONS, end))])
        )
    return partitions


def segment_pieces(
    reader: ColdReader,
    client: SourceClient,
    bucket: str,
    segments: Iterable[SegmentRef],
    selection: Selection,
    options: ReadOptions,
) -> list[SegmentPiece]:
    """The row groups that may hold rows of the selection, each piece with the rows in it that are dead."""
    chosen = [segment for segment in segments if selection.has_segment(segment)]
    found: list[tuple[SegmentRef, Footer, list[int], set[int]]] = []
    for segment, footer in reader.footers(chosen):
        own = footer.of(bucket)
        ours = {one.row_group for one in own.extents}
        groups = [group for group in selection.groups(segment, own) if group in ours]
        if groups:
            is_chosen = set(groups)
            incarnations = {one.incarnation for one in own.extents if one.row_group in is_chosen}
            found.append((segment, own, groups, incarnations))
    asked = sorted(set().union(*(incarnations for _, _, _, incarnations in found)))
    alive = client.alive(bucket, asked)
    pieces = []
    for segment, footer, groups, incarnations in found:
        earliest = {one: alive.get(one, NOTHING_ALIVE) for one in incarnations if alive.get(one, NOTHING_ALIVE)}
        for run in _runs(segment, footer, groups, max(options.partition_bytes // PIECES_PER_PARTITION, 1)):
            pieces.append(SegmentPiece(segment, tuple(run.groups), earliest, run.stored_bytes))
    return pieces


@dataclass
class _Run:
    groups: list[int] = field(default_factory=list)
    stored_bytes: int = 0


def _runs(segment: SegmentRef, footer: Footer, groups: list[int], bytes_max: int) -> list[_Run]:
    """Row groups of one segment in runs that each fit a partition."""
    # Row groups lie one behind the other, and the first column of each says where it begins.
    starts = [row_group_start(footer.metadata, group) for group in range(footer.metadata.num_row_groups)]
    starts.append(segment.size - segment.footer_bytes)
    runs: list[_Run] = []
    for group in groups:
        length = starts[group + 1] - starts[group]
        if not runs or runs[-1].stored_bytes + length > bytes_max:
            runs.append(_Run())
        runs[-1].groups.append(group)
        runs[-1].stored_bytes += length
    return runs


def _grouped(pieces: list[SegmentPiece], bytes_max: int) -> list[list[SegmentPiece]]:
    """Pieces gathered into partitions of about one size, so that no task is done long after the others."""
    total = sum(piece.stored_bytes for piece in pieces)
    count = max(-(-total // bytes_max), 1)
    partitions: list[list[SegmentPiece]] = [[] for _ in range(count)]
    size = 0
    for piece in pieces:
        # Where the middle of the piece lies in all there is, says which partition's it is.
        middle = size + piece.stored_bytes // 2
        partitions[min(middle * count // max(total, 1), count - 1)].append(piece)
        size += piece.stored_bytes
    return [_joined(partition) for partition in partitions if partition]


def _joined(pieces: list[SegmentPiece]) -> list[SegmentPiece]:
    """The same pieces, those of one segment as one."""
    joined: list[SegmentPiece] = []
    for piece in pieces:
        if joined and joined[-1].segment == piece.segment:
            last = joined[-1]
            size = last.stored_bytes + piece.stored_bytes
            joined[-1] = replace(last, groups=last.groups + piece.groups, stored_bytes=size)
        else:
            joined.append(piece)
    return joined
