"""The feed: everything that happens in a bucket, in commit order, from memory and from cold.

Cold, it goes from flush to flush: the messages of a flush come from `History`, the events from its notes.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import merge
from typing import Final, NamedTuple

from millstream.errors import OffsetTrimmed
from millstream.shard.history import History, Window
from millstream.shard.parts import ShardParts
from millstream.tiers.cache import ByteLimitedCache
from millstream.tiers.catalog_rows import FlushRow
from millstream.tiers.journal import Entry
from millstream.tiers.manifests import FeedNote, decode_notes
from millstream.units import Incarnation, Milliseconds, Offset, Position

# However little of a journal a prefix matches, one call looks at no more than this.
ENTRIES_SCANNED_MAX: Final = 50_000
ITEM_OVERHEAD_BYTES: Final = 64
# The same for history: so many flushes, or parts of large ones.
STRETCHES_MAX: Final = 64
NOTES_BYTES: Final = 16 << 20
NOTE_COST: Final = 8  # decoded notes take about so many times their bytes


class FeedItem(NamedTuple):
    """A message, or an event in a stream's life (then without payload)."""

    position: Position
    event: str
    stream: str
    offset: Offset
    next_offset: Offset
    at_ms: Milliseconds
    content_type: str
    payload: bytes | None
    incarnation: Incarnation | None = None
    """Of messages: which of the streams that had this name one after the other."""


class FeedPage(NamedTuple):
    """`position` is where the next page starts from; everything up to it has been seen."""

    items: list[FeedItem]
    position: Position
    up_to_date: bool


class Feed:
    def __init__(self, parts: ShardParts) -> None:
        self._namespace = parts.machine.namespace
        self._hot = parts.hot
        self._journals = parts.journals
        self._committer = parts.committer
        self._catalog = parts.catalog
        self._cold = parts.cold
        self._history = History(parts.catalog, parts.cold)
        self._notes_read: ByteLimitedCache[list[FeedNote]] = ByteLimitedCache(NOTES_BYTES)

    @property
    def latest(self) -> Position:
        """The last position that is visible."""
        return Position(self._committer.applied_position - 1)

    @property
    def earliest(self) -> Position:
        """The position to start after, to see everything that is kept."""
        first = self._catalog.flush_after(Position(-1))
        return Position((first[1].first_position if first is not None else self._journals.start) - 1)

    def is_hot(self, after: Position) -> bool:
        return after + 1 >= self._journals.start

    def read(self, bucket: str, after: Position, prefix: str, bytes_max: int) -> FeedPage:
        """What happened in the bucket after a position, about `bytes_max` of it; only where `is_hot`."""
        latest = self.latest
        items: list[FeedItem] = []
        size = scanned = 0
        for entry in self._journals.of(bucket).entries(after):
            if scanned == ENTRIES_SCANNED_MAX:
                return FeedPage(items, max(after, Position(entry.position - 1)), False)
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
        stream = self._namespace.by_incarnation(entry.incarnation)
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
        if stream is not None and (tail := self._hot.tail(stream)) is not None:
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
                    stream.incarnation,
                )
                for index in tail.written_by(entry.position)
            ]
        yield from sorted(items)

    # -- cold ------------------------------------------------------------------------------------------------

    async def read_cold(self, bucket: str, after: Position, prefix: str, bytes_max: int) -> FeedPage:
        """The same from anywhere: one flush after the other, then memory."""
        items: list[FeedItem] = []
        size = 0
        for _ in range(STRETCHES_MAX):
            if self.is_hot(after):
                break
            found = self._catalog.flush_after(after)
            if found is None or after < self.earliest:
                raise OffsetTrimmed(
                    "what happened after this token is no longer kept",
                    earliest=self.earliest,
                    hint="start again without a token",
                )
            through, flush = found
            notes = await self._notes(bucket, flush, prefix)
            window = await self._history.window(bucket, after + 1)
            until = min(window.until, through)
            events = (note for note in notes if after < note.position < until)
            for item in merge(events, self._messages(window, after, until, prefix), key=_position_of):
                if size >= bytes_max:
                    return FeedPage(items, items[-1].position, False)
                items.append(item)
                size += len(item.payload or b"") + ITEM_OVERHEAD_BYTES
            after = Position(until - 1)
        if size >= bytes_max or not self.is_hot(after):
            return FeedPage(items, after, False)
        page = self.read(bucket, after, prefix, bytes_max - size)
        return FeedPage(items + page.items, page.position, page.up_to_date)

    def _messages(self, window: Window, after: Position, until: Position, prefix: str) -> Iterator[FeedItem]:
        """The messages that still count: their stream exists, and has not been trimmed beyond them."""
        for row in window.rows(after, until, prefix):
            stream = self._namespace.by_incarnation(row.incarnation)
            if stream is not None and (stream.forks > 0 or row.offset_end > stream.earliest):
                yield FeedItem(
                    row.position,
                    "message",
                    row.stream,
                    row.offset_start,
                    row.offset_end,
                    row.at_ms,
                    row.content_type,
                    row.payload,
                    row.incarnation,
                )

    async def _notes(self, bucket: str, flush: FlushRow, prefix: str) -> list[FeedItem]:
        """What happened in a flush besides messages, in order of position."""
        if not flush.notes:
            return []
        notes = self._notes_read.get(flush.notes)
        if notes is None:
            with self._cold.objects.damage.noticed(flush.notes):
                data = await self._cold.objects.get(flush.notes)
                notes = decode_notes(data, flush.notes)
            self._notes_read.put(flush.notes, notes, NOTE_COST * len(data))
        items = [
            FeedItem(
                note.position, note.event, note.stream, note.offset, note.offset, note.at_ms, note.content_type, None
            )
            for note in notes
            if note.bucket == bucket and note.stream.startswith(prefix)
        ]
        return sorted(items, key=_position_of)


def _position_of(item: FeedItem) -> int:
    return item.position
