"""Keeping a follower's catalog up with flushes that the leader made.

The leader's flush ends in a `SegmentSealed` record that names a manifest: the catalog rows as of a position P. A
follower has the same state, so it moves its own catalog to P from the manifest and lets go of memory as the leader
did. It cannot tell which of its streams changed after P and which before, so it keeps account by generation: one ends
with each such record. A flush begins after the one before it was sealed; so what changed before a record that lies at
or before P is in the catalog once that is at P, and what changed later counts as unsaved a little longer. Compactions
are exact: a manifest names those that it brings, and only they are settled with it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import Final, NamedTuple

from millstream.errors import Corrupt, MillstreamError, NotFound
from millstream.shard.flush.flusher import Flusher
from millstream.shard.parts import ShardParts
from millstream.shard.restore import checkpoint_of, read_stored, sealed_flush, sealed_replacement
from millstream.streams.captures import Capture
from millstream.streams.records import SegmentSealed
from millstream.tasks import end
from millstream.tiers.catalog_rows import Checkpoint
from millstream.tiers.hot import Unflushed
from millstream.tiers.manifests import Manifest, Replacement
from millstream.units import Position

logger = logging.getLogger("millstream.cluster")

RETRY_SECONDS: Final = (0.5, 30.0)


class _Generation(NamedTuple):
    """What changed up to the record at position `end`."""

    end: int
    changes: Capture
    unflushed: Unflushed


class CatalogFollower:
    def __init__(self, parts: ShardParts, flusher: Flusher) -> None:
        self._machine = parts.machine
        self._hot = parts.hot
        self._catalog = parts.catalog
        self._cold = parts.cold
        self._supervisor = parts.supervisor
        self._shard = parts.number
        self._flusher = flusher
        self._generations: deque[_Generation] = deque()
        self._task: asyncio.Task[None] | None = None
        self._noticed = asyncio.Event()
        # Why the catalog cannot follow any more: it must be restored from the object store.
        self.is_behind = False

    def start(self) -> None:
        if self._task is None:
            self._task = self._supervisor.start("catalog", self._run_forever, of=f"shard {self._shard}", is_vital=True)

    async def stop(self) -> None:
        """Give everything back that is not in the catalog: from here on this node flushes itself, or not at all."""
        task, self._task = self._task, None
        await end(task)
        async with self._flusher.lock:
            for one in reversed(self._generations):
                self._machine.namespace.roll_back(one.changes)
                self._hot.roll_back(one.unflushed)
            self._generations.clear()

    def sealed(self, position: Position) -> None:
        """A flush was sealed by the record at this position: a generation ends."""
        changes = self._machine.namespace.begin_capture()
        self._generations.append(_Generation(position, changes, self._hot.begin_capture()))
        self._noticed.set()

    async def _run_forever(self) -> None:
        delay, slowest = RETRY_SECONDS
        self._noticed.set()  # there may be something from before
        while True:
            await self._noticed.wait()
            self._noticed.clear()
            try:
                while self._machine.sealed and not self.is_behind:
                    await self._follow(self._machine.sealed[0])
                delay = RETRY_SECONDS[0]
            except MillstreamError as error:
                logger.warning("the catalog cannot follow a flush yet, next try in %.1f s: %s", delay, error)
                await asyncio.sleep(delay)
                delay = min(delay * 2, slowest)
                self._noticed.set()

    async def _follow(self, record: SegmentSealed) -> None:
        if record.through > self._catalog.position:
            try:
                found = await self._load(record)
            except (NotFound, Corrupt) as error:
                logger.warning("a flush cannot be followed any more: %s", error)
                found = None  # what it names was tidied up meanwhile
            if found is None:
                self.is_behind = True
                return
            # From here on it must not be torn: whoever takes over waits for the lock.
            await asyncio.shield(self._write(*found))
        self._machine.forget_sealed(record.through)

    async def _load(self, record: SegmentSealed) -> tuple[Checkpoint, Manifest] | None:
        manifest, head = await read_stored(self._cold, record.manifest)
        if manifest.first > self._catalog.position:
            logger.warning(
                "the catalog stands at position %d, the next manifest starts at %d",
                self._catalog.position,
                manifest.first,
            )
            return None
        removed = set(manifest.removed_segments)
        flushes = [
            await sealed_flush(self._cold, flush, removed)
            for flush in manifest.flushes
            if flush.through > self._catalog.position
        ]
        replacements = [
            await sealed_replacement(self._cold, one, removed)
            for one in manifest.replacements
            if not self._is_in_catalog(one)
        ]
        freed = [blob.encode() for one in self._settled(record.through) for blob in one.changes.freed_blobs]
        checkpoint = checkpoint_of(manifest, head, flushes, replacements, manifest.at_ms, position=manifest.through)
        return checkpoint._replace(freed_blobs=freed), manifest

    def _is_in_catalog(self, replacement: Replacement) -> bool:
        """A leader whose catalog was behind ours names again what we have followed already."""
        known = {row.segment.path for _, row in self._catalog.segments()}
        return bool(replacement.segments) and all(segment.path in known for segment in replacement.segments)

    def _settled(self, position: Position) -> list[_Generation]:
        return [one for one in self._generations if one.end <= position]

    async def _write(self, checkpoint: Checkpoint, manifest: Manifest) -> None:
        async with self._flusher.lock:
            if checkpoint.position <= self._catalog.position:
                return
            await self._flusher.write_catalog(checkpoint, len(manifest.streams))
            if manifest.removed_segments:
                await self._flusher.in_thread(self._forget, set(manifest.removed_segments))
            self._machine.forget_replaced((one.replaced, one.segments) for one in manifest.replacements)
            concerned = [stream for one in self._generations for stream in one.unflushed.streams]
            position = checkpoint.position
            left = [one._replace(unflushed=self._hot.commit(one.unflushed, position)) for one in self._generations]
            for one in left:
                if one.end <= position:
                    self._machine.namespace.commit(one.changes)
            self._generations = deque(one for one in left if one.end > position)
            await self._flusher.release(position, concerned)

    def _forget(self, paths: set[str]) -> None:
        for number, row in list(self._catalog.segments()):
            if row.segment.path in paths:
                self._catalog.forget_segment(number)
