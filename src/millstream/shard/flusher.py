"""Flushing: the log up to a position becomes cold, and the catalog moves to that position.

A flush freezes the state at a position P without stopping anything: a stream that is about to change is encoded
first (`StateMachine.before_change`), the others in slices between requests. Then, in this order:

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
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Final, NamedTuple

from millstream.clock import Clock, monotonic_seconds
from millstream.errors import MillstreamError
from millstream.log.interface import Log
from millstream.measures import ShardMeasures
from millstream.shard.committer import Committer
from millstream.streams.machine import StateMachine
from millstream.streams.records import SegmentRef, SegmentSealed, SegmentsReplaced
from millstream.tiers.blobs import Blobs
from millstream.tiers.catalog import (
    Catalog,
    Checkpoint,
    EncodedStream,
    SealedFlush,
    SealedReplacement,
    SealedSegment,
    encode_key,
    encode_singletons,
    encode_stream,
)
from millstream.tiers.cold import ColdTier, manifest_path, notes_path, segment_path
from millstream.tiers.hot import HotTier
from millstream.tiers.journal import Journals
from millstream.tiers.manifests import (
    FeedNote,
    Manifest,
    ManifestFlush,
    ManifestStream,
    Replacement,
    encode_manifest,
    encode_notes,
    manifest_format,
)
from millstream.tiers.segments import EncodedSegment, StreamRun, encode_segment

logger = logging.getLogger("millstream.flush")

SLICE_STREAMS: Final = 256
SEGMENT_BYTES: Final = 64 << 20
RETRY_SECONDS: Final = (1.0, 30.0)
MANIFESTS_PER_FULL: Final = 256
FULL_PART_STREAMS: Final = 50_000
POLL_SECONDS: Final = 0.25


class FlushLimits(NamedTuple):
    interval_seconds: float
    flush_bytes: int
    keep_bytes: int  # flushed messages stay in memory as long as all of memory's messages take no more than this
    pressure_bytes: int  # when memory's messages take more than this, a flush is due at once
    resident_streams_max: int


class _Frozen(NamedTuple):
    """The state at a position, and what leads up to it."""

    position: int
    first_position: int
    rows: list[EncodedStream]
    removed: list[tuple[int, bytes]]
    freed_blobs: list[str]
    trimmed: list[tuple[int, int]]
    singletons: dict[bytes, bytes]
    runs: list[StreamRun]
    notes: list[FeedNote]
    incarnations: set[int]
    unflushed_bytes: int
    removed_segments: list[str]
    replaced: list[SegmentsReplaced]
    records_applied: int


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
        # Segments that are sealed but not in the catalog yet, with their indexes.
        self._sealed: list[SealedFlush] = []
        # Segments about to be deleted: the next manifest says so first.
        self.removed_segments: list[str] = []
        self._records_flushed = 0
        # Every object this process has written: whatever else tells of it, none of them is a leftover.
        self.made: set[str] = set()
        # What was flushed and is still in memory, oldest first: a position and the streams it concerns.
        self._kept: deque[tuple[int, set[int]]] = deque()
        self._last_flush_ms = clock.now_ms()
        self.failure: str | None = None
        self.flush_count = 0
        self.measures = ShardMeasures()
        self._manifests_since_full = 0
        self.can_evict: Callable[[int], bool] = lambda incarnation: True

    async def index_sealed(self) -> None:
        """Read the indexes of what was sealed before a crash and did not reach the catalog."""
        for record in list(self._machine.sealed):
            if record.through <= self._catalog.position:
                self._machine.sealed.remove(record)  # replayed, but in the catalog already
                continue
            segments = []
            for segment in record.segments:
                footer = await self._cold.footer(segment)
                segments.append(SealedSegment(segment, footer.extents))
            self._sealed.append(SealedFlush(record.through, record.first, record.notes, segments))
            self._machine.sealed.remove(record)

    async def run_forever(self) -> None:
        """Flush by age, by bytes and by pressure; after a failure, later and later."""
        delay, slowest = RETRY_SECONDS
        while True:
            await asyncio.sleep(POLL_SECONDS)
            if not self._is_due():
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

    def _is_due(self) -> bool:
        if self._committer.failure is not None:
            return False  # nothing can be committed any more
        if self._hot.unflushed_bytes >= self._limits.flush_bytes:
            return True
        if self._hot.bytes > self._limits.pressure_bytes and self._hot.unflushed:
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
            frozen = self._freeze()
            try:
                await self._gather(frozen)
                flush, manifest = await self._store(frozen)
                await self._seal(frozen, flush, manifest)
                await self._commit(frozen)
            except BaseException:
                self._thaw(frozen)
                self.measures.flush_failures += 1
                raise
            finally:
                self._machine.removing = {}
                self._machine.frozen = {}
            await self.release(frozen.position, frozen.incarnations)
            await self._delete_freed_blobs(frozen)
            self._last_flush_ms = self._clock.now_ms()
            self.failure = None
            self.flush_count += 1
            self.measures.flush_seconds.observe(monotonic_seconds() - started)
            self._cold.memory_was_used()
            self._records_flushed = frozen.records_applied
            await self._consolidate()
            return frozen.position

    # -- freezing ------------------------------------------------------------------------------------------

    def _freeze(self) -> _Frozen:
        """Mark the present as the state to be stored; nothing is encoded yet."""
        machine, hot = self._machine, self._hot
        position = self._committer.applied_position
        first_position = max(machine.flushed, self._catalog.position)
        rows: list[EncodedStream] = []
        machine.frozen = dict(machine.dirty)
        machine.freezing, machine.dirty = machine.dirty, {}
        machine.removing, machine.removed = machine.removed, {}
        machine.before_change = lambda stream: rows.append(encode_stream(stream))
        freed_blobs, machine.freed_blobs = machine.freed_blobs, []
        incarnations, hot.unflushed = hot.unflushed, set()
        unflushed_bytes, hot.unflushed_bytes = hot.unflushed_bytes, 0
        removed_segments, self.removed_segments = self.removed_segments, []
        replaced, machine.replaced = machine.replaced, []
        return _Frozen(
            position=position,
            first_position=first_position,
            rows=rows,
            removed=[(incarnation, encode_key(key)) for incarnation, key in machine.removing.items()],
            freed_blobs=freed_blobs,
            trimmed=[
                (stream.incarnation, stream.earliest)
                for stream in machine.frozen.values()
                if stream.earliest and not stream.forks
            ],
            singletons=encode_singletons(machine),
            runs=[],
            notes=[
                FeedNote(bucket, at + note.after, note.event, note.stream, note.at_ms, note.offset, note.content_type)
                for bucket, at, note in self._journals.notes_between(first_position, position)
            ],
            incarnations=incarnations,
            unflushed_bytes=unflushed_bytes,
            removed_segments=removed_segments,
            replaced=replaced,
            records_applied=machine.records_applied,
        )

    async def _gather(self, frozen: _Frozen) -> None:
        """Encode the frozen rows and collect the messages, a slice at a time between requests."""
        freezing = self._machine.freezing
        while freezing:
            for _ in range(min(SLICE_STREAMS, len(freezing))):
                frozen.rows.append(encode_stream(freezing.popitem()[1]))
            await asyncio.sleep(0)
        for count, incarnation in enumerate(frozen.incarnations, 1):
            run = self._run(incarnation, frozen.first_position, frozen.position)
            if run is not None:
                frozen.runs.append(run)
            if count % SLICE_STREAMS == 0:
                await asyncio.sleep(0)

    def _run(self, incarnation: int, first_position: int, position: int) -> StreamRun | None:
        """A stream's messages between two positions; they may be gone if the stream is."""
        tail = self._hot.tails.get(incarnation)
        stream = self._machine.by_incarnation(incarnation)
        if tail is None or stream is None:
            return None
        chosen = tail.between(first_position, position)
        if not chosen:
            return None
        first, stop = chosen.start, chosen.stop
        return StreamRun(
            stream.key,
            incarnation,
            stream.content_type,
            tail.message_start(first),
            tail.messages[first:stop],
            tail.ends[first:stop],
            tail.positions[first:stop],
            tail.times[first:stop],
        )

    def _thaw(self, frozen: _Frozen) -> None:
        """The flush failed: all of it is still to be done."""
        machine, hot = self._machine, self._hot
        machine.freezing = {}
        machine.removed = machine.removing | machine.removed
        machine.freed_blobs = frozen.freed_blobs + machine.freed_blobs
        machine.dirty = {i: s for i, s in machine.frozen.items() if i not in machine.removed} | machine.dirty
        hot.unflushed |= {incarnation for incarnation in frozen.incarnations if incarnation in hot.tails}
        hot.unflushed_bytes += frozen.unflushed_bytes
        self.removed_segments += frozen.removed_segments
        machine.replaced = frozen.replaced + machine.replaced

    # -- storing -------------------------------------------------------------------------------------------

    async def _store(self, frozen: _Frozen) -> tuple[SealedFlush, str]:
        """Put everything that is new into the object store; returns it with the name of its manifest."""
        segments: list[SealedSegment] = []
        written: list[str] = []
        loop = asyncio.get_running_loop()

        async def put(path: str, data: bytes) -> str:
            written.append(path)
            self.made.add(path)
            await self._cold.objects.put(path, data)
            return path

        try:
            for bucket, runs in _segments_of(frozen.runs):
                encoded = await loop.run_in_executor(self.thread, encode_segment, bucket, self._shard, runs)
                first, random = encoded.info.first_position, self._clock.random_bytes(8)
                path = await put(segment_path(bucket, runs[0].times[0], self._shard, first, random), encoded.data)
                segments.append(SealedSegment(_reference(path, encoded), encoded.extents))
            notes = ""
            if frozen.notes:
                notes = notes_path(self._shard, frozen.position, self._clock.random_bytes(8))
                await put(notes, encode_notes(frozen.notes))
            flush = SealedFlush(frozen.position, frozen.first_position, notes, segments)
            manifest = manifest_path(self._shard, frozen.position, self._clock.random_bytes(8))
            await put(manifest, encode_manifest(self._manifest(frozen, flush)))
        except Exception:  # one that is given up leaves them to the next start: the store may be what takes so long
            await self._discard(written)
            raise
        return flush, manifest

    async def _discard(self, paths: list[str]) -> None:
        for path in paths:
            try:
                await self._cold.objects.delete(path)
            except MillstreamError:
                return  # the store is down; what is left there is found and removed at the next start

    def _manifest(self, frozen: _Frozen, flush: SealedFlush) -> Manifest:
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
            frozen.removed_segments,
            [
                ManifestStream(int.from_bytes(row.incarnation, "big"), row.name, row.row, row.expires, row.blob)
                for row in frozen.rows
            ],
            frozen.removed,
            frozen.trimmed,
            {name.decode(): row for name, row in frozen.singletons.items()},
            replacements,
        )

    async def _seal(self, frozen: _Frozen, flush: SealedFlush, manifest: str) -> None:
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

    async def _commit(self, frozen: _Frozen) -> None:
        replacements = [await self._indexed(record) for record in frozen.replaced]
        flushes, self._sealed = self._sealed, []
        checkpoint = Checkpoint(
            frozen.position,
            frozen.rows,
            [(incarnation.to_bytes(8, "big"), name) for incarnation, name in frozen.removed],
            [blob.encode() for blob in frozen.freed_blobs],
            frozen.singletons,
            frozen.trimmed,
            flushes,
            self._clock.now_ms(),
            replacements,
        )
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self.thread, self._catalog.write, checkpoint)
        except BaseException:
            self._sealed = flushes + self._sealed
            raise
        await loop.run_in_executor(self.thread, self._log.trim, frozen.position)

    async def _indexed(self, record: SegmentsReplaced) -> SealedReplacement:
        segments = [SealedSegment(one, (await self._cold.footer(one)).extents) for one in record.segments]
        return SealedReplacement(record.replaced, segments)

    async def _delete_freed_blobs(self, frozen: _Frozen) -> None:
        for blob in frozen.freed_blobs:
            try:
                await self._blobs.delete(blob)
            except MillstreamError as error:
                logger.warning("a blob could not be deleted; the next start will do it: %s", error)

    # -- letting go ------------------------------------------------------------------------------------------

    async def release(self, position: int, incarnations: set[int]) -> None:
        """The catalog has what these streams held before a position: let go of the oldest that memory is short of."""
        self._kept.append((position, incarnations))
        while self._kept and self._hot.bytes > self._limits.keep_bytes:
            position, incarnations = self._kept.popleft()
            self._journals.drop_before(position)
            for count, incarnation in enumerate(incarnations, 1):
                self._hot.release(incarnation, position)
                if count % SLICE_STREAMS == 0:
                    await asyncio.sleep(0)
        await self._evict()

    async def _evict(self) -> None:
        """Keep no more streams in memory than allowed; those without messages there go first."""
        excess = self._machine.resident_count() - self._limits.resident_streams_max
        if excess <= 0:
            return
        for count, stream in enumerate(list(self._machine.resident()), 1):
            if stream.incarnation not in self._hot.tails and self.can_evict(stream.incarnation):
                excess -= self._machine.evict(stream)
                if excess <= 0:
                    return
            if count % SLICE_STREAMS == 0:
                await asyncio.sleep(0)

    # -- full manifests --------------------------------------------------------------------------------------

    async def _consolidate(self) -> None:
        """Once in a while write the whole catalog as a full manifest, and remove those before it."""
        self._manifests_since_full += 1
        if self._manifests_since_full < MANIFESTS_PER_FULL:
            return
        loop = asyncio.get_running_loop()
        random = self._clock.random_bytes(8)
        parts = self._catalog.dump(FULL_PART_STREAMS, self._shard)
        through = 0
        while (part := await loop.run_in_executor(self.thread, next, parts, None)) is not None:
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
        self.thread.shutdown()


def _segments_of(runs: list[StreamRun]) -> Iterator[tuple[str, list[StreamRun]]]:
    """The runs by bucket and day, cut so that no segment grows beyond its limit."""
    groups: dict[tuple[str, str], list[StreamRun]] = {}
    for run in runs:
        for piece in _by_day(run):
            day = datetime.fromtimestamp(piece.times[0] / 1000, UTC).date().isoformat()
            groups.setdefault((run.key.bucket, day), []).append(piece)
    for (bucket, _), pieces in sorted(groups.items()):
        pieces.sort(key=lambda run: (run.key.stream, run.incarnation, run.start))
        chosen: list[StreamRun] = []
        size = 0
        for piece in pieces:
            length = piece.ends[-1] - piece.start
            if chosen and size + length > SEGMENT_BYTES:
                yield bucket, chosen
                chosen, size = [], 0
            chosen.append(piece)
            size += length
        yield bucket, chosen


def _by_day(run: StreamRun) -> Iterator[StreamRun]:
    """A run cut at midnights; nearly always one piece."""
    day_ms = 86_400_000
    first = 0
    while first < len(run.times):
        midnight = (run.times[first] // day_ms + 1) * day_ms
        stop = bisect_right(run.times, midnight - 1, first)
        stop = max(stop, first + 1)
        if first == 0 and stop == len(run.times):
            yield run
            return
        yield run._replace(
            start=run.ends[first - 1] if first else run.start,
            messages=run.messages[first:stop],
            ends=run.ends[first:stop],
            positions=run.positions[first:stop],
            times=run.times[first:stop],
        )
        first = stop


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


async def find_orphans(
    cold: ColdTier,
    catalog: Catalog,
    flusher: Flusher,
    shard: int,
    started_at: int,
    is_blob_known: Callable[[str], bool],
    modified_before_ms: float,
) -> list[str]:
    """The objects that a crash left behind: those nothing refers to and this process has not written.

    `started_at` is the catalog's position at the start: a manifest that reaches further and was not sealed describes
    a flush that never was. They come first, so that no manifest ever names a segment that is gone. Other shards'
    objects are none of ours.
    """
    known = {row.segment.path for _, row in catalog.segments()}
    known |= {flush.notes for _, flush in catalog.flushes()}
    known |= flusher.sealed_paths
    found = []
    async for entry in cold.objects.list(f"manifests/{shard:04d}/"):
        position = int(entry.path.rpartition("/")[2].partition("-")[0])
        if position > started_at and entry.path not in known and entry.path not in flusher.made:
            found.append(entry)
    for prefix in ("segments/", f"notes/{shard:04d}/"):
        async for entry in cold.objects.list(prefix):
            owner = entry.path.rpartition("/")[2].partition("-")[0]
            is_ours = prefix != "segments/" or not owner.isdigit() or int(owner) == shard
            if is_ours and entry.path not in known and entry.path not in flusher.made:
                found.append(entry)
    async for entry in cold.objects.list("snapshots/"):
        if not is_blob_known(entry.path.removeprefix("snapshots/")):
            found.append(entry)
    return [entry.path for entry in found if entry.modified_ms < modified_before_ms]
