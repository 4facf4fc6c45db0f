"""Journals: what happened in each bucket, in commit order, for those who follow a whole bucket.

A journal holds no payloads. It says at which positions records of the bucket lie and which stream each is about;
the messages are found in that stream's tail, by the same positions. What is not a message (a stream created,
closed, deleted, a snapshot published) is kept as a note.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple


class Note(NamedTuple):
    """Something that happened to a stream: created, closed, deleted, expired, snapshot."""

    event: str
    stream: str
    at_ms: int
    offset: int
    content_type: str


class Entry(NamedTuple):
    position: int
    incarnation: int
    notes: tuple[Note, ...]


class Journal:
    __slots__ = ("_incarnations", "_notes", "_positions")

    def __init__(self) -> None:
        self._positions = array("Q")
        self._incarnations = array("Q")
        self._notes: dict[int, tuple[Note, ...]] = {}

    def add(self, position: int, incarnation: int, *notes: Note) -> None:
        self._positions.append(position)
        self._incarnations.append(incarnation)
        if notes:
            self._notes[position] = notes

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
