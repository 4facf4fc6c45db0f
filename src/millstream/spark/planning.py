"""Planning a read, on the driver: which row groups of which segments hold what is wanted, and where the feed begins.

One answer of the server fixes two positions: what lies before the first comes from the segments it lists, what lies
between the two from the feed. Nothing that is written, flushed or compacted later changes what a planned read returns.
Messages of streams that are deleted or trimmed later may be missing from it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final, NamedTuple

from millstream.spark.cold_reader import ColdReader, store_settings
from millstream.spark.filters import Selection, Span
from millstream.spark.options import Bound, ReadOptions
from millstream.spark.pieces import NOTHING_ALIVE, FeedPiece, Partition, SegmentPiece
from millstream.spark.relocation import pack
from millstream.spark.source_client import ColdListing, ShardListing, SourceClient
from millstream.streams.records import SegmentRef
from millstream.tiers.segments import Extent, Footer

# The feed is cut at this many positions, so that a long one has several readers.
FEED_POSITIONS: Final = 250_000
# A feed this short is not worth a task of its own.
FEW_POSITIONS: Final = 10_000
PIECES_PER_PARTITION: Final = 8
# What a row takes besides its payload, when partitions are sized.
ROW_BYTES: Final = 64


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
    partitions_min = -(-options.partitions_min // len(cold.shards))
    pieces: list[SegmentPiece] = []
    flushed = shard.flushed
    if settings is None:
        flushed = shard.earliest  # a store in the server's memory: everything comes through the feed
    else:
        pieces = segment_pieces(ColdReader(settings), client, shard, selection, options, partitions_min)
    grouped = _grouped(pieces, options.partition_bytes, partitions_min)
    partitions = [Partition(settings, selection, segments=one) for one in grouped]
    start = max(flushed + 1, selection.position.low)
    end = min(shard.latest, selection.position.high) + 1
    if partitions and 0 < end - start <= FEW_POSITIONS:
        partitions[-1].feed.append(FeedPiece(shard.shard, start, end))
        return partitions
    step = max(min(FEED_POSITIONS, -(-(end - start) // partitions_min)), 1)
    for at in range(start, end, step):
        feed = [FeedPiece(shard.shard, at, min(at + step, end))]
        partitions.append(Partition(settings, selection, feed=feed))
    return partitions


def segment_pieces(
    reader: ColdReader,
    client: SourceClient,
    shard: ShardListing,
    selection: Selection,
    options: ReadOptions,
    partitions_min: int = 1,
) -> list[SegmentPiece]:
    """The row groups that may hold rows of the selection, each piece with the rows in it that are dead."""
    segments = [segment for segment in shard.refs() if selection.has_segment(segment)]
    found = [_chosen(segment, footer.of(options.bucket), selection) for segment, footer in reader.footers(segments)]
    asked = sorted(set().union(*(one.incarnations for one in found)))
    alive = client.alive(options.bucket, asked)
    total = sum(sum(one.sizes.values()) for one in found)
    bytes_max = max(min(options.partition_bytes, total // partitions_min) // PIECES_PER_PARTITION, 1)
    pieces = []
    for one in found:
        earliest = {key: alive.get(key, NOTHING_ALIVE) for key in one.incarnations if alive.get(key, NOTHING_ALIVE)}
        for groups in _runs(one.sizes, bytes_max):
            ranges = pack((extent for group in groups for extent in one.extents.get(group, ())), earliest)
            size = sum(one.sizes[group] for group in groups)
            pieces.append(SegmentPiece(shard.shard, one.segment, tuple(groups), earliest, size, (ranges,)))
    return pieces


class _Chosen(NamedTuple):
    """What of a segment is to be read: row groups with their sizes, and the extents in them that are selected."""

    segment: SegmentRef
    sizes: dict[int, int]
    extents: dict[int, list[Extent]]
    incarnations: set[int]


def _chosen(segment: SegmentRef, footer: Footer, selection: Selection) -> _Chosen:
    """`footer` has the bucket's extents only."""
    groups = set(selection.groups(segment, footer))
    sizes: dict[int, int] = {}
    extents: dict[int, list[Extent]] = {}
    incarnations: set[int] = set()
    for extent in footer.extents:
        if extent.row_group in groups:
            length = extent.offset_end - extent.offset_start + ROW_BYTES * extent.rows
            sizes[extent.row_group] = sizes.get(extent.row_group, 0) + length
            incarnations.add(extent.incarnation)
            if selection.has_extent(extent):
                extents.setdefault(extent.row_group, []).append(extent)
    return _Chosen(segment, sizes, extents, incarnations)


def _runs(sizes: dict[int, int], bytes_max: int) -> list[list[int]]:
    """Row groups of one segment in runs that each fit a partition several times."""
    runs: list[list[int]] = []
    size = 0
    for group, length in sizes.items():
        if not runs or size + length > bytes_max:
            runs.append([])
            size = 0
        runs[-1].append(group)
        size += length
    return runs


def _grouped(pieces: list[SegmentPiece], bytes_max: int, partitions_min: int) -> list[list[SegmentPiece]]:
    """Pieces gathered into partitions of about one size, so that no task is done long after the others."""
    total = sum(piece.payload_bytes for piece in pieces)
    count = max(-(-total // bytes_max), partitions_min)
    partitions: list[list[SegmentPiece]] = [[] for _ in range(count)]
    size = 0
    for piece in pieces:
        # Where the middle of the piece lies in all there is, says which partition's it is.
        middle = size + piece.payload_bytes // 2
        partitions[min(middle * count // max(total, 1), count - 1)].append(piece)
        size += piece.payload_bytes
    return [_joined(partition) for partition in partitions if partition]


def _joined(pieces: list[SegmentPiece]) -> list[SegmentPiece]:
    """The same pieces, those of one segment as one."""
    joined: list[SegmentPiece] = []
    for piece in pieces:
        if joined and joined[-1].segment == piece.segment:
            last = joined[-1]
            joined[-1] = replace(
                last,
                groups=last.groups + piece.groups,
                payload_bytes=last.payload_bytes + piece.payload_bytes,
                ranges=last.ranges + piece.ranges,
            )
        else:
            joined.append(piece)
    return joined
