"""Flushing: the log up to a position becomes cold, and the catalog moves to that position.

A flush captures the state at a position P without stopping anything (`flush_capture.py`). Then, in this order:

1. the messages before P go out as Parquet segments, and the changed rows as a manifest;
2. a `SegmentSealed` record commits them to the log, if the object store is still this server's (`ownership.py`);
3. the catalog takes rows, index and position in one transaction;
4. the log is trimmed to P and memory is released.

A crash anywhere leaves the old state or the new one: before 2 the objects are orphans, after 2 replay finds the
record and reads the index from the segments' own footers.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from millstream.clock import monotonic_seconds
from millstream.errors import Corrupt, MillstreamError, NotFound
from millstream.shard.flush_capture import SLICE_STREAMS, FlushCapture
from millstream.shard.parts import ShardParts
from millstream.shard.uploads import Uploads
from millstream.slices import batched
from millstream.streams.records import SegmentRef, SegmentSealed, SegmentsReplaced
from millstream.streams.state import Stream
from millstream.tiers.catalog_rows import (
    MANIFEST_DIGEST,
    Checkpoint,
    SealedFlush,
    SealedReplacement,
    SealedSegment,
)
from millstream.tiers.checked import sealed_digest
from millstream.tiers.cold import manifest_path, notes_path, segment_path
from millstream.tiers.flush_jobs import FlushInput, FlushJobs, LocalJobs, Rows
from millstream.tiers.flush_process import FlushProcess
from millstream.tiers.manifests import (
    FORMAT,
    Manifest,
    ManifestFlush,
    Replacement,
    encode_manifest,
    encode_notes,
    read_manifest,
)
from millstream.tiers.segment_encoder import EncodedSegment
from millstream.tiers.segments import encode_extents
from millstream.tiers.stored_names import list_ours

logger = logging.getLogger("millstream.flush")

RETRY_SECONDS: Final = (1.0, 30.0)
MANIFESTS_PER_FULL: Final = 256
FULL_PART_STREAMS: Final = 50_000
POLL_SECONDS: Final = 0.25
# So many changed streams are flushed, however little they hold: each is a page of the catalog, and state in memory.
FLUSH_STREAMS: Final = 32_768
# So many streams and messages are for a process of their own, which ends when it has had nothing to do for so long.
PROCESS_ROWS: Final = 2048
PROCESS_IDLE_SECONDS: Final = 60.0
# So long after memory was short, or a flush has failed, the process is no longer modest.
URGENT_SECONDS: Final = 600.0
# A record names at most so many segments; those of a larger flush are in its manifest, which may be of any size.
SEALED_SEGMENTS_MAX: Final = 1024
# What a flush whose streams are still in memory costs beside them.
KEPT_FLUSH_BYTES: Final = 256
# So many streams more must be in memory before it is looked again which of them can be spared.
SPARE_STREAMS: Final = 4096

T = TypeVar("T")


class FlushLimits(NamedTuple):
    interval_seconds: float
    flush_bytes: int
    keep_bytes: int  # flushed messages stay in memory as long as all of memory's messages take no more than this
    pressure_bytes: int  # when memory's messages take more than this, a flush is due at once
    resident_streams_max: int


class Stored(NamedTuple):
    """A flush that is in the object store, and is to be sealed."""

    flush: SealedFlush
    manifest: str
    digest: bytes
    rows: Rows


class Flusher:
    def __init__(self, parts: ShardParts, limits: FlushLimits) -> None:
        self._parts = parts
        self._shard = parts.number
        self._ownership = parts.ownership
        self._machine = parts.machine
        self._namespace = parts.machine.namespace
        self._hot = parts.hot
        self._journals = parts.journals
        self._catalog = parts.catalog
        self._cold = parts.cold
        self._blobs = parts.blobs
        self._log = parts.log
        self._committer = parts.committer
        self._clock = parts.clock
        self._budget = parts.budget
        self._measures = parts.measures
        # Streams that somebody listens to stay in memory whatever their state.
        self._pinned = parts.listeners
        self._limits = limits
        self.lock = asyncio.Lock()
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="millstream-flush")
        self._local = LocalJobs(parts.catalog)
        self._process = FlushProcess(parts.catalog)
        # Ages are by the monotonic clock: the wall clock may be set.
        self._process_used_at: float | None = None
        self._urgent_until = float("-inf")
        # Segments that are sealed but not in the catalog yet, with their indexes.
        self._sealed: list[SealedFlush] = []
        # Segments about to be deleted: the next manifest says so first.
        self.removed_segments: list[str] = []
        self._records_flushed = 0
        # What the flush under way has put into the store, and what compactions propose: nothing else knows of them yet.
        self.made: set[str] = set()
        self.proposed: set[str] = set()
        # What was flushed and is still in memory, oldest first: a position and the streams it concerns, by incarnation,
        # so that those which are deleted meanwhile are not held.
        self._kept: deque[tuple[int, array[int]]] = deque()
        # As many streams were in memory when it was last found that none of them can be spared.
        self._none_to_spare = 0
        self._last_flush_at = parts.clock.monotonic()
        self.failure: str | None = None
        self.flush_count = 0
        self._manifests_since_full = 0

    async def index_sealed(self) -> None:
        """Read the indexes of what was sealed before a crash and did not reach the catalog."""
        for record in list(self._machine.sealed):
            if record.through <= self._catalog.position:
                self._machine.forget_sealed(record.through)  # replayed, but in the catalog already
                continue
            segments = []
            for segment in record.segments or await self._named_by(record.manifest):
                footer = await self._cold.footer(segment)
                shared_by = [one for one, _ in footer.info.shared_by]
                segments.append(SealedSegment(segment, encode_extents(footer.extents), shared_by))
            self._sealed.append(SealedFlush(record.through, record.first, record.notes, segments))
            self._machine.forget_sealed(record.through)

    async def _named_by(self, manifest: str) -> list[SegmentRef]:
        """The segments of the flush that a manifest was written for, which is the last it tells of."""
        found, _ = read_manifest(await self._cold.objects.get(manifest), manifest)
        return found.flushes[-1].segments if found.flushes else []

    async def run_forever(self) -> None:
        """Flush by age, by bytes, by streams and by pressure; after a failure, later and later."""
        delay, slowest = RETRY_SECONDS
        while True:
            await asyncio.sleep(POLL_SECONDS)
            if not self._is_due():
                await self._rest()
                await self._evict_excess()
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
        """Give the process's memory back when it has not been needed for a while."""
        used_at = self._process_used_at
        if used_at is not None and self._clock.monotonic() - used_at > PROCESS_IDLE_SECONDS:
            self._process_used_at = None
            async with self.lock:
                await self.in_thread(self._process.close)

    def _is_due(self) -> bool:
        if self._committer.failure is not None or not self._ownership.is_settled:
            return False  # nothing can be committed, or nobody knows yet whether the store is ours
        unflushed = self._hot.unflushed
        if max(len(unflushed.streams), len(self._namespace.changed)) >= FLUSH_STREAMS:
            return True
        if unflushed.bytes >= self._limits.flush_bytes:
            return True
        if self._budget.used > self._limits.pressure_bytes and (
            unflushed or self._namespace.changed or self._namespace.removed
        ):
            return True
        age_seconds = self._clock.monotonic() - self._last_flush_at
        return age_seconds >= self._limits.interval_seconds and self._has_changes()

    def _has_changes(self) -> bool:
        return bool(
            self._machine.records_applied != self._records_flushed
            or self._hot.unflushed
            or self._sealed
            or self.removed_segments
            or self._namespace.producers.has_changes
        )

    @property
    def sealed_paths(self) -> set[str]:
        """The objects of flushes that are sealed but not in the catalog yet."""
        paths = {path for record in self._machine.sealed for path in (record.manifest, record.notes)}
        paths |= {segment.path for record in self._machine.sealed for segment in record.segments}
        paths |= {flush.notes for flush in self._sealed}
        paths |= {segment.path for record in self._machine.replaced for segment in record.segments}
        return paths | {sealed.segment.path for flush in self._sealed for sealed in flush.segments}

    async def flush(self) -> int:
        """Make everything applied so far cold; returns the position the catalog then reflects."""
        async with self.lock:
            if not self._has_changes():
                return self._catalog.position
            started = monotonic_seconds()
            try:
                # A claim that is still to be made is a record too: it comes before the position, so that it is flushed,
                # and a store that does not answer costs no capture.
                await self._ownership.check()
                await self.index_sealed()
            except BaseException:
                self._count_failure()
                raise
            first_position = max(self._machine.flushed, self._catalog.position)
            capture = FlushCapture(self._parts, first_position, self._committer.applied_position)
            removed_segments, self.removed_segments = self.removed_segments, []
            try:
                await capture.encode()
                stored = await self._store(capture, removed_segments)
                await self._seal(capture, stored)
                await self._apply(capture, stored)
            except BaseException:
                capture.roll_back()
                self.removed_segments += removed_segments
                self._count_failure()
                raise
            finally:
                self.made.clear()
            capture.commit()
            await self.release(capture.position, capture.unflushed.streams)
            await self._delete_freed_blobs(capture)
            self._last_flush_at = self._clock.monotonic()
            self.failure = None
            self.flush_count += 1
            self._measures.flush_seconds.observe(monotonic_seconds() - started)
            self._cold.memory_was_used()
            self._records_flushed = capture.records_applied
            await self._consolidate()
            return capture.position

    def _count_failure(self) -> None:
        self._urgent_until = self._clock.monotonic() + URGENT_SECONDS
        self._measures.flush_failures += 1

    # -- storing -------------------------------------------------------------------------------------------

    async def _store(self, capture: FlushCapture, removed_segments: list[str]) -> Stored:
        """Put everything that is new into the object store."""
        sealed: list[SealedSegment] = []
        written: list[str] = []

        async def put(path: str, data: bytes | memoryview) -> None:
            written.append(path)
            self.made.add(path)
            await self._cold.objects.put(path, data)

        try:
            jobs = self._jobs(capture.rows)
            removed = [incarnation for incarnation, _ in capture.removed]
            span = capture.first_position, capture.position
            work = FlushInput(self._shard, *span, capture.changes.encoded, removed, capture.unflushed)
            rows, segments = await self.in_thread(jobs.begin, work)
            async with Uploads(put) as uploads:
                while (encoded := await self.in_thread(next, segments, None)) is not None:
                    info, random = encoded.info, self._clock.random_bytes(8)
                    path = segment_path(info.bucket, info.first_at_ms, self._shard, info.first_position, random)
                    await uploads.put(path, encoded.data)
                    sealed.append(
                        SealedSegment(_reference(path, encoded), encoded.extents, [one for one, _ in info.shared_by])
                    )
            notes = ""
            if capture.notes:
                notes = notes_path(self._shard, capture.position, self._clock.random_bytes(8))
                await put(notes, encode_notes(capture.notes))
            flush = SealedFlush(capture.position, capture.first_position, notes, sealed)
            manifest = manifest_path(self._shard, capture.position, self._clock.random_bytes(8))
            told = self._manifest(capture, flush, removed_segments, rows.trimmed)
            encoded_manifest = encode_manifest(told, rows.streams)
            await put(manifest, encoded_manifest)
        except Exception:  # one that is given up leaves them to the next start: the store may be what takes so long
            # Once the manifest may be there, somebody may have restored from it: what it names is not ours to delete.
            if not written or not written[-1].startswith("manifests/"):
                await self._discard(written)
            raise
        return Stored(flush, manifest, sealed_digest(encoded_manifest), rows)

    def _jobs(self, rows: int) -> FlushJobs:
        """Where so many streams and messages are gone through."""
        if rows < PROCESS_ROWS or self._process.is_impossible:
            return self._local
        now = self._process_used_at = self._clock.monotonic()
        if self._budget.used > self._limits.pressure_bytes:
            self._urgent_until = now + URGENT_SECONDS
        self._process.is_urgent = now < self._urgent_until
        return self._process

    async def in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.thread, work, *arguments)

    async def _discard(self, paths: list[str]) -> None:
        for path in paths:
            try:
                await self._cold.objects.delete(path)
            except MillstreamError:
                return  # the store is down; what is left there is found and removed at the next start

    def _manifest(
        self, capture: FlushCapture, flush: SealedFlush, removed_segments: list[str], trimmed: list[tuple[int, int]]
    ) -> Manifest:
        """All of it but its rows."""
        return Manifest(
            FORMAT,
            self._shard,
            self._catalog.position,
            capture.position,
            self._clock.now_ms(),
            1,
            1,
            [
                ManifestFlush(one.first_position, one.through, one.notes, [sealed.segment for sealed in one.segments])
                for one in (*self._sealed, flush)
            ],
            removed_segments,
            [],
            capture.removed,
            trimmed,
            {name.decode(): row for name, row in capture.singletons.items()},
            [Replacement(record.replaced, record.segments) for record in capture.replaced],
            [],
            self._ownership.epoch,
            self._catalog.manifest_digest,
            capture.changes.producers.rows(),
        )

    async def _seal(self, capture: FlushCapture, stored: Stored) -> None:
        flush, manifest, *_ = stored
        # Whoever owns the store by now has seen the manifest if this passes: it was there before they came.
        await self._ownership.check()
        segments = [sealed.segment for sealed in flush.segments]
        if len(segments) > SEALED_SEGMENTS_MAX:
            segments = []
        now_ms = self._clock.now_ms()
        record = SegmentSealed(capture.first_position, capture.position, now_ms, manifest, flush.notes, segments)
        outcome = await self._committer.submit_and_wait(record)
        if isinstance(outcome, MillstreamError):
            raise outcome  # it may be in the log all the same: what it names stays, and is a leftover if it is not
        # Applying the record has noted it as sealed without an index; here the index is at hand.
        self._machine.forget_sealed(flush.through)
        self._sealed.append(flush)

    async def _apply(self, capture: FlushCapture, stored: Stored) -> None:
        rows = stored.rows
        replacements = [await self._indexed(record) for record in capture.replaced]
        flushes, self._sealed = self._sealed, []
        checkpoint = Checkpoint(
            capture.position,
            rows.streams,
            [(incarnation.to_bytes(8, "big"), name) for incarnation, name in capture.removed],
            [blob.encode() for blob in capture.changes.freed_blobs],
            {**capture.singletons, MANIFEST_DIGEST: stored.digest},
            rows.trimmed,
            flushes,
            self._clock.now_ms(),
            replacements,
            capture.changes.producers.rows(),
            self._producers_before_ms(),
        )
        try:
            await self.write_catalog(checkpoint, capture.rows + capture.changes.producers.count)
        except BaseException:
            self._sealed = flushes + self._sealed
            raise
        await self.in_thread(self._log.trim, capture.position)

    def _producers_before_ms(self) -> int:
        """Producers that have not written since then have expired."""
        expiry_ms = self._namespace.limits.producer_expiry_ms
        return 0 if expiry_ms is None else self._clock.now_ms() - expiry_ms

    async def write_catalog(self, checkpoint: Checkpoint, rows: int) -> None:
        """Move the catalog to a checkpoint of about so many rows."""
        try:
            await self.in_thread(self._jobs(rows).write, checkpoint)
        except MillstreamError:
            # The process may have gone just after its last deed.
            if self._catalog.position != checkpoint.position:
                raise

    async def _indexed(self, record: SegmentsReplaced) -> SealedReplacement:
        segments = []
        for one in record.segments:
            footer = await self._cold.footer(one)
            shared_by = [bucket for bucket, _ in footer.info.shared_by]
            segments.append(SealedSegment(one, encode_extents(footer.extents), shared_by))
        return SealedReplacement(record.replaced, segments)

    async def _delete_freed_blobs(self, capture: FlushCapture) -> None:
        for blob in capture.changes.freed_blobs:
            try:
                await self._blobs.delete(blob)
            except MillstreamError as error:
                logger.warning("a blob could not be deleted; the next start will do it: %s", error)

    # -- letting go ------------------------------------------------------------------------------------------

    async def release(self, position: int, streams: Sequence[Stream]) -> None:
        """The catalog has what these streams held before a position: let go of the oldest that memory is short of."""
        incarnations = array("q", (stream.incarnation for stream in streams))
        if not incarnations and self._kept:
            _, incarnations = self._kept.pop()
        self._kept.append((position, incarnations))
        while self._kept and self._keeps_too_much():
            position, incarnations = self._kept.popleft()
            self._journals.start_at(position)
            for buckets in batched(self._journals.buckets(), SLICE_STREAMS):
                self._journals.drop(buckets)
                await asyncio.sleep(0)
            for some in batched(incarnations, SLICE_STREAMS):
                resident = [one for one in map(self._namespace.if_resident, some) if one is not None]
                self._hot.release(resident, position)
                self._namespace.evict(resident, self._pinned, self._excess())
                await asyncio.sleep(0)
        self._none_to_spare = 0
        await self._evict_excess()

    def _keeps_too_much(self) -> bool:
        """Whether memory holds more of what is cold than it should, or is short altogether."""
        kept = self._hot.bytes + self._journals.bytes + KEPT_FLUSH_BYTES * len(self._kept)
        return kept > self._limits.keep_bytes or self._budget.used > self._limits.pressure_bytes

    async def _evict_excess(self) -> None:
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

    # -- full manifests --------------------------------------------------------------------------------------

    async def write_full_manifest(self) -> None:
        """Write the whole catalog as a full manifest now: one of those before it is missing, or cannot be read."""
        async with self.lock:
            await self._ownership.check()
            self._manifests_since_full = MANIFESTS_PER_FULL
            await self._consolidate()

    async def _consolidate(self) -> None:
        """Once in a while write the whole catalog as a full manifest, and remove those before it.

        Only what it stands for goes: the manifests that led to it, of this owner's own history.
        """
        self._manifests_since_full += 1
        if self._manifests_since_full < MANIFESTS_PER_FULL:
            return
        random = self._clock.random_bytes(8)
        epoch, state = self._ownership.epoch, self._catalog.manifest_digest
        parts = self._catalog.dump(FULL_PART_STREAMS, self._shard)
        through = 0
        while (part := await self.in_thread(next, parts, None)) is not None:
            through = part.through
            path = manifest_path(self._shard, through, random + part.part.to_bytes(4, "big"))
            signed = msgspec.structs.replace(part, epoch=epoch, previous=state)
            await self._cold.objects.put(path, encode_manifest(signed))
        self._manifests_since_full = 0
        await self._ownership.check()
        folder = f"manifests/{self._shard:04d}/"
        older = [(entry.path, position) async for entry, _, position in list_ours(self._cold.objects, folder)]
        for path, position in older:
            if position > through or f"-{random.hex()}" in path:
                continue
            try:
                _, head = read_manifest(await self._cold.objects.get(path), path)
            except (NotFound, Corrupt) as error:
                logger.warning("a manifest from before the full one stays: %s", error)
                continue
            if self._ownership.since <= head.epoch <= epoch:
                await self._cold.objects.delete(path)

    def close(self) -> None:
        self._process.interrupt()  # a flush that was given up may still wait for it
        self.thread.submit(self._process.close)
        self.thread.shutdown()


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
