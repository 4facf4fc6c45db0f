"""The feed: everything that happens in a bucket, in commit order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from millstream.errors import OffsetTrimmed
from millstream.shard.committer import Committer
from millstream.streams.machine import StateMachine
from millstream.tiers.hot import HotTier
from millstream.tiers.journal import Entry, Journals

# However little of a journal a prefix matches, one call looks at no more than this.
ENTRIES_SCANNED_MAX: Final = 50_000


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
    def __init__(self, machine: StateMachine, hot: HotTier, journals: Journals, committer: Committer) -> None:
        self._machine = machine
        self._hot = hot
        self._journals = journals
        self._committer = committer

    @property
    def latest(self) -> int:
        """The last position that is visible."""
        return self._committer.applied_position - 1

    def read(self, bucket: str, after: int, prefix: str, bytes_max: int) -> FeedPage:
        """What happened in the bucket after a position, about `bytes_max` of it."""
        latest = self.latest
        if after + 1 < self._journals.start:
            raise OffsetTrimmed(
                "what happened after this token is no longer kept",
                earliest=self._journals.start,
                hint="start again without a token",
            )
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
                size += len(item.payload or b"") + 64
        return FeedPage(items, max(after, latest), True)

    def _items(self, entry: Entry, prefix: str) -> Iterator[FeedItem]:
        stream = self._machine.by_incarnation(entry.incarnation)
        name = stream.key.stream if stream is not None else entry.notes[0].stream if entry.notes else None
        if name is None or not name.startswith(prefix):
            return
        position = entry.position
        for note in entry.notes:
            if note.event != "closed":
                yield FeedItem(
                    position, note.event, name, note.offset, note.offset, note.at_ms, note.content_type, None
                )
        tail = self._hot.tails.get(entry.incarnation)
        if tail is not None and stream is not None:
            for index in tail.written_by(entry.position):
                position = tail.positions[index]
                yield FeedItem(
                    position,
                    "message",
                    name,
                    tail.message_start(index),
                    tail.ends[index],
                    tail.times[index],
                    stream.content_type,
                    tail.messages[index],
                )
        for note in entry.notes:
            if note.event == "closed":  # it comes with the last message, and shares its position
                yield FeedItem(
                    position, note.event, name, note.offset, note.offset, note.at_ms, note.content_type, None
                )
