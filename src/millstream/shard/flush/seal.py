"""Seal, the third step of a flush: one record in the log makes its objects count.

Until it is applied, a flush is sealed but not in the catalog. `SealedFlushes` has those of which that is so, with the
indexes of their segments: of a flush of this process they are at hand, of one before a crash they are read from the
segments' footers.
"""

from __future__ import annotations

from typing import Final

from millstream.shard.flush.capture import FlushCapture
from millstream.shard.flush.store import Stored
from millstream.shard.parts import ShardParts
from millstream.streams.records import SegmentRef, SegmentSealed
from millstream.tiers.catalog_rows import SealedFlush, SealedSegment
from millstream.tiers.cold import ColdTier
from millstream.tiers.manifests import read_manifest
from millstream.tiers.segments import encode_extents

# A record names at most so many segments; those of a larger flush are in its manifest, which may be of any size.
SEALED_SEGMENTS_MAX: Final = 1024


class SealedFlushes:
    def __init__(self, parts: ShardParts) -> None:
        self._machine = parts.machine
        self._catalog = parts.catalog
        self._cold = parts.cold
        self._committer = parts.committer
        self._ownership = parts.ownership
        self._clock = parts.clock
        # Oldest first.
        self.flushes: list[SealedFlush] = []

    async def seal(self, capture: FlushCapture, stored: Stored) -> None:
        # Whoever owns the store by now has seen the manifest if this passes: it was there before they came.
        await self._ownership.check()
        flush = stored.flush
        segments = [sealed.segment for sealed in flush.segments]
        if len(segments) > SEALED_SEGMENTS_MAX:
            segments = []
        record = SegmentSealed(
            capture.first_position, capture.position, self._clock.now_ms(), stored.manifest_path, flush.notes, segments
        )
        # A record that is refused may be in the log all the same: what it names stays, and is a leftover if it is not.
        await self._committer.commit(record)
        # Applying the record has noted it as sealed without an index; here the index is at hand.
        self._machine.forget_sealed(flush.through)
        self.flushes.append(flush)

    def applied(self) -> None:
        """The catalog has all of them."""
        self.flushes = []

    async def read_indexes(self) -> None:
        """Read the indexes of what was sealed before a crash and did not reach the catalog."""
        for record in list(self._machine.sealed):
            if record.through > self._catalog.position:  # if not, it was replayed, and is in the catalog already
                named = record.segments or await self._segments_in(record.manifest)
                segments = [await indexed(self._cold, segment) for segment in named]
                self.flushes.append(SealedFlush(record.through, record.first, record.notes, segments))
            self._machine.forget_sealed(record.through)

    async def _segments_in(self, path: str) -> list[SegmentRef]:
        """The segments of the flush that a manifest was written for, which is the last it names."""
        manifest, _ = read_manifest(await self._cold.objects.get(path), path)
        return manifest.flushes[-1].segments if manifest.flushes else []

    @property
    def paths(self) -> set[str]:
        """The objects of flushes and compactions that are sealed but not in the catalog yet."""
        paths = {path for record in self._machine.sealed for path in (record.manifest, record.notes)}
        paths |= {segment.path for record in self._machine.sealed for segment in record.segments}
        paths |= {segment.path for record in self._machine.replaced for segment in record.segments}
        paths |= {flush.notes for flush in self.flushes}
        return paths | {sealed.segment.path for flush in self.flushes for sealed in flush.segments}


async def indexed(cold: ColdTier, segment: SegmentRef) -> SealedSegment:
    """A segment with its index, from its footer."""
    footer = await cold.footer(segment)
    return SealedSegment(segment, encode_extents(footer.extents), [bucket for bucket, _ in footer.info.shared_by])
