"""Reclaiming space: what nothing refers to any more leaves the object store.

Segments die when the last live message in them goes (its stream deleted, expired or trimmed); they are deleted after
a grace period, for readers that are still at them. Segments that are partly dead are left to compaction. Objects that
a crash left behind are removed once, soon after the start.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from millstream.clock import Clock
from millstream.errors import MillstreamError
from millstream.shard.committer import Committer
from millstream.shard.flusher import Flusher
from millstream.shard.orphans import find_orphans
from millstream.streams.machine import StateMachine
from millstream.streams.records import StreamsTouched
from millstream.tiers.blobs import Blobs
from millstream.tiers.catalog import Catalog
from millstream.tiers.cold import ColdTier

logger = logging.getLogger("millstream.reclaim")

ROUND_SECONDS: Final = 5.0


class Reclaimer:
    def __init__(
        self,
        catalog: Catalog,
        cold: ColdTier,
        flusher: Flusher,
        blobs: Blobs,
        machine: StateMachine,
        clock: Clock,
        committer: Committer,
        grace_seconds: float,
        shard: int = 0,
        leftover_age_seconds: float = 0.0,
    ) -> None:
        self._committer = committer
        # The catalog's position when this process began to write to the store.
        self.started_at = catalog.position
        self._shard = shard
        self._leftover_age_seconds = leftover_age_seconds
        self._catalog = catalog
        self._cold = cold
        self._flusher = flusher
        self._blobs = blobs
        self._machine = machine
        self._clock = clock
        self._grace_seconds = grace_seconds
        # Whether what a crash left behind is gone.
        self.is_tidy = False

    async def run_forever(self) -> None:
        while True:
            try:
                if self._committer.failure is None:
                    if not self.is_tidy:
                        await self._remove_leftovers()
                        self.is_tidy = True
                    await self.reclaim()
            except MillstreamError as error:
                logger.warning("space could not be reclaimed, next try in %.0f s: %s", ROUND_SECONDS, error)
            await asyncio.sleep(min(ROUND_SECONDS, max(self._grace_seconds, 0.1)))

    async def _remove_leftovers(self) -> None:
        await asyncio.to_thread(self._cold.objects.remove_partial_files)
        shared = self._leftover_age_seconds > 0
        before_ms = self._clock.now_ms() - self._leftover_age_seconds * 1000 if shared else float("inf")
        orphans = await find_orphans(
            self._cold, self._catalog, self._flusher, self._shard, self.started_at, self._is_blob_known, before_ms
        )
        if orphans and shared:
            # Others write to this store too. Who is still leading now, after looking, has looked at the truth.
            refusal = await self._committer.submit_and_wait(StreamsTouched({}))
            if refusal is not None:
                raise refusal
        for path in orphans:
            await self._cold.objects.delete(path)
        if orphans:
            logger.info("removed %d objects that a crash had left behind", len(orphans))

    def _is_blob_known(self, name: str) -> bool:
        if not name.startswith(self._blobs.prefix):
            return True  # another shard's
        if name in self._blobs.made or self._catalog.refers_to_blob(name):
            return True
        return any(stream.snapshot is not None and stream.snapshot.blob == name for stream in self._machine.unsaved())

    async def reclaim(self) -> int:
        """Delete the segments that have been dead for the grace period, after a manifest has said so.

        The other way round, a machine lost in between could not be restored from the object store.
        """
        due_ms = self._clock.now_ms() - int(self._grace_seconds * 1000)
        numbers = self._catalog.dead_segments(due_ms)
        if not numbers:
            return 0
        paths = [segment.path for number in numbers if (segment := self._catalog.segment(number)) is not None]
        self._flusher.removed_segments = list(paths)
        await self._flusher.flush()
        loop = asyncio.get_running_loop()
        for number in numbers:
            await loop.run_in_executor(None, self._catalog.forget_segment, number)
        for path in paths:
            await self._cold.objects.delete(path)
        self._flusher.measures.segments_reclaimed += len(numbers)
        return len(numbers)
