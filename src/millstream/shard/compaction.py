"""Compaction, the server's part: judge a proposed replacement of segments, and commit it as one record.

A job outside has written new segments and says which old ones they stand for. It is believed in nothing. Before the
record goes to the log, `Proof` has read every row group of the old and the new segments and found that

- every live message of the old segments is in the new ones, with the same bytes, offsets, position, time and
  incarnation (by a 128-bit BLAKE2 digest of each run of rows);
- the new segments hold nothing else but such rows of streams that went meanwhile;
- their index, names and counts say what their rows do, and the files are the ones described, byte for byte (CRC-32).

A crash before the record leaves the old segments in force and the new ones as leftovers; after it, replay finds the
record. The old objects stay for the grace period, so whoever is reading them reads on.
"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NamedTuple

from millstream.errors import Conflict, InvalidRequest, MillstreamError, NotFound, Unavailable
from millstream.shard.flush.flusher import Flusher
from millstream.shard.parts import ShardParts
from millstream.shard.reclaimer import Reclaimer
from millstream.streams.records import SegmentRef, SegmentsReplaced, StreamsTouched
from millstream.tiers.cold import COMPACTED
from millstream.tiers.proof import THREADS, LiveRun, Proof
from millstream.tiers.segments import Footer
from millstream.units import Milliseconds

logger = logging.getLogger("millstream.compaction")

SEGMENTS_MAX: Final = 4_096
RUNS_MAX: Final = 400_000
SLICE_RUNS: Final = 2_000
SWEEP_SECONDS: Final = 600.0
ABANDONED_SECONDS: Final = 3600.0  # what a job wrote and did not propose within this time, it never will


class Proposal(NamedTuple):
    """Segments that shall no longer count, and those that hold their live messages."""

    replaced: list[str]
    segments: list[SegmentRef]


class Compacted(NamedTuple):
    """`was_known` tells that the very same replacement was committed before."""

    replaced: int
    segments: int
    messages: int
    payload_bytes: int
    was_known: bool


class _Old(NamedTuple):
    number: int
    segment: SegmentRef
    footer: Footer


class Compaction:
    def __init__(self, parts: ShardParts, flusher: Flusher, reclaimer: Reclaimer) -> None:
        self._shard = parts.number
        self._machine = parts.machine
        self._catalog = parts.catalog
        self._cold = parts.cold
        self._committer = parts.committer
        self._clock = parts.clock
        self._expiry_clock = parts.expiry_clock
        self._ownership = parts.ownership
        self._measures = parts.measures
        self._flusher = flusher
        self._reclaimer = reclaimer
        self._lock = asyncio.Lock()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="millstream-compaction")
        self._proving: asyncio.Task[Compacted] | None = None

    async def stop(self) -> None:
        """Give up what is being checked; finish what is being committed."""
        if self._proving is not None:
            self._proving.cancel()
        async with self._lock:
            self._threads.shutdown(cancel_futures=True)

    async def commit(self, proposal: Proposal) -> Compacted:
        """Check a proposal and make it true, or refuse it and leave everything as it is. One at a time."""
        _check_form(proposal)
        if self._lock.locked():
            raise Unavailable("another compaction is being checked", code="compaction_busy", retry_after_seconds=5)
        async with self._lock:
            if self._reclaimer.is_tidying:
                # Leftovers of a crash are being looked for, and what this proposal names would look like one.
                raise Unavailable("the server is tidying up the object store", code="tidying", retry_after_seconds=5)
            await self._ownership.check()
            if self._is_committed(proposal):
                return self._summary(proposal, was_known=True)
            with self._flusher.unlisted.proposing(segment.path for segment in proposal.segments):
                await self._prove_and_commit(proposal)
            return self._summary(proposal, was_known=False)

    async def _prove_and_commit(self, proposal: Proposal) -> None:
        self._proving = asyncio.current_task()
        try:
            await self._prove(proposal)
        finally:
            self._proving = None
        self._numbers(proposal)  # again: time has passed
        # From here on it is finished even if whoever asked for it has gone.
        committing = asyncio.ensure_future(self._commit(proposal))
        try:
            await asyncio.shield(committing)
        except asyncio.CancelledError:
            await committing
            raise

    async def _commit(self, proposal: Proposal) -> None:
        record = SegmentsReplaced(self._clock.now_ms(), proposal.replaced, proposal.segments)
        await self._committer.commit(record)
        self._measures.compactions["segments"] += 1
        await self._settle()

    async def sweep_forever(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            if self._committer.failure is not None:
                continue  # another node leads, and tidies up
            try:
                count = await self.sweep(self._expiry_clock.now_ms() - int(ABANDONED_SECONDS * 1000))
                if count:
                    logger.info("removed %d segments that compactions had left behind", count)
            except MillstreamError as error:
                logger.warning("abandoned compactions could not be removed: %s", error)

    async def sweep(self, before_ms: Milliseconds) -> int:
        """Delete compacted segments older than that which were never committed: their job has died."""
        if self._ownership.since:
            return 0  # there are manifests that this history does not know of: only `leftovers.py` asks them
        ours = f"/{self._shard:04d}-"
        async with self._lock:
            known = {row.segment.path for _, row in self._catalog.segments()} | self._flusher.unlisted_paths()
            abandoned = [
                entry.path
                async for entry in self._cold.objects.list("segments/")
                if entry.path.endswith(COMPACTED) and ours in entry.path
                if entry.path not in known and entry.modified_ms < before_ms
            ]
            if abandoned:
                await self._ownership.check()
                # Who still leads after looking has looked at the truth: no other node has committed one of them.
                await self._committer.commit(StreamsTouched({}))
            for path in abandoned:
                await self._cold.objects.delete(path)
            return len(abandoned)

    async def _settle(self) -> None:
        """Bring the catalog up to date; if that fails now, the next flush does it."""
        try:
            await self._flusher.flush()
        except MillstreamError as error:
            logger.warning("compacted, but the catalog does not know yet: %s", error)

    @staticmethod
    def _summary(proposal: Proposal, *, was_known: bool) -> Compacted:
        segments = proposal.segments
        rows, payload = sum(one.rows for one in segments), sum(one.payload_bytes for one in segments)
        return Compacted(len(proposal.replaced), len(segments), rows, payload, was_known)

    def _is_committed(self, proposal: Proposal) -> bool:
        """Whether the same was committed before: its answer was lost, and it is asked for again."""
        known = {row.segment.path: row for _, row in self._catalog.segments()}
        return bool(proposal.segments) and all(known_as(known.get(one.path), one) for one in proposal.segments)

    def _numbers(self, proposal: Proposal) -> dict[str, int]:
        """The catalog's numbers of the segments to be replaced, if they are all in force."""
        wanted = set(proposal.replaced)
        numbers = {row.segment.path: number for number, row in self._catalog.segments() if row.segment.path in wanted}
        pending = {path for record in self._machine.replaced for path in record.replaced}
        retired = self._catalog.retired()
        for path in proposal.replaced:
            if path not in numbers or path in pending or numbers[path] in retired:
                raise Conflict(
                    f"segment {path} is not in force (any more)",
                    code="segment_gone",
                    hint="it was compacted or deleted meanwhile; plan again from the newest manifests",
                )
        return numbers

    async def _prove(self, proposal: Proposal) -> None:
        numbers = self._numbers(proposal)
        old: list[_Old] = []
        bucket = ""
        for path in proposal.replaced:
            segment = self._catalog.segment(numbers[path])
            assert segment is not None
            bucket = segment.bucket if not old else bucket
            if segment.bucket != bucket:
                raise _refusal(f"{path} belongs to another bucket than {bucket}")
            old.append(_Old(numbers[path], segment, await self._cold.footer(segment)))
        proof = Proof(self._cold.objects, bucket, await self._live_runs(old), self._threads)
        await proof.take_old([(segment, footer) for _, segment, footer in old])
        for segment in proposal.segments:
            try:
                await proof.take_new(segment, self._catalog.kept)
            except NotFound:
                raise Conflict(
                    f"the new segment {segment.path} is not in the store", code="segment_missing", hint="plan again"
                ) from None
        proof.finish()

    async def _live_runs(self, old: list[_Old]) -> list[LiveRun]:
        """The runs of rows that the index refers to: what the new segments must have."""
        runs: list[LiveRun] = []
        seen = 0
        for which, (number, _, footer) in enumerate(old):
            for extent in footer.extents:
                seen += 1
                if seen % SLICE_RUNS == 0:
                    await asyncio.sleep(0)
                row = self._catalog.extent_of(extent.incarnation, extent.offset_start)
                if row is None or row.segment != number or row.offset_end != extent.offset_end:
                    continue
                kept = self._catalog.kept(extent.incarnation)
                if kept is None or extent.offset_end <= kept.earliest:
                    continue
                runs.append(LiveRun(extent, which, kept.earliest))
                if len(runs) > RUNS_MAX:
                    raise InvalidRequest(
                        f"the proposal is about more than {RUNS_MAX:,} runs of messages",
                        code="compaction_too_large",
                        hint="propose fewer segments at a time",
                    )
        return runs


def known_as(row: object, segment: SegmentRef) -> bool:
    return row is not None and getattr(row, "segment", None) == segment


def _check_form(proposal: Proposal) -> None:
    if not proposal.replaced:
        raise _refusal("it replaces nothing")
    paths = [*proposal.replaced, *(segment.path for segment in proposal.segments)]
    if len(paths) > SEGMENTS_MAX:
        raise _refusal(f"it names {len(paths):,} segments, more than {SEGMENTS_MAX:,}")
    if len(set(paths)) != len(paths):
        raise _refusal("it names a segment twice")
    for segment in proposal.segments:
        if not segment.path.startswith("segments/") or not segment.path.endswith(COMPACTED) or ".." in segment.path:
            raise _refusal(f"{segment.path!r} is no name for a compacted segment")


def _refusal(reason: str) -> InvalidRequest:
    return InvalidRequest(f"the compaction cannot be accepted: {reason}", code="invalid_compaction")
