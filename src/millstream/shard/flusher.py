"""Flushing: the log up to a position becomes cold, and the catalog moves to that position.

A flush freezes the state at a position P without stopping anything (`freezing.py`). Then, in this order:

1. the messages before P go out as Parquet segments, and the changed rows as a manifest;
2. a `SegmentSealed` record commits them to the log;
3. the catalog takes rows, index and position in one transaction;
4. the log is trimmed to P and memory is released.

A crash anywhere leaves the old state or the new one: before 2 the objects are orphans, after 2 replay finds the
record and reads the index from the segments' own footers.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Container, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple, TypeVar

from millstream.clock import Clock, monotonic_seconds
from millstream.errors import MillstreamError
from millstream.log.interface import Log
from millstream.measures import ShardMeasures
from millstream.shard.committer import Committer
from millstream.shard.freezing import SLICE_STREAMS, Frozen, encode_rows, freeze, thaw
from millstream.slices import batched
from millstream.streams.machine import StateMachine
from millstream.streams.records import SegmentRef, SegmentSealed, SegmentsReplaced
from millstream.streams.state import Stream
from millstream.tiers.blobs import Blobs
from millstream.tiers.catalog import Catalog
from millstream.tiers.catalog_rows import Checkpoint, SealedFlush, SealedReplacement, SealedSegment
from millstream.tiers.cold import ColdTier, manifest_path, notes_path, segment_path
from millstream.tiers.flush_jobs import FlushInput, FlushJobs, LocalJobs, Rows
from millstream.tiers.flush_process import FlushProcess
from millstream.tiers.hot import HotTier
from millstream.tiers.journal import Journals
from millstream.tiers.manifests import (
    Manifest,
    ManifestFlush,
    Replacement,
    encode_manifest,
    encode_notes,
    manifest_format,
)
from millstream.tiers.segment_encoder import EncodedSegment
from millstream.tiers.segments import encode_extents

logger = logging.getLogger("millstream.flush")

RETRY_SECONDS: Final = (1.0, 30.0)
MANIFESTS_PER_FULL: Final = 256
FULL_PART_STREAMS: Final = 50_000
POLL_SECONDS: Final = 0.25
# So many changed streams are flushed, however little they hold: each is a page of the catalog, and state in memory.
FLUSH_STREAMS: Final = 32_768
# So many streams and messages are for a process of their own, which ends when it has had nothing to do for so long.
PROCESS_ROWS: Final = 2048
PROCESS_IDLE_MS: Final = 60_000
# So long after memory was short, or a flush has failed, the process is no longer modest.
URGENT_MS: Final = 600_000

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
    rows: Rows


class Flusher:
    def __init__(
        self,
        machine: StateMachine,
        hot: HotTier,
        journals: Journals,
        catalog: Catalog,
        cold: ColdTier,
        blobs: Blobs,
        log: Log,
        committer: Committer,
        clock: Clock,
        limits: FlushLimits,
        shard: int = 0,
    ) -> None:
        self._shard = shard
        self._machine = machine
        self._hot = hot
        self._journals = journals
        self._catalog = catalog
        self._cold = cold
        self._blobs = blobs
        self._log = log
        self._committer = committer
        self._clock = clock
        self._limits = limits
        self.lock = asyncio.Lock()
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="millstream-flush")
        self._local = LocalJobs(catalog)
        self._process = FlushProcess(catalog)
        self._process_used_ms = 0
        self._urgent_until_ms = 0
        # Segments that are sealed but not in the catalog yet, with their indexes.
        self._sealed: list[SealedFlush] = []
        # Segments about to be deleted: the next manifest says so first.
        self.removed_segments: list[str] = []
        self._records_flushed = 0
        # Every object this process has written: whatever else tells of it, none of them is a leftover.
        self.made: set[str] = set()
        # What was flushed and is still in memory, oldest first: a position and the streams it concerns.
        self._kept: deque[tuple[int, Sequence[Stream]]] = deque()
        self._last_flush_ms = clock.now_ms()
        self.failure: str | None = None
        self.flush_count = 0
        self.measures = ShardMeasures()
        self._manifests_since_full = 0
        # Streams that stay in memory whatever their state.
        self.pinned: Container[int] = ()

    async def index_sealed(self) -> None:
        """Read the indexes of what was sealed before a crash and did not reach the catalog."""
        for record in list(self._machine.sealed):
            if record.through <= self._catalog.position:
                self._machine.sealed.remove(record)  # replayed, but in the catalog already
                continue
            segments = []
            for segment in record.segments:
                footer = await self._cold.footer(segment)
                segments.append(SealedSegment(segment, encode_extents(footer.extents)))
            self._sealed.append(SealedFlush(record.through, record.first, record.notes, segments))
            self._machine.sealed.remove(record)

    async def run_forever(self) -> None:
        """Flush by age, by bytes, by streams and by pressure; after a failure, later and later."""
        delay, slowest = RETRY_SECONDS
        while True:
            await asyncio.sleep(POLL_SECONDS)
            if not self._is_due():
                await self._rest()
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
        if self._process_used_ms and self._clock.now_ms() - self._process_used_ms > PROCESS_IDLE_MS:
            self._process_used_ms = 0
            async with self.lock:
                await self.in_thread(self._process.close)

    def _is_due(self) -> bool:
        if self._committer.failure is not None:
            return False  # nothing can be committed any more
        unflushed = self._hot.unflushed
        if max(len(unflushed.streams), len(self._machine.dirty)) >= FLUSH_STREAMS:
            return True
        if unflushed.bytes >= self._limits.flush_bytes:
            return True
        if self._hot.bytes > self._limits.pressure_bytes and unflushed:
            return True
        age_ms = self._clock.now_ms() - self._last_flush_ms
        return age_ms >= self._limits.interval_seconds * 1000 and self._has_changes()

    def _has_changes(self) -> bool:
        return bool(
            self._machine.records_applied != self._records_flushed
            or self._hot.unflushed
            or self._sealed
            or self.removed_segments
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
            await self.index_sealed()
            position = self._committer.applied_position
            first_position = max(self._machine.flushed, self._catalog.position)
            frozen = freeze(self._machine, self._hot, self._journals, first_position, position)
            removed_segments, self.removed_segments = self.removed_segments, []
            try:
                await encode_rows(self._machine)
                stored = await self._store(frozen, removed_segments)
                await self._seal(frozen, stored)
                await self._commit(frozen, stored.rows)
            except BaseException:
                thaw(frozen, self._machine, self._hot)
                self.removed_segments += removed_segments
                self._urgent_until_ms = self._clock.now_ms() + URGENT_MS
                self.measures.flush_failures += 1
                raise
            finally:
                self._machine.removing = {}
                self._machine.frozen = {}
            self._hot.forget(frozen.unflushed, frozen.position)
            await self.release(frozen.position, frozen.unflushed.streams)
            await self._delete_freed_blobs(frozen)
            self._last_flush_ms = self._clock.now_ms()
            self.failure = None
            self.flush_count += 1
            self.measures.flush_seconds.observe(monotonic_seconds() - started)
            self._cold.memory_was_used()
            self._records_flushed = frozen.records_applied
            await self._consolidate()
            return frozen.position

    # -- storing -------------------------------------------------------------------------------------------

    async def _store(self, frozen: Frozen, removed_segments: list[str]) -> Stored:
        """Put everything that is new into the object store."""
        sealed: list[SealedSegment] = []
        written: list[str] = []

        async def put(path: str, data: bytes | memoryview) -> None:
            written.append(path)
            self.made.add(path)
            await self._cold.objects.put(path, data)

        try:
            jobs = self._jobs(len(frozen.streams) + len(frozen.unflushed))
            removed = [incarnation for incarnation, _ in frozen.removed]
            span = frozen.first_position, frozen.position
            work = FlushInput(self._shard, *span, frozen.streams, removed, frozen.unflushed)
            rows, segments = await self.in_thread(jobs.begin, work)
            while (encoded := await self.in_thread(next, segments, None)) is not None:
                info, random = encoded.info, self._clock.random_bytes(8)
                path = segment_path(info.bucket, info.first_at_ms, self._shard, info.first_position, random)
                await put(path, encoded.data)
                sealed.append(SealedSegment(_reference(path, encoded), encoded.extents))
            notes = ""
            if frozen.notes:
                notes = notes_path(self._shard, frozen.position, self._clock.random_bytes(8))
                await put(notes, encode_notes(frozen.notes))
            flush = SealedFlush(frozen.position, frozen.first_position, notes, sealed)
            manifest = manifest_path(self._shard, frozen.position, self._clock.random_bytes(8))
            told = self._manifest(frozen, flush, removed_segments, rows.trimmed)
            await put(manifest, encode_manifest(told, rows.streams))
        except Exception:  # one that is given up leaves them to the next start: the store may be what takes so long
            await self._discard(written)
            raise
        return Stored(flush, manifest, rows)

    def _jobs(self, rows: int) -> FlushJobs:
        """Where so many streams and messages are gone through."""
        if rows < PROCESS_ROWS or self._process.is_impossible:
            return self._local
        now_ms = self._process_used_ms = self._clock.now_ms()
        if self._hot.bytes > self._limits.pressure_bytes:
            self._urgent_until_ms = now_ms + URGENT_MS
        self._process.is_urgent = now_ms < self._urgent_until_ms
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
        self, frozen: Frozen, flush: SealedFlush, removed_segments: list[str], trimmed: list[tuple[int, int]]
    ) -> Manifest:
        """All of it but its rows."""
        replacements = [Replacement(record.replaced, record.segments) for record in frozen.replaced]
        return Manifest(
            manifest_format(replacements, []),
            self._shard,
            self._catalog.position,
            frozen.position,
            self._clock.now_ms(),
            1,
            1,
            [
                ManifestFlush(one.first_position, one.through, one.notes, [sealed.segment for sealed in one.segments])
                for one in (*self._sealed, flush)
            ],
            removed_segments,
            [],
            frozen.removed,
            trimmed,
            {name.decode(): row for name, row in frozen.singletons.items()},
            replacements,
        )

    async def _seal(self, frozen: Frozen, stored: Stored) -> None:
        flush, manifest, _ = stored
        segments = [sealed.segment for sealed in flush.segments]
        now_ms = self._clock.now_ms()
        record = SegmentSealed(frozen.first_position, frozen.position, now_ms, manifest, flush.notes, segments)
        outcome = await self._committer.submit_and_wait(record)
        if isinstance(outcome, MillstreamError):
            notes = [flush.notes] if flush.notes else []
            await self._discard([manifest, *notes, *(segment.path for segment in segments)])
            raise outcome
        # Applying the record has noted it as sealed without an index; here the index is at hand.
        self._machine.sealed = [record for record in self._machine.sealed if record.through != flush.through]
        self._sealed.append(flush)

    async def _commit(self, frozen: Frozen, rows: Rows) -> None:
        replacements = [await self._indexed(record) for record in frozen.replaced]
        flushes, self._sealed = self._sealed, []
        checkpoint = Checkpoint(
            frozen.position,
            rows.streams,
            [(incarnation.to_bytes(8, "big"), name) for incarnation, name in frozen.removed],
            [blob.encode() for blob in frozen.freed_blobs],
            frozen.singletons,
            rows.trimmed,
            flushes,
            self._clock.now_ms(),
            replacements,
        )
        try:
            await self.write_catalog(checkpoint, len(frozen.streams) + len(frozen.unflushed))
        except BaseException:
            self._sealed = flushes + self._sealed
            raise
        await self.in_thread(self._log.trim, frozen.position)

    async def write_catalog(self, checkpoint: Checkpoint, rows: int) -> None:
        """Move the catalog to a checkpoint of about so many rows."""
        try:
            await self.in_thread(self._jobs(rows).write, checkpoint)
        except MillstreamError:
            # The process may have gone just after its last deed.
            if self._catalog.position != checkpoint.position:
                raise

    async def _indexed(self, record: SegmentsReplaced) -> SealedReplacement:
        segments = [
            SealedSegment(one, encode_extents((await self._cold.footer(one)).extents)) for one in record.segments
        ]
        return SealedReplacement(record.replaced, segments)

    async def _delete_freed_blobs(self, frozen: Frozen) -> None:
        for blob in frozen.freed_blobs:
            try:
                await self._blobs.delete(blob)
            except MillstreamError as error:
                logger.warning("a blob could not be deleted; the next start will do it: %s", error)

    # -- letting go ------------------------------------------------------------------------------------------

    async def release(self, position: int, streams: Sequence[Stream]) -> None:
        """The catalog has what these streams held before a position: let go of the oldest that memory is short of."""
        self._kept.append((position, streams))
        while self._kept and self._hot.bytes > self._limits.keep_bytes:
            position, streams = self._kept.popleft()
            self._journals.drop_before(position)
            for some in batched(streams, SLICE_STREAMS):
                self._hot.release(some, position)
                self._machine.evict(some, self.pinned, self._excess())
                await asyncio.sleep(0)
        if self._excess() > 0:  # of streams that were only read
            for some in batched(list(self._machine.resident()), SLICE_STREAMS):
                self._machine.evict(some, self.pinned, self._excess())
                if self._excess() <= 0:
                    return
                await asyncio.sleep(0)

    def _excess(self) -> int:
        """How many more streams are in memory than allowed."""
        return self._machine.resident_count() - self._limits.resident_streams_max

    # -- full manifests --------------------------------------------------------------------------------------

    async def _consolidate(self) -> None:
        """Once in a while write the whole catalog as a full manifest, and remove those before it."""
        self._manifests_since_full += 1
        if self._manifests_since_full < MANIFESTS_PER_FULL:
            return
        random = self._clock.random_bytes(8)
        parts = self._catalog.dump(FULL_PART_STREAMS, self._shard)
        through = 0
        while (part := await self.in_thread(next, parts, None)) is not None:
            through = part.through
            path = manifest_path(self._shard, through, random + part.part.to_bytes(4, "big"))
            self.made.add(path)
            await self._cold.objects.put(path, encode_manifest(part))
        self._manifests_since_full = 0
        older = [entry.path async for entry in self._cold.objects.list(f"manifests/{self._shard:04d}/")]
        for path in older:
            position, _, rest = path.rpartition("/")[2].partition("-")
            if int(position) <= through and not rest.startswith(random.hex()):
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
