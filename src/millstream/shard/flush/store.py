"""Store, the second step of a flush: everything that is new goes into the object store.

The messages become Parquet segments, the events notes, the changed rows a manifest, in this order: the manifest is
written last and names the others. Nothing counts before the flush is sealed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from millstream.errors import MillstreamError
from millstream.shard.flush.capture import FlushCapture
from millstream.shard.flush.unlisted import UnlistedObjects
from millstream.shard.flush.workers import FlushWorkers
from millstream.shard.parts import ShardParts
from millstream.shard.uploads import Uploads
from millstream.streams.records import SegmentRef
from millstream.tiers.catalog_rows import SealedFlush, SealedSegment
from millstream.tiers.checked import sealed_digest
from millstream.tiers.cold import manifest_path, notes_path, segment_path
from millstream.tiers.flush_jobs import FlushInput, Rows
from millstream.tiers.manifests import FORMAT, Manifest, ManifestFlush, Replacement, encode_manifest, encode_notes
from millstream.tiers.segment_encoder import EncodedSegment


class Stored(NamedTuple):
    """A flush that is in the object store, and is to be sealed."""

    flush: SealedFlush
    manifest_path: str
    manifest_digest: bytes
    rows: Rows


class FlushStore:
    def __init__(self, parts: ShardParts, workers: FlushWorkers, unlisted: UnlistedObjects) -> None:
        self._shard = parts.number
        self._clock = parts.clock
        self._catalog = parts.catalog
        self._ownership = parts.ownership
        self._cold = parts.cold
        self._workers = workers
        self._unlisted = unlisted

    async def store(
        self, capture: FlushCapture, sealed: Sequence[SealedFlush], removed_segments: Sequence[str]
    ) -> Stored:
        """Put a capture into the object store. Its manifest also names the flushes that are sealed and not in the
        catalog yet, and the segments that are about to be deleted."""
        written: list[str] = []

        async def put(path: str, data: bytes | memoryview) -> None:
            written.append(path)
            self._unlisted.written_paths.add(path)
            await self._cold.objects.put(path, data)

        try:
            rows, segments = await self._store_segments(capture, Uploads(put))
            notes = ""
            if capture.notes:
                notes = notes_path(self._shard, capture.position, self._clock.random_bytes(8))
                await put(notes, encode_notes(capture.notes))
            flush = SealedFlush(capture.position, capture.first_position, notes, segments)
            manifest = encode_manifest(self._manifest(capture, [*sealed, flush], removed_segments, rows), rows.streams)
            path = manifest_path(self._shard, capture.position, self._clock.random_bytes(8))
            await put(path, manifest)
        except Exception:  # a flush that is cancelled leaves them as leftovers: the store may be what takes so long
            # Once the manifest may be there, somebody may have restored from it: what it names is not ours to delete.
            if not written or not written[-1].startswith("manifests/"):
                await self._discard(written)
            raise
        return Stored(flush, path, sealed_digest(manifest), rows)

    async def _store_segments(self, capture: FlushCapture, uploads: Uploads) -> tuple[Rows, list[SealedSegment]]:
        """Store the messages; returns the rows of the streams that changed, and the segments."""
        removed = [incarnation for incarnation, _ in capture.removed]
        span = capture.first_position, capture.position
        work = FlushInput(self._shard, *span, capture.changes.encoded, removed, capture.unflushed)
        rows, segments = await self._workers.in_thread(self._workers.jobs(capture.rows).begin, work)
        sealed: list[SealedSegment] = []
        async with uploads:
            while (encoded := await self._workers.in_thread(next, segments, None)) is not None:
                info, random = encoded.info, self._clock.random_bytes(8)
                path = segment_path(info.bucket, info.first_at_ms, self._shard, info.first_position, random)
                await uploads.put(path, encoded.data)
                shared_by = [bucket for bucket, _ in info.shared_by]
                sealed.append(SealedSegment(_reference(path, encoded), encoded.extents, shared_by))
        return rows, sealed

    def _manifest(
        self, capture: FlushCapture, flushes: Sequence[SealedFlush], removed_segments: Sequence[str], rows: Rows
    ) -> Manifest:
        """All of it but its rows."""
        return Manifest(
            format=FORMAT,
            shard=self._shard,
            first=self._catalog.position,
            through=capture.position,
            at_ms=self._clock.now_ms(),
            part=1,
            parts=1,
            flushes=[
                ManifestFlush(one.first_position, one.through, one.notes, [sealed.segment for sealed in one.segments])
                for one in flushes
            ],
            removed_segments=list(removed_segments),
            streams=[],
            removed_streams=capture.removed,
            trimmed=rows.trimmed,
            singletons={name.decode(): row for name, row in capture.singletons.items()},
            replacements=[Replacement(record.replaced, record.segments) for record in capture.replaced],
            epoch=self._ownership.epoch,
            previous=self._catalog.manifest_digest,
            producers=capture.changes.producers.rows(),
        )

    async def _discard(self, paths: Sequence[str]) -> None:
        for path in paths:
            try:
                await self._cold.objects.delete(path)
            except MillstreamError:
                return  # the store is down; what is left there is found and removed later


def _reference(path: str, encoded: EncodedSegment) -> SegmentRef:
    info = encoded.info
    return SegmentRef(
        path,
        info.bucket,
        len(encoded.data),
        encoded.checksum,
        info.rows,
        info.payload_bytes,
        info.first_position,
        info.last_position,
        info.first_at_ms,
        info.last_at_ms,
        encoded.footer_bytes,
        encoded.footer_checksum,
    )
