"""Reclaiming space: what nothing refers to any more leaves the object store.

Segments die when the last live message in them goes (its stream deleted, expired or trimmed); they are deleted after
a grace period, for readers that are still at them. Segments that are partly dead are left to compaction. Objects that
a crash left behind go when they are old enough (`leftovers.py`). All of it only while the store is ours.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from millstream.errors import MillstreamError
from millstream.shard.flush.flusher import Flusher
from millstream.shard.leftovers import Leftovers
from millstream.shard.parts import ShardParts
from millstream.streams.records import StreamsTouched

logger = logging.getLogger("millstream.reclaim")

ROUND_SECONDS: Final = 5.0
LEFTOVERS_SECONDS: Final = 3600.0


class Reclaimer:
    def __init__(
        self, parts: ShardParts, flusher: Flusher, *, grace_seconds: float, leftover_age_seconds: float
    ) -> None:
        self._committer = parts.committer
        self._ownership = parts.ownership
        self._catalog = parts.catalog
        self._cold = parts.cold
        self._blobs = parts.blobs
        self._namespace = parts.machine.namespace
        self._clock = parts.clock
        self._expiry_clock = parts.expiry_clock
        self._measures = parts.measures
        self._flusher = flusher
        self._grace_seconds = grace_seconds
        self._leftover_age_seconds = leftover_age_seconds
        self._leftovers = Leftovers(parts, flusher, leftover_age_seconds, self._is_blob_known)
        # Whether leftovers are being looked for at the moment: what is written and not committed yet could be one.
        self.is_tidying = False
        self._looked_at = parts.clock.monotonic()

    async def run_forever(self) -> None:
        while True:
            try:
                if self._committer.failure is None:
                    if self._is_time_to_look():
                        await self.remove_leftovers()
                    await self.reclaim()
            except MillstreamError as error:
                logger.warning("space could not be reclaimed, next try in %.0f s: %s", ROUND_SECONDS, error)
            await asyncio.sleep(min(ROUND_SECONDS, max(self._grace_seconds, 0.1)))

    def _is_time_to_look(self) -> bool:
        pause = min(LEFTOVERS_SECONDS, max(self._leftover_age_seconds / 4, 0.1))
        return self._clock.monotonic() - self._looked_at >= pause

    async def remove_leftovers(self) -> int:
        """Look for what crashes have left, and delete what has been found for long enough."""
        self._looked_at = self._clock.monotonic()
        self.is_tidying = True
        try:
            await self._ownership.check()
            found = await self._leftovers.find(self._ownership.since)
            await self._ownership.check()
            await asyncio.to_thread(self._cold.objects.remove_partial_files, self._leftovers.before_ms)
            if found:
                # Who is still leading now, after looking, has looked at the truth.
                await self._committer.commit(StreamsTouched({}))
            removed = [path for path in found if self._leftovers.is_unknown(path)]
            for path in removed:
                await self._cold.objects.delete(path)
            if removed:
                logger.info("removed %d objects that a crash had left behind", len(removed))
            return len(removed)
        finally:
            self.is_tidying = False

    def _is_blob_known(self, name: str) -> bool:
        if not name.startswith(self._blobs.prefix):
            return True  # another shard's
        if name in self._blobs.made or self._catalog.refers_to_blob(name):
            return True
        return any(stream.snapshot is not None and stream.snapshot.blob == name for stream in self._namespace.unsaved())

    async def reclaim(self) -> int:
        """Delete the segments that have been dead for the grace period, after a manifest has said so.

        The other way round, a machine lost in between could not be restored from the object store.
        """
        due_ms = self._expiry_clock.now_ms() - int(self._grace_seconds * 1000)
        numbers = self._catalog.dead_segments(due_ms)
        if not numbers:
            return 0
        paths = [segment.path for number in numbers if (segment := self._catalog.segment(number)) is not None]
        self._flusher.announce_removed(paths)
        await self._flusher.flush()  # which makes sure that the store is ours
        loop = asyncio.get_running_loop()
        for number in numbers:
            await loop.run_in_executor(None, self._catalog.forget_segment, number)
        for path in paths:
            await self._cold.objects.delete(path)
        self._measures.segments_reclaimed += len(numbers)
        return len(numbers)
