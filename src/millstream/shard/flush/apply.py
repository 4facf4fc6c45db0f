"""Apply, the last step of a flush: the catalog takes rows, index and position in one transaction.

Then the log is trimmed to that position.

A follower applies the checkpoints of its leader's flushes in the same way (`shard/catalog_follower.py`).
"""

from __future__ import annotations

from millstream.errors import MillstreamError
from millstream.shard.flush.capture import FlushCapture
from millstream.shard.flush.seal import SealedFlushes, indexed
from millstream.shard.flush.store import Stored
from millstream.shard.flush.workers import FlushWorkers
from millstream.shard.parts import ShardParts
from millstream.streams.records import SegmentsReplaced
from millstream.tiers.catalog_rows import MANIFEST_DIGEST, Checkpoint, SealedReplacement
from millstream.units import Milliseconds


class CatalogUpdate:
    def __init__(self, parts: ShardParts, workers: FlushWorkers, sealed: SealedFlushes) -> None:
        self._catalog = parts.catalog
        self._cold = parts.cold
        self._log = parts.log
        self._clock = parts.clock
        self._limits = parts.machine.namespace.limits
        self._workers = workers
        self._sealed = sealed

    async def apply(self, capture: FlushCapture, stored: Stored) -> None:
        """Move the catalog to the captured position, with every flush that is sealed, and trim the log to it."""
        changes, rows = capture.changes, stored.rows
        checkpoint = Checkpoint(
            position=capture.position,
            streams=rows.streams,
            removed=[(incarnation.to_bytes(8, "big"), name) for incarnation, name in capture.removed],
            freed_blobs=[blob.encode() for blob in changes.freed_blobs],
            singletons={**capture.singletons, MANIFEST_DIGEST: stored.manifest_digest},
            trimmed=rows.trimmed,
            flushes=self._sealed.flushes,
            now_ms=self._clock.now_ms(),
            replacements=[await self._indexed(record) for record in capture.replaced],
            producers=changes.producers.rows(),
            producers_before_ms=self._producers_before_ms(),
        )
        await self.write(checkpoint, capture.rows + changes.producers.count)
        self._sealed.applied()
        await self._workers.in_thread(self._log.trim, capture.position)

    async def write(self, checkpoint: Checkpoint, rows: int) -> None:
        """Move the catalog to a checkpoint of about so many rows."""
        try:
            await self._workers.in_thread(self._workers.jobs(rows).write, checkpoint)
        except MillstreamError:
            # The process may have ended just after its transaction.
            if self._catalog.position != checkpoint.position:
                raise

    def _producers_before_ms(self) -> Milliseconds:
        """Producers that have not written since then have expired."""
        expiry_ms = self._limits.producer_expiry_ms
        return Milliseconds(0) if expiry_ms is None else self._clock.now_ms() - expiry_ms

    async def _indexed(self, record: SegmentsReplaced) -> SealedReplacement:
        return SealedReplacement(record.replaced, [await indexed(self._cold, segment) for segment in record.segments])
