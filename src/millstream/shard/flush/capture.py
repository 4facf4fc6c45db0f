"""Capture, the first step of a flush: the state at a position, taken without stopping anything.

Everything is marked at one moment, and the streams that changed are encoded afterwards: one that is about to change
again before that, and the others in slices between requests (`streams/captures.py`). Streams that only grew are not
encoded at all: their messages, which are captured at the same moment, tell the rest.
"""

from __future__ import annotations

import asyncio
from typing import Final

from millstream.shard.parts import ShardParts
from millstream.tiers.catalog_rows import encode_singletons
from millstream.tiers.manifests import FeedNote
from millstream.tiers.stream_rows import encode_captured, encode_key
from millstream.units import Position

SLICE_STREAMS: Final = 256


class FlushCapture:
    """The state at a position, which is the present, and what leads up to it from the first position."""

    def __init__(self, parts: ShardParts, first_position: Position, position: Position) -> None:
        self._machine = machine = parts.machine
        self._hot = parts.hot
        self.first_position = first_position
        self.position = position
        self.singletons = encode_singletons(machine)
        self.notes = [
            FeedNote(bucket, at + note.after, note.event, note.stream, note.at_ms, note.offset, note.content_type)
            for bucket, at, note in parts.journals.notes_between(first_position, position)
        ]
        self.replaced = list(machine.replaced)
        self.records_applied = machine.records_applied
        self.changes = machine.namespace.begin_capture(encode_captured)
        self.removed = [(incarnation, encode_key(key)) for incarnation, key in self.changes.removed.items()]
        self.unflushed = parts.hot.begin_capture()

    async def encode(self) -> None:
        """Encode the changed streams, a slice at a time between requests."""
        while self.changes.encode_some(SLICE_STREAMS):
            await asyncio.sleep(0)

    @property
    def rows(self) -> int:
        """How many streams and messages there are to store."""
        return len(self.changes.encoded) + len(self.unflushed)

    def commit(self) -> None:
        """The catalog has all of it."""
        self._machine.namespace.commit(self.changes)
        self._machine.forget_replaced((record.replaced, record.segments) for record in self.replaced)
        self._hot.commit(self.unflushed, self.position)

    def roll_back(self) -> None:
        """The flush failed: all of it is still to be done."""
        self._machine.namespace.roll_back(self.changes)
        self._hot.roll_back(self.unflushed)
