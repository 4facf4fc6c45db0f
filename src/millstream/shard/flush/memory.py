"""Letting go of memory: messages that are cold, and streams that the catalog has as they are.

What was flushed stays in memory as long as there is room for it, for readers; the oldest goes first. Streams that are
in memory only because they were read go when there are too many.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Final

from millstream.shard.flush.limits import FlushLimits
from millstream.shard.parts import ShardParts
from millstream.slices import batched
from millstream.streams.state import Stream
from millstream.units import Column, Incarnation, Position

# So many streams, or buckets, are gone through in one turn of the loop.
SLICE_STREAMS: Final = 256
# What a flush whose streams are still in memory costs beside them.
KEPT_FLUSH_BYTES: Final = 256
# So many streams more must be in memory before they are searched again for those that can be spared.
SPARE_STREAMS: Final = 4096


class FlushedMemory:
    def __init__(self, parts: ShardParts, limits: FlushLimits) -> None:
        self._namespace = parts.machine.namespace
        self._hot = parts.hot
        self._journals = parts.journals
        self._budget = parts.budget
        # Streams that somebody listens to stay in memory whatever their state.
        self._pinned = parts.listeners
        self._limits = limits
        # What was flushed and is still in memory, oldest first: a position and the streams it concerns, by incarnation,
        # so that those which are deleted meanwhile are not held.
        self._kept: deque[tuple[Position, Column[Incarnation]]] = deque()
        # As many streams were in memory when the last search found none that can be spared.
        self._none_to_spare = 0

    async def release(self, position: Position, streams: Sequence[Stream]) -> None:
        """The catalog has what these streams held before a position: let go of the oldest that memory is short of."""
        incarnations: Column[Incarnation] = Column("q", (stream.incarnation for stream in streams))
        if not incarnations and self._kept:
            _, incarnations = self._kept.pop()
        self._kept.append((position, incarnations))
        while self._kept and self._keeps_too_much():
            await self._release(*self._kept.popleft())
        self._none_to_spare = 0
        await self.evict_excess()

    async def _release(self, position: Position, incarnations: Column[Incarnation]) -> None:
        self._journals.start_at(position)
        for buckets in batched(self._journals.buckets(), SLICE_STREAMS):
            self._journals.drop(buckets)
            await asyncio.sleep(0)
        for some in batched(incarnations, SLICE_STREAMS):
            resident = [one for one in map(self._namespace.if_resident, map(Incarnation, some)) if one is not None]
            self._hot.release(resident, position)
            self._namespace.evict(resident, self._pinned, self._excess())
            await asyncio.sleep(0)

    def _keeps_too_much(self) -> bool:
        """Whether memory holds more of what is cold than it should, or is short altogether."""
        kept = self._hot.bytes + self._journals.bytes + KEPT_FLUSH_BYTES * len(self._kept)
        return kept > self._limits.keep_bytes or self._budget.used > self._limits.pressure_bytes

    async def evict_excess(self) -> None:
        """Forget streams that are in memory only because they were read, if there are too many."""
        if self._excess() <= 0 or self._namespace.resident_count() <= self._none_to_spare:
            return
        for some in batched(list(self._namespace.resident()), SLICE_STREAMS):
            self._namespace.evict(some, self._pinned, self._excess())
            if self._excess() <= 0:
                return
            await asyncio.sleep(0)
        # The others have messages in memory, or changed: they can go after the next flush.
        self._none_to_spare = self._namespace.resident_count() + SPARE_STREAMS

    def _excess(self) -> int:
        """How many more streams are in memory than allowed."""
        return self._namespace.resident_count() - self._limits.resident_streams_max
