"""Journals: what happened in each bucket, in commit order, for those who follow a whole bucket.

A journal holds no payloads. It says at which positions records of the bucket lie and which stream each is about;
the messages are found in that stream's tail, by the same positions. What is not a message (a stream created,
closed, deleted, a snapshot published) is kept as a note.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from millstream.units import Column, Incarnation, Milliseconds, Offset, Position


class Note(NamedTuple):
    """Something that happened to a stream: created, closed, deleted, expired, snapshot.

    `after` is how far behind the record's own position it lies: a close follows the last message.
    """

    event: str
    stream: str
    at_ms: Milliseconds
    offset: Offset
    content_type: str
    after: int = 0


class Entry(NamedTuple):
    position: Position
    incarnation: Incarnation
    notes: tuple[Note, ...]


# What memory takes: a bucket's journal, an entry in it, and a note.
JOURNAL_BYTES: Final = 450
ENTRY_BYTES: Final = 18
NOTE_BYTES: Final = 400


class Journal:
    __slots__ = ("_incarnations", "_notes", "_positions")

    def __init__(self) -> None:
        self._positions: Column[Position] = Column("q")
        self._incarnations: Column[Incarnation] = Column("q")
        self._notes: dict[Position, tuple[Note, ...]] = {}

    def add(self, position: Position, incarnation: Incarnation, *notes: Note) -> None:
        self._positions.append(position)
        self._incarnations.append(incarnation)
        if notes:
            self._notes[position] = notes

    def drop_before(self, position: Position) -> int:
        """Forget what lies before a position; returns how many bytes that has freed."""
        count = bisect_left(self._positions, position)
        freed = ENTRY_BYTES * count
        if self._notes:
            for dropped in self._positions[:count]:
                freed += NOTE_BYTES * len(self._notes.pop(dropped, ()))
        del self._positions[:count], self._incarnations[:count]
        return freed

    def notes_between(self, first: Position, position: Position) -> Iterator[tuple[Position, Note]]:
        start, stop = bisect_left(self._positions, first), bisect_left(self._positions, position)
        for at in self._positions[start:stop]:
            for note in self._notes.get(at, ()):
                yield at, note

    def __len__(self) -> int:
        return len(self._positions)

    def entries(self, after: Position) -> Iterator[Entry]:
        """The records that may hold something behind position `after`, in order."""
        start = max(bisect_right(self._positions, after) - 1, 0)
        for index in range(start, len(self._positions)):
            position = self._positions[index]
            yield Entry(position, self._incarnations[index], self._notes.get(position, ()))


_EMPTY: Final = Journal()


class Journals:
    def __init__(self) -> None:
        self._by_bucket: dict[str, Journal] = {}
        self.bytes = 0
        # The first position that journals still cover; whoever asks for less has missed something.
        self.start = Position(1)

    def of(self, bucket: str) -> Journal:
        journal = self._by_bucket.get(bucket)
        return journal if journal is not None else _EMPTY

    def add(self, bucket: str, position: Position, incarnation: Incarnation, *notes: Note) -> None:
        journal = self._by_bucket.get(bucket)
        if journal is None:
            journal = self._by_bucket[bucket] = Journal()
            self.bytes += JOURNAL_BYTES
        journal.add(position, incarnation, *notes)
        self.bytes += ENTRY_BYTES + NOTE_BYTES * len(notes)

    def buckets(self) -> list[str]:
        return list(self._by_bucket)

    def start_at(self, position: Position) -> None:
        """From here on nobody is told what lies before a position: the cold tier tells that."""
        self.start = max(self.start, position)

    def drop(self, buckets: Iterable[str]) -> None:
        """Forget what these buckets' journals hold from before the start."""
        for bucket in buckets:
            journal = self._by_bucket.get(bucket)
            if journal is None:
                continue
            self.bytes -= journal.drop_before(self.start)
            if not len(journal):
                del self._by_bucket[bucket]
                self.bytes -= JOURNAL_BYTES

    def notes_between(self, first: Position, position: Position) -> Iterator[tuple[str, Position, Note]]:
        for bucket, journal in self._by_bucket.items():
            for at, note in journal.notes_between(first, position):
                yield bucket, at, note
