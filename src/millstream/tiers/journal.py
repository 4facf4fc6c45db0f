"""Journals: what happened in each bucket, in commit order, for those who follow a whole bucket.

A journal holds no payloads. It says at which positions records of the bucket lie and which stream each is about;
the messages are found in that stream's tail, by the same positions. What is not a message (a stream created,
closed, deleted, a snapshot published) is kept as a note.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import NamedTuple


class Note(NamedTuple):
    """Something that happened to a stream: created, closed, deleted, expired, snapshot.

    `after` is how far behind the record's own position it lies: a close follows the last message.
    """

    event: str
    stream: str
    at_ms: int
    offset: int
    content_type: str
    after: int = 0


class Entry(NamedTuple):
    position: int
    incarnation: int
    notes: tuple[Note, ...]


class Journal:
    __slots__ = ("_incarnations", "_notes", "_positions")

    def __init__(self) -> None:
        self._positions = array("q")
        self._incarnations = array("q")
        self._notes: dict[int, tuple[Note, ...]] = {}

    def add(self, position: int, incarnation: int, *notes: Note) -> None:
        self._positions.append(position)
        self._incarnations.append(incarnation)
        if notes:
            self._notes[position] = notes

    def drop_before(self, position: int) -> None:
        count = bisect_left(self._positions, position)
        if self._notes:
            for dropped in self._positions[:count]:
                self._notes.pop(dropped, None)
        del self._positions[:count], self._incarnations[:count]

    def notes_between(self, first: int, position: int) -> Iterator[tuple[int, Note]]:
        start, stop = bisect_left(self._positions, first), bisect_left(self._positions, position)
        for at in self._positions[start:stop]:
            for note in self._notes.get(at, ()):
                yield at, note

    def __len__(self) -> int:
        return len(self._positions)

    def entries(self, after: int) -> Iterator[Entry]:
        """The records that may hold something behind position `after`, in order."""
        start = max(bisect_right(self._positions, after) - 1, 0)
        for index in range(start, len(self._positions)):
            position = self._positions[index]
            yield Entry(position, self._incarnations[index], self._notes.get(position, ()))


class Journals:
    def __init__(self) -> None:
        self._by_bucket: dict[str, Journal] = {}
        # The first position that journals still cover; whoever asks for less has missed something.
        self.start = 1

    def of(self, bucket: str) -> Journal:
        journal = self._by_bucket.get(bucket)
        if journal is None:
            journal = self._by_bucket[bucket] = Journal()
        return journal

    def drop_before(self, position: int) -> None:
        """Forget what the cold tier can tell."""
        for bucket, journal in list(self._by_bucket.items()):
            journal.drop_before(position)
            if not len(journal):
                del self._by_bucket[bucket]
        self.start = max(self.start, position)

    def notes_between(self, first: int, position: int) -> Iterator[tuple[str, int, Note]]:
        for bucket, journal in self._by_bucket.items():
            for at, note in journal.notes_between(first, position):
                yield bucket, at, note
