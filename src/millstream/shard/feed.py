"""The feed: everything that happens in a bucket, in commit order, from memory and from cold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from millstream.errors import OffsetTrimmed
from millstream.shard.committer import Committer
from millstream.streams.machine import StateMachine
from millstream.streams.records import SegmentRef
from millstream.tiers.cache import ByteLimitedCache
from millstream.tiers.catalog import Catalog, FlushRow
from millstream.tiers.cold import ColdTier
from millstream.tiers.hot import HotTier
from millstream.tiers.journal import Entry, Journals
from millstream.tiers.manifests import decode_notes

# However little of a journal a prefix matches, one call looks at no more than this.
ENTRIES_SCANNED_MAX: Final = 50_000
ITEM_OVERHEAD_BYTES: Final = 64
COLD_CACHE_BYTES: Final = 64 << 20


class FeedItem(NamedTuple):
    """A message, or an event in a stream's life (then without payload)."""

    position: int
    event: str
    stream: str
    offset: int
    next_offset: int
    at_ms: int
    content_type: str
    payload: bytes | None


class FeedPage(NamedTuple):
    """`position` is where the next page starts from; everything up to it has been seen."""

    items: list[FeedItem]
    position: int
    up_to_date: bool


class Feed:
    def __init__(
        self,
        machine: StateMachine,
        hot: HotTier,
        journals: Journals,
        committer: Committer,
        catalog: Catalog,
        cold: ColdTier,
    ) -> None:
        self._machine = machine
        self._hot = hot
        self._journals = journals
        self._committer = committer
        self._catalog = catalog
        self._cold = cold
        # What flushes hold, with the incarnation each message belongs to (0 for what is no message).
        self._flushes: ByteLimitedCache[list[tuple[int, FeedItem]]] = ByteLimitedCache(COLD_CACHE_BYTES)

    @property
    def latest(self) -> int:
        """The last position that is visible."""
        return self._committer.applied_position - 1

    @property
    def earliest(self) -> int:
        """The position to start after, to see everything that is kept."""
        first = self._catalog.flush_after(-1)
        return (first[1].first_position if first is not None else self._journals.start) - 1

    def is_hot(self, after: int) -> bool:
        return after + 1 >= self._journals.start

    def read(self, bucket: str, after: int, prefix: str, bytes_max: int) -> FeedPage:
        """What happened in the bucket after a position, about `bytes_max` of it; only where `is_hot`."""
        latest = self.latest
        items: list[FeedItem] = []
        size = scanned = 0
        for entry in self._journals.of(bucket).entries(after):
            if scanned == ENTRIES_SCANNED_MAX:
                return FeedPage(items, max(after, entry.position - 1), False)
            scanned += 1
            for item in self._items(entry, prefix):
                if item.position <= after:
                    continue
                if size >= bytes_max:
                    return FeedPage(items, items[-1].position, False)
                items.append(item)
                size += len(item.payload or b"") + ITEM_OVERHEAD_BYTES
        return FeedPage(items, max(after, latest), True)

    def _items(self, entry: Entry, prefix: str) -> Iterator[FeedItem]:
        stream = self._machine.by_incarnation(entry.incarnation)
        name = stream.key.stream if stream is not None else entry.notes[0].stream if entry.notes else None
        if name is None or not name.startswith(prefix):
            return
        items = [
            FeedItem(
                entry.position + note.after,
                note.event,
                name,
                note.offset,
                note.offset,
                note.at_ms,
                note.content_type,
                None,
            )
            for note in entry.notes
        ]
        tail = self._hot.tails.get(entry.incarnation)
        if tail is not None and stream is not None:
            items += [
                FeedItem(
                    tail.positions[index],
                    "message",
                    name,
                    tail.message_start(index),
                    tail.ends[index],
                    tail.times[index],
                    stream.content_type,
                    tail.messages[index],
                )
                for index in tail.written_by(entry.position)
            ]
        yield from sorted(items)

    # -- cold ------------------------------------------------------------------------------------------------

    async def read_cold(self, bucket: str, after: int, prefix: str, bytes_max: int) -> FeedPage:
        """The same from anywhere: one flush after the other, then memory."""
        items: list[FeedItem] = []
        size = 0
        while not self.is_hot(after):
            found = self._catalog.flush_after(after)
            if found is None or after < self.earliest:
                raise OffsetTrimmed(
                    "what happened after this token is no longer kept",
                    earliest=self.earliest,
                    hint="start again without a token",
                )
            through, flush = found
            for incarnation, item in await self._flush_items(bucket, through, flush):
                if item.position <= after or not item.stream.startswith(prefix):
                    continue
                if incarnation and not self._is_alive(incarnation, item):
                    continue
                if size >= bytes_max:
                    return FeedPage(items, items[-1].position, False)
                items.append(item)
                size += len(item.payload or b"") + ITEM_OVERHEAD_BYTES
            after = through - 1
        if size >= bytes_max:
            return FeedPage(items, after, False)
        page = self.read(bucket, after, prefix, bytes_max - size)
        return FeedPage(items + page.items, page.position, page.up_to_date)

    def _is_alive(self, incarnation: int, item: FeedItem) -> bool:
        """Whether a cold message still counts: its stream exists, and has not been trimmed beyond it."""
        stream = self._machine.by_incarnation(incarnation)
        return stream is not None and (stream.forks > 0 or item.next_offset > stream.earliest)

    async def _flush_items(self, bucket: str, through: int, flush: FlushRow) -> list[tuple[int, FeedItem]]:
        """What one flush holds of a bucket, in order of position."""
        cached = self._flushes.get((bucket, through))
        if cached is not None:
            return cached
        items: list[tuple[int, FeedItem]] = []
        for number in flush.segments:
            segment = self._catalog.segment(number)
            if segment is not None and segment.bucket == bucket:
                items += await self._segment_items(number, segment)
        if flush.notes:
            for note in decode_notes(await self._cold.objects.get(flush.notes), flush.notes):
                if note.bucket == bucket:
                    event, offset = note.event, note.offset
                    item = FeedItem(
                        note.position, event, note.stream, offset, offset, note.at_ms, note.content_type, None
                    )
                    items.append((0, item))
        items.sort(key=lambda pair: pair[1].position)
        size = sum(len(item.payload or b"") + 200 for _, item in items)
        self._flushes.put((bucket, through), items, size)
        return items

    async def _segment_items(self, number: int, segment: SegmentRef) -> list[tuple[int, FeedItem]]:
        """The messages of a segment whose streams still exist."""
        items: list[tuple[int, FeedItem]] = []
        for extent in (await self._cold.footer(segment)).extents:
            stream = self._machine.by_incarnation(extent.incarnation)
            if stream is None:
                continue
            group = await self._cold.row_group(number, extent.row_group, with_order=True)
            start, stop = extent.row_start, extent.row_start + extent.rows
            offset = extent.offset_start
            for row, payload in zip(range(start, stop), group.messages(start, stop), strict=True):
                item = FeedItem(
                    group.positions[row],
                    "message",
                    extent.stream,
                    offset,
                    group.ends[row],
                    group.times[row],
                    stream.content_type,
                    payload,
                )
                items.append((extent.incarnation, item))
                offset = group.ends[row]
        return items
