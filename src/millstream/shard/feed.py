"""The feed: everything that happens in a bucket, in commit order, from memory and from cold.

Cold, it goes from flush to flush: a flush's segments and notes, sorted by position. A compacted segment spans many
flushes and is sorted by stream; one pass over it yields the messages of a window of positions, about `WINDOW_BYTES` of
them, which serves the flushes that lie in it. So memory stays bounded, and a segment is read a few times at most.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import AsyncIterator, Iterator
from typing import Final, NamedTuple

from millstream.errors import OffsetTrimmed
from millstream.shard.committer import Committer
from millstream.streams.machine import StateMachine
from millstream.streams.records import SegmentRef
from millstream.tiers.cache import ByteLimitedCache
from millstream.tiers.catalog import Catalog, is_within
from millstream.tiers.catalog_rows import FlushRow
from millstream.tiers.cold import ColdTier
from millstream.tiers.hot import HotTier
from millstream.tiers.journal import Entry, Journals
from millstream.tiers.manifests import decode_notes
from millstream.tiers.segments import overlaps

# However little of a journal a prefix matches, one call looks at no more than this.
ENTRIES_SCANNED_MAX: Final = 50_000
ITEM_OVERHEAD_BYTES: Final = 64
COLD_CACHE_BYTES: Final = 64 << 20
WINDOW_BYTES: Final = 32 << 20


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


class Window(NamedTuple):
    """Every message of some compacted segments between two positions, the first included, the last not."""

    numbers: frozenset[int]
    first: int
    until: int
    items: list[tuple[int, FeedItem]]


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
        self._windows: ByteLimitedCache[Window] = ByteLimitedCache(COLD_CACHE_BYTES)

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
        spanning: list[tuple[int, SegmentRef]] = []
        for number in flush.segments:
            segment = self._catalog.segment(number)
            if segment is not None and segment.bucket == bucket:
                if is_within(segment, flush.first_position, through):
                    items += [item async for item in self._segment_items(number, segment, 0, through)]
                else:
                    spanning.append((number, segment))
        if spanning:
            window = await self._window(bucket, spanning, flush.first_position, through)
            items += [pair for pair in window.items if flush.first_position <= pair[1].position < through]
        if flush.notes:
            for note in decode_notes(await self._cold.objects.get(flush.notes), flush.notes):
                if note.bucket == bucket:
                    event, offset = note.event, note.offset
                    item = FeedItem(
                        note.position, event, note.stream, offset, offset, note.at_ms, note.content_type, None
                    )
                    items.append((0, item))
        items.sort(key=_position_of)
        self._flushes.put((bucket, through), items, sum(map(_size_of, items)))
        return items

    async def _window(self, bucket: str, segments: list[tuple[int, SegmentRef]], first: int, through: int) -> Window:
        """Messages of compacted segments in order of position, from `first` up to `through` at least."""
        numbers = frozenset(number for number, _ in segments)
        cached = self._windows.get(bucket)
        if cached is not None and numbers <= cached.numbers and cached.first <= first and through <= cached.until:
            return cached
        until = max(segment.last_position for _, segment in segments) + 1
        items: list[tuple[int, FeedItem]] = []
        size = 0
        for number, segment in segments:
            async for pair in self._segment_items(number, segment, first, until):
                if pair[1].position >= until:
                    continue  # it came closer since the row group was chosen
                items.append(pair)
                size += _size_of(pair)
                if size > 2 * WINDOW_BYTES:
                    until, size = _cut(items, max(through, first), until)
        items.sort(key=_position_of)
        window = Window(numbers, first, until, items)
        self._windows.put(bucket, window, size)
        return window

    async def _segment_items(
        self, number: int, segment: SegmentRef, first: int, until: int
    ) -> AsyncIterator[tuple[int, FeedItem]]:
        """The messages of a segment between two positions whose streams still exist."""
        footer = await self._cold.footer(segment)
        group, looked_at, is_wanted = None, -1, False
        for extent in footer.extents:
            if extent.row_group != looked_at:
                looked_at = extent.row_group
                group, is_wanted = None, overlaps(footer.metadata, looked_at, first, until)
            stream = self._machine.by_incarnation(extent.incarnation) if is_wanted else None
            if stream is None:
                continue
            if group is None:
                group = await self._cold.row_group(number, looked_at, with_order=True)
            stop = extent.row_start + extent.rows
            start = bisect_left(group.positions, first, extent.row_start, stop)
            stop = bisect_left(group.positions, until, start, stop)
            offset = group.ends[start - 1] if start > extent.row_start else extent.offset_start
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
                yield extent.incarnation, item
                offset = group.ends[row]


def _position_of(pair: tuple[int, FeedItem]) -> int:
    return pair[1].position


def _size_of(pair: tuple[int, FeedItem]) -> int:
    return len(pair[1].payload or b"") + 200


def _cut(items: list[tuple[int, FeedItem]], through: int, until: int) -> tuple[int, int]:
    """Keep the messages of the lowest positions: about a window of them, and all before `through`. Returns the
    position they now reach to, and their size."""
    items.sort(key=_position_of)
    size = 0
    for index, pair in enumerate(items):
        if size >= WINDOW_BYTES and pair[1].position >= through:
            del items[index:]
            return pair[1].position, size
        size += _size_of(pair)
    return until, size
