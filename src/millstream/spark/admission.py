"""How far one micro-batch goes: the limits per trigger, and where a large one is split into partitions.

Segments tell how many messages and bytes lie between which positions. Where a limit falls inside segments, their
position column is read to find the exact place; in the feed, pages are counted. A limit on records is kept exactly,
one on bytes is soft: the message that crosses it is still in.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Final, NamedTuple

import numpy
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxBytes, ReadMaxRows

from millstream.spark.cold_reader import ColdReader, store_settings
from millstream.spark.options import ReadOptions
from millstream.spark.source_client import ColdListing, ShardListing, SourceClient
from millstream.streams.records import SegmentRef
from millstream.tiers.segments import Extent

INDEXES_CACHED: Final = 8
UNLIMITED: Final = 2**62
PARTITIONS_MAX: Final = 1_000


class SegmentCluster(NamedTuple):
    """Segments whose positions overlap, and none of whose positions overlap others'."""

    first: int
    last: int
    segments: list[SegmentRef]

    @property
    def rows(self) -> int:
        return sum(segment.rows for segment in self.segments)

    @property
    def payload_bytes(self) -> int:
        return sum(segment.payload_bytes for segment in self.segments)


class _Index(NamedTuple):
    """A segment's messages in order of position."""

    positions: numpy.ndarray
    sizes: numpy.ndarray


def clusters_of(segments: list[SegmentRef]) -> list[SegmentCluster]:
    clusters: list[SegmentCluster] = []
    for segment in sorted(segments, key=lambda one: one.first_position):
        if clusters and segment.first_position <= clusters[-1].last:
            open_one = clusters[-1]
            last = max(open_one.last, segment.last_position)
            clusters[-1] = SegmentCluster(open_one.first, last, [*open_one.segments, segment])
        else:
            clusters.append(SegmentCluster(segment.first_position, segment.last_position, [segment]))
    return clusters


def cuts_of(shard: ShardListing, begin: int, end: int, partition_bytes: int) -> list[int]:
    """Places inside a range at which to split it, so that no part is much larger than a partition may be."""
    cuts: list[int] = []
    size = 0
    for cluster in clusters_of(shard.refs()):
        if cluster.last < begin or cluster.first >= end:
            continue
        if size and size + cluster.payload_bytes > partition_bytes:
            cuts.append(cluster.first)
            size = 0
        size += cluster.payload_bytes
        if cluster.payload_bytes > partition_bytes:
            cuts += _evenly_spaced(cluster.first, cluster.last + 1, -(-cluster.payload_bytes // partition_bytes))
    unread = shard.unflushed_bytes
    if end > shard.flushed + 1 and unread:
        low = max(begin, shard.flushed + 1)
        if size and size + unread > partition_bytes:
            cuts.append(low)
        cuts += _evenly_spaced(low, end, -(-unread // partition_bytes))
    return sorted({cut for cut in cuts if begin < cut < end})


def name_cuts_of(extents: Iterable[Extent], partition_bytes: int) -> list[str]:
    """Names at which to split streams into ranges of about one size, so that each stream lies in one of them."""
    sizes: dict[str, int] = {}
    for extent in extents:
        sizes[extent.stream] = sizes.get(extent.stream, 0) + extent.offset_end - extent.offset_start
    total = sum(sizes.values())
    parts = min(-(-total // partition_bytes), PARTITIONS_MAX)
    cuts: list[str] = []
    done = 0
    for name, size in sorted(sizes.items()):
        if done and done >= total * (len(cuts) + 1) / parts:
            cuts.append(name)
        done += size
    return cuts


def _evenly_spaced(low: int, high: int, parts: int) -> list[int]:
    return [low + (high - low) * part // parts for part in range(1, parts)]


class Admission:
    """Applies limits; remembers the position columns it has read, since a backlog is gone through in many steps."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = options
        self._indexes: OrderedDict[str, _Index] = OrderedDict()

    def limit(
        self, client: SourceClient, cold: ColdListing, shard: ShardListing, begin: int, end: int, limit: ReadLimit
    ) -> int:
        """Where a micro-batch that begins at a position ends, at most at `end`."""
        records, size = UNLIMITED, UNLIMITED
        if isinstance(limit, ReadMaxRows):
            records = limit.max_rows
            # Spark knows one limit for a source; the other one is ours to keep.
            size = self._options.bytes_per_trigger or UNLIMITED
        elif isinstance(limit, ReadMaxBytes):
            size = limit.max_bytes
        else:
            return end
        settings = store_settings(cold.store, self._options.cold)
        at = begin
        if settings is not None:
            reader = ColdReader(settings)
            for cluster in clusters_of(shard.refs()):
                if cluster.last < begin or cluster.first >= end:
                    continue
                if records <= 0 or size <= 0:
                    return at
                is_whole = cluster.first >= begin and cluster.last < end
                if is_whole and cluster.rows <= records and cluster.payload_bytes <= size:
                    records, size = records - cluster.rows, size - cluster.payload_bytes
                    at = cluster.last + 1
                    continue
                place, records, size = self._inside(reader, cluster, begin, end, records, size)
                if place is not None:
                    return place
                at = cluster.last + 1
            at = max(at, min(shard.flushed + 1, end))
        if at >= end or (end - at <= records and shard.unflushed_bytes <= size):
            return end
        return self._counted(client, shard, at, end, records, size)

    def _inside(
        self, reader: ColdReader, cluster: SegmentCluster, begin: int, end: int, records: int, size: int
    ) -> tuple[int | None, int, int]:
        """The place inside a cluster at which a limit that is not used up is, or what is left of it behind that."""
        indexes = [self._index(reader, segment) for segment in cluster.segments]
        positions = numpy.concatenate([one.positions for one in indexes])
        sizes = numpy.concatenate([one.sizes for one in indexes])
        chosen = (positions >= begin) & (positions < end)
        order = numpy.argsort(positions[chosen], kind="stable")
        positions, sizes = positions[chosen][order], sizes[chosen][order].cumsum()
        # As many as the limit has records for, and none beyond the one that fills its bytes.
        count = min(len(positions), records, int(numpy.searchsorted(sizes, size)) + 1)
        if count and (count < len(positions) or records <= len(positions)):
            return int(positions[count - 1]) + 1, 0, 0
        used = int(sizes[-1]) if len(sizes) else 0
        if used >= size:
            return int(positions[-1]) + 1, 0, 0
        return None, records - len(positions), size - used

    def _index(self, reader: ColdReader, segment: SegmentRef) -> _Index:
        found = self._indexes.get(segment.path)
        if found is None:
            footer = reader.footer(segment)
            groups = range(footer.metadata.num_row_groups)
            columns = ["offset_end", "offset_start", "position"]
            parts = [
                (
                    table.column("position").to_numpy(),
                    table.column("offset_end").to_numpy() - table.column("offset_start").to_numpy(),
                )
                for _, table in reader.tables(segment, footer, groups, columns)
            ]
            found = _Index(
                numpy.concatenate([positions for positions, _ in parts]),
                numpy.concatenate([sizes for _, sizes in parts]),
            )
            self._indexes[segment.path] = found
            if len(self._indexes) > INDEXES_CACHED:
                self._indexes.popitem(last=False)
        self._indexes.move_to_end(segment.path)
        return found

    def _counted(self, client: SourceClient, shard: ShardListing, at: int, end: int, records: int, size: int) -> int:
        """The same in the feed, page by page."""
        after = at - 1
        while after < end - 1 and records > 0 and size > 0:
            page = client.feed(self._options.bucket, shard.shard, after, "")
            events = page.table.column("event").to_pylist()
            places = page.table.column("position").to_pylist()
            ends, starts = page.table.column("offset_end").to_pylist(), page.table.column("offset_start").to_pylist()
            for event, position, length in zip(
                events, places, (high - low for high, low in zip(ends, starts, strict=True)), strict=True
            ):
                if position >= end or records <= 0 or size <= 0:
                    return min(after + 1, end)
                after = position
                if event == "message":
                    records, size = records - 1, size - length
            if page.position <= after and not places:
                break
            if records > 0 and size > 0:
                after = max(after, page.position)
        return min(after + 1, end)
