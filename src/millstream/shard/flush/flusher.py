"""The flusher: decides when a flush is due, and runs its steps in order.

1. **capture** (`capture.py`): the state at a position P is marked, without stopping anything;
2. **store** (`store.py`): the messages before P go out as Parquet segments, and the changed rows as a manifest;
3. **seal** (`seal.py`): a `SegmentSealed` record in the log makes them count, if the object store is still this
   server's (`ownership.py`);
4. **apply** (`apply.py`): the catalog takes rows, index and position in one transaction, and the log is trimmed to P.

Then memory is released (`memory.py`). A crash anywhere leaves the old state or the new one: before the seal the objects
are orphans, after it replay finds the record and reads the index from the segments' own footers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, TypeVar

from millstream.clock import monotonic_seconds
from millstream.errors import MillstreamError
from millstream.shard.flush.apply import CatalogUpdate
from millstream.shard.flush.capture import FlushCapture
from millstream.shard.flush.full_manifests import FullManifests
from millstream.shard.flush.limits import FlushLimits
from millstream.shard.flush.memory import FlushedMemory
from millstream.shard.flush.seal import SealedFlushes
from millstream.shard.flush.store import FlushStore
from millstream.shard.flush.unlisted import UnlistedObjects
from millstream.shard.flush.workers import FlushWorkers
from millstream.shard.parts import ShardParts
from millstream.streams.state import Stream
from millstream.tiers.catalog_rows import Checkpoint
from millstream.units import Position

logger = logging.getLogger("millstream.flush")

RETRY_SECONDS: Final = (1.0, 30.0)
POLL_SECONDS: Final = 0.25
# So many changed streams are flushed, however little they hold: each is a page of the catalog, and state in memory.
FLUSH_STREAMS: Final = 32_768

T = TypeVar("T")


class Flusher:
    def __init__(self, parts: ShardParts, limits: FlushLimits) -> None:
        self._parts = parts
        self._machine = parts.machine
        self._namespace = parts.machine.namespace
        self._hot = parts.hot
        self._catalog = parts.catalog
        self._committer = parts.committer
        self._ownership = parts.ownership
        self._budget = parts.budget
        self._clock = parts.clock
        self._measures = parts.measures
        self._limits = limits
        # Whoever writes the catalog holds it: a flush, or a follower of another node's flushes.
        self.lock = asyncio.Lock()
        self.unlisted = UnlistedObjects()
        self.workers = FlushWorkers(parts, limits)
        self.memory = FlushedMemory(parts, limits)
        self._store = FlushStore(parts, self.workers, self.unlisted)
        self._sealed = SealedFlushes(parts)
        self._catalog_update = CatalogUpdate(parts, self.workers, self._sealed)
        self._full_manifests = FullManifests(parts, self.workers)
        # Segments about to be deleted: the next manifest says so first.
        self._removed_segments: list[str] = []
        self._records_flushed = 0
        self._last_flush_at = parts.clock.monotonic()
        self.failure: str | None = None
        self.flush_count = 0

    async def run_forever(self) -> None:
        """Flush by age, by bytes, by streams and by pressure; after a failure, later and later."""
        delay, slowest = RETRY_SECONDS
        while True:
            await asyncio.sleep(POLL_SECONDS)
            if not self._is_due():
                await self._rest()
                await self.memory.evict_excess()
                continue
            try:
                await self.flush()
                delay = RETRY_SECONDS[0]
            except MillstreamError as error:
                self.failure = error.message
                logger.warning("flush failed, next try in %.0f s: %s", delay, error)
                await asyncio.sleep(delay)
                delay = min(delay * 2, slowest)
            except Exception as error:
                self.failure = f"{type(error).__name__}: {error}"
                logger.exception("flush failed, next try in %.0f s", delay)
                await asyncio.sleep(delay)
                delay = min(delay * 2, slowest)

    async def _rest(self) -> None:
        if self.workers.is_process_idle:
            async with self.lock:
                await self.workers.end_process()

    def _is_due(self) -> bool:
        if self._committer.failure is not None or not self._ownership.is_settled:
            return False  # nothing can be committed, or nobody knows yet whether the store is ours
        unflushed, namespace = self._hot.unflushed, self._namespace
        if max(len(unflushed.streams), len(namespace.changed)) >= FLUSH_STREAMS:
            return True
        if unflushed.bytes >= self._limits.flush_bytes:
            return True
        if self._budget.used > self._limits.pressure_bytes and (unflushed or namespace.changed or namespace.removed):
            return True
        age_seconds = self._clock.monotonic() - self._last_flush_at
        return age_seconds >= self._limits.interval_seconds and self._has_changes()

    def _has_changes(self) -> bool:
        return bool(
            self._machine.records_applied != self._records_flushed
            or self._hot.unflushed
            or self._sealed.flushes
            or self._removed_segments
            or self._namespace.producers.has_changes
        )

    async def flush(self) -> int:
        """Make everything applied so far cold; returns the position the catalog then reflects."""
        async with self.lock:
            if not self._has_changes():
                return self._catalog.position
            started = monotonic_seconds()
            try:
                with self.unlisted.writing():
                    capture = await self._run_steps()
            except BaseException:
                self.workers.raise_priority()
                self._measures.flush_failures += 1
                raise
            await self.memory.release(capture.position, capture.unflushed.streams)
            await self._delete_blobs(capture.changes.freed_blobs)
            self._last_flush_at = self._clock.monotonic()
            self.failure = None
            self.flush_count += 1
            self._measures.flush_seconds.observe(monotonic_seconds() - started)
            self._parts.cold.memory_was_used()
            self._records_flushed = capture.records_applied
            await self._full_manifests.after_flush()
            return capture.position

    async def _run_steps(self) -> FlushCapture:
        """Capture, store, seal, apply; if one of them fails, what was captured is captured again by the next flush."""
        # A claim that is still to be made is a record too: it comes before the position, so that it is flushed, and a
        # store that does not answer costs no capture.
        await self._ownership.check()
        await self._sealed.read_indexes()
        first_position = max(self._machine.flushed, self._catalog.position)
        capture = FlushCapture(self._parts, first_position, self._committer.applied_position)
        removed_segments, self._removed_segments = self._removed_segments, []
        try:
            await capture.encode()
            stored = await self._store.store(capture, self._sealed.flushes, removed_segments)
            await self._sealed.seal(capture, stored)
            await self._catalog_update.apply(capture, stored)
        except BaseException:
            capture.roll_back()
            self._removed_segments += removed_segments
            raise
        capture.commit()
        return capture

    async def _delete_blobs(self, names: Iterable[str]) -> None:
        for name in names:
            try:
                await self._parts.blobs.delete(name)
            except MillstreamError as error:
                logger.warning("a blob could not be deleted; the next start will do it: %s", error)

    # -- for others who write the catalog, or delete objects -------------------------------------------------

    def announce_removed(self, paths: Iterable[str]) -> None:
        """Let the next manifest say that these segments are gone, before they are deleted."""
        self._removed_segments = list(paths)

    def unlisted_paths(self) -> set[str]:
        """The objects in the store that the catalog does not list yet."""
        return self.unlisted.paths | self._sealed.paths

    async def write_catalog(self, checkpoint: Checkpoint, rows: int) -> None:
        """Apply a checkpoint of about so many rows that another node's flush led to."""
        await self._catalog_update.write(checkpoint, rows)

    async def in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        return await self.workers.in_thread(work, *arguments)

    async def release(self, position: Position, streams: Sequence[Stream]) -> None:
        """The catalog has what these streams held before a position: memory may let go of it."""
        await self.memory.release(position, streams)

    async def write_full_manifest(self) -> None:
        """Write the whole catalog as a full manifest now: one of those before it is missing, or cannot be read."""
        async with self.lock:
            await self._ownership.check()
            await self._full_manifests.write()

    def close(self) -> None:
        self.workers.close()
