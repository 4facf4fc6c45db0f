"""The shard: what the server asks to create, append, read, delete and follow streams.

Writers pass a command and get a `Pending`, which is settled with the outcome, or the error, once that is durable.
Readers get committed state at once. All methods run on one event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Hashable, Iterator
from functools import partial
from itertools import islice
from typing import Final, TypeVar

from millstream.clock import Clock, ExpiryClock
from millstream.errors import MillstreamError, NotFound, NotLeader, OffsetTrimmed, OutcomeUnknown, Unavailable
from millstream.log.interface import Log, LogBatch
from millstream.measures import ShardMeasures
from millstream.pending import BackgroundTasks, Pending
from millstream.protocol.keys import StreamKey
from millstream.protocol.offsets import START
from millstream.shard.budget import BUCKET_BYTES, STREAM_BYTES, MemoryBudget
from millstream.shard.catalog_follower import CatalogFollower
from millstream.shard.committer import Batch, Committer
from millstream.shard.compaction import Compaction
from millstream.shard.creation import Creation
from millstream.shard.deadlines import Deadlines
from millstream.shard.feed import Feed
from millstream.shard.flush.flusher import Flusher
from millstream.shard.listeners import Listeners
from millstream.shard.listing import Listing
from millstream.shard.manifest_watch import ManifestWatch
from millstream.shard.names import Names
from millstream.shard.ownership import Ownership
from millstream.shard.parts import ShardParts
from millstream.shard.publisher import Publisher
from millstream.shard.quarantine import Found, Quarantine, records_in
from millstream.shard.reader import Reader, ReadResult
from millstream.shard.reclaimer import Reclaimer
from millstream.shard.recovery import recover
from millstream.shard.scrub import Scrubber
from millstream.shard.settings import ShardSettings
from millstream.shard.splitting import SPLIT_ON_LOOP_BYTES, Splitting
from millstream.streams.checks import Checks
from millstream.streams.commands import AppendMessages, AppendOutcome, Created, CreateStream
from millstream.streams.machine import StateMachine
from millstream.streams.namespace import Namespace
from millstream.streams.records import (
    AnyRecord,
    Appended,
    SecretsCreated,
    SegmentRef,
    SegmentSealed,
    SnapshotPublished,
    SnapshotRef,
    StreamCreated,
    StreamDeleted,
    StreamTrimmed,
)
from millstream.streams.state import Stream
from millstream.tasks import Supervisor, end
from millstream.tiers.blobs import Blobs, Upload
from millstream.tiers.catalog import Catalog
from millstream.tiers.catalog_rows import ColdTotals
from millstream.tiers.cold import ColdTier
from millstream.tiers.hot import MESSAGE_COST_BYTES, HotTier
from millstream.tiers.journal import Journals
from millstream.tiers.stream_rows import decode_key
from millstream.units import Incarnation, Offset, Position

logger = logging.getLogger("millstream.shard")

T = TypeVar("T")

TICK_SECONDS = 1.0
SCAN_SLICE: Final = 256
ALIVE_SLICE: Final = 256
# Reads between two batches that leave the loop free enough to wait for the disk itself.
QUIET_READS_MAX: Final = 8
BACKPRESSURE_SHOWN_SECONDS: Final = 5.0


class Shard:
    def __init__(
        self,
        log: Log,
        catalog: Catalog,
        cold: ColdTier,
        blobs: Blobs,
        clock: Clock,
        settings: ShardSettings,
        *,
        number: int = 0,
        measures: ShardMeasures | None = None,
        supervisor: Supervisor | None = None,
        expiry_clock: ExpiryClock | None = None,
        quarantine: Quarantine | None = None,
    ) -> None:
        self.number = number
        self.stuck_seconds_max = settings.stuck_after
        self.clock = clock
        self.supervisor = supervisor or Supervisor()
        self.expiry_clock = expiry_clock or ExpiryClock(clock)
        self.measures = measures or ShardMeasures()
        self._log = log
        self._catalog = catalog
        self.hot_bytes_max = hot_bytes_max = settings.hot_bytes_max
        self.namespace = Namespace(catalog, settings.streams, self.expiry_clock.now_ms)
        self.machine = StateMachine(self.namespace)
        self.checks = Checks(self.namespace)
        self.hot = HotTier()
        self.journals = Journals()
        self.journals.start = catalog.position
        self.cold = cold
        self.blobs = blobs
        self._publisher = Publisher(self.machine, self.hot, self.journals)
        self._quarantine = quarantine or Quarantine()
        recovered = recover(log, catalog, self.machine, self._publisher, self._quarantine)
        self.hot.published_bytes = self.hot.published_messages = 0  # what is replayed was counted when it came
        self.notices = [*log.notices, f"recovered: {recovered.records_applied} records replayed"]
        self.committer = Committer(
            log, recovered.next_position, self._apply_batch, self._undo_batch, self._is_quiet, self.measures
        )
        self._reads = 0
        self.reader = Reader(self.machine, self.hot, cold)
        self.listing = Listing(self.namespace, catalog)
        self.names = Names()
        self.listeners = Listeners(self.measures)
        self._creation = Creation(self)
        self._splitting = Splitting(self)
        self.deadlines = Deadlines(self)
        self.budget = MemoryBudget(hot_bytes_max, self.hot, self.journals, self.machine, self.committer, self.deadlines)
        self.ownership = Ownership(
            cold.objects, self.machine, self.committer, clock, number, may_take_over=settings.may_take_over
        )
        parts = ShardParts(
            number=number,
            clock=clock,
            expiry_clock=self.expiry_clock,
            supervisor=self.supervisor,
            measures=self.measures,
            log=log,
            committer=self.committer,
            machine=self.machine,
            hot=self.hot,
            journals=self.journals,
            catalog=catalog,
            cold=cold,
            blobs=blobs,
            listeners=self.listeners,
            budget=self.budget,
            ownership=self.ownership,
        )
        self.feed = Feed(parts)
        self.flusher = Flusher(parts, settings.flush)
        self.catalog_follower = CatalogFollower(parts, self.flusher)
        self._reclaimer = Reclaimer(
            parts,
            self.flusher,
            grace_seconds=settings.reclaim_grace,
            leftover_age_seconds=settings.leftover_age,
        )
        self.scrubber = Scrubber(parts, settings.scrub)
        self.manifest_watch = ManifestWatch(parts, self.flusher)
        self.compaction = Compaction(parts, self.flusher, self._reclaimer)
        # Whether this node knows that it has everything that was committed a moment ago; one that leads always does.
        self.is_current: Callable[[], bool] = lambda: True
        self._refused_at = float("-inf")
        self._tasks: list[asyncio.Task[None]] = []
        self.background = BackgroundTasks()

    def read_only(self, reason: MillstreamError) -> None:
        """Serve what there is: nothing is accepted, nothing is due over time, and the object store is another's."""
        self.committer.refuse(reason)

    async def start(self) -> None:
        """Run and accept writes: what a shard does whose log is nobody else's."""
        await self.lead()
        self.run()

    def run(self) -> None:
        """Do what is due over time. Writes are accepted only while the shard leads."""
        self.deadlines.start(self._catalog.expiring(), self.namespace.changed.values())
        start = partial(self.supervisor.start, of=f"shard {self.number}")
        self._tasks = [
            start("expiry", self._tick_forever, is_vital=True),
            start("flush", self.flusher.run_forever, is_vital=True),
            start("reclaim", self._reclaimer.run_forever),
            start("scrub", self.scrubber.run_forever),
            start("manifests", self.manifest_watch.run_forever),
            start("compaction sweep", self.compaction.sweep_forever),
        ]

    async def lead(self, *fence: AnyRecord, claims_later: bool = False) -> None:
        """Accept writes from here on. The fence, if there is one, must get into the log before anything else.

        With `claims_later` writes do not wait until the object store has answered whose it is.
        """
        await self.catalog_follower.stop()
        self.committer.start(asyncio.get_running_loop())
        records = list(fence)
        if self.machine.secrets is None:
            records.append(SecretsCreated(self.clock.random_bytes(32), self.clock.random_bytes(32)))
        for record in records:
            await self.committer.commit(record)
        if claims_later:
            await self.ownership.go_on_unasked()
            self.background.run(self.ownership.claim_late()).when_settled(self._claimed)
            return
        try:
            await self.ownership.claim()
        except Unavailable as error:
            if isinstance(error, NotLeader):
                raise
            self._claimed(error)
            try:
                await self.ownership.go_on_unasked()
            except Unavailable as full:
                self.background.run(self._accept_when_the_log_does(full))

    async def _accept_when_the_log_does(self, reason: MillstreamError) -> None:
        """The log has no room even for the note that it goes on: until it does, reads alone are served."""
        while True:
            self.committer.refuse(reason)
            await asyncio.sleep(TICK_SECONDS)
            self.committer.accept()
            try:
                await self.ownership.go_on_unasked()  # before anything else that is accepted from here on
                return
            except Unavailable as error:
                reason = error

    def _claimed(self, error: MillstreamError | None) -> None:
        if error is not None and self.ownership.refusal is None and not isinstance(error, NotLeader):
            # Messages are kept in the log until the store answers; whose it is is asked again before the first flush.
            logger.warning("shard %d: the object store could not be asked whose it is: %s", self.number, error)

    def follow(self, reason: MillstreamError) -> None:
        """Accept no writes: another node leads, and what it commits comes through `apply_committed`."""
        self.committer.refuse(reason)
        self.ownership.resign()
        self.catalog_follower.start()

    def apply_committed(self, stored: LogBatch) -> None:
        """Make a batch true that another node has committed."""
        batch = Batch(stored.first)
        for found in records_in(stored):
            if self._quarantine.holds(found.position):
                self.machine.pass_over()
                continue
            if found.record is None:
                raise self._quarantine.refuse(found, found.error)
            batch.entries.append((found.record, found.position, None))
        self._apply_batch(batch)
        self.committer.go_on_behind(stored.next)
        for one, position, _ in batch.entries:
            if isinstance(one, SegmentSealed):
                self.catalog_follower.sealed(position)

    async def stop(self, timeout_seconds: float | None = None) -> None:
        """Finish what is in flight, flush, and let go of the files. A store that is down does not keep us."""
        await self.catalog_follower.stop()
        await end(*self._tasks)
        await self.background.end()
        await self.compaction.stop()
        try:
            if self.committer.failure is None:
                self.deadlines.flush_touches()
                async with asyncio.timeout(timeout_seconds):
                    await self.committer.drain()
                    await self.flusher.flush()
        except TimeoutError:
            logger.warning("the last flush took too long and is given up; the log keeps everything")
        except Exception as error:
            # Whatever it was, a store or a defect, the next start replays the log; files are let go of in any case.
            logger.warning("the last flush failed, the log keeps everything: %s", error)
        finally:
            self._splitting.close()
            await asyncio.to_thread(self._log.close)  # it may wait for a broker or a disk, and other shards stop too
            self.flusher.close()
            self.cold.close()
            self._catalog.close()

    # -- writing -------------------------------------------------------------------------------------------

    def append(self, command: AppendMessages) -> Pending[AppendOutcome]:
        """Append or close."""
        key = command.key
        if self.names and self.names.is_held(key):
            return self.names.wait_for(key, partial(self.append, command))
        if len(command.body) >= SPLIT_ON_LOOP_BYTES and self._splitting.needs_thread(command):
            return self._splitting.split(command).then(self.append)
        now_ms = self.clock.now_ms()
        stream = None
        try:
            stream = self.namespace.get(key, now_ms)
            record, outcome = self.checks.check_append(stream, command, now_ms)
            if record is None:
                return self.after_durable(stream, outcome)
            if not self.budget.has_room(len(command.body) + MESSAGE_COST_BYTES * len(record.messages)):
                raise self.backpressure()
            pending = Pending(outcome)
            position = self.committer.submit(record, pending)
            self.checks.accept(stream, record, outcome.tail, position)
            return pending
        except MillstreamError as error:
            return self.after_durable(stream, error)

    def backpressure(self) -> Unavailable:
        """Memory is full: either the cold tier does not take it, or writers are faster than it is."""
        self._refused_at = self.clock.monotonic()
        self.measures.backpressure_refusals += 1
        reason = self.backpressure_reason()
        return Unavailable(
            f"the memory for messages and the state of streams is used up: {reason}",
            code="backpressure",
            hint="retry later; raise hot.bytes_max if this is the normal load",
            retry_after_seconds=2,
        )

    def cold_totals(self) -> ColdTotals:
        return self._catalog.cold_totals()

    def cold_segments(self, bucket: str, after: Position) -> tuple[Position, list[SegmentRef]]:
        """The first position that is not cold, and the bucket's segments before it that reach beyond `after`."""
        return self._catalog.segments_of(bucket, after)

    async def alive(self, bucket: str, incarnations: list[Incarnation]) -> list[tuple[Incarnation, Offset]]:
        """Those of the incarnations that still count, each with the offset before which nothing of it does."""
        found: list[tuple[Incarnation, Offset]] = []
        for count, incarnation in enumerate(incarnations, 1):
            stream = self.namespace.peek(incarnation)
            if stream is not None and stream.key.bucket == bucket:
                found.append((incarnation, START if stream.forks else stream.earliest))
            if count % ALIVE_SLICE == 0:
                await asyncio.sleep(0)
        return found

    def trim_log(self, position: Position) -> None:
        """Let the log forget what lies before a position that was flushed; called on a thread."""
        self._log.trim(min(position, self.machine.flushed))

    def token_key(self) -> bytes | None:
        """What signs tokens that nobody keeps, the same at every node; None where it has not arrived yet."""
        return self.machine.secrets.token_key if self.machine.secrets is not None else None

    def damaged(self) -> dict[str, str]:
        """Objects of the cold tier that are missing or damaged, and what is wrong with each."""
        if self.cold.objects.damage.objects:
            self.scrubber.forget_what_nothing_names()
        return self.cold.objects.damage.objects

    def backpressure_reason(self) -> str | None:
        """Why writers are being refused; None if lately none was, or there is room again."""
        is_recent = self.clock.monotonic() - self._refused_at <= BACKPRESSURE_SHOWN_SECONDS
        if not is_recent or self.budget.used < self.hot_bytes_max // 2:
            return None
        return self.flusher.failure or "messages arrive faster than they can be moved to the cold tier"

    def after_durable(self, stream: Stream | None, outcome: T | MillstreamError) -> Pending[T]:
        """An outcome that rests on a stream's state, told once that state is durable."""
        if stream is not None and stream.ahead is not None:
            return self.committer.after_durable(outcome)
        return Pending.settled(outcome)

    def create(self, command: CreateStream) -> Pending[Created]:
        """Create a stream, or find that it exists as asked."""
        if self._splitting.needs_thread(command):
            return self._splitting.split(command).then(self._creation.create)
        return self._creation.create(command)

    def delete(self, key: StreamKey) -> Pending[None]:
        def delete() -> Pending[None]:
            now_ms = self.clock.now_ms()
            stream = self.namespace.get(key, now_ms)
            if not self.budget.has_room_to_remove():
                raise self.backpressure()
            return self.committer.commit(StreamDeleted(stream.incarnation, now_ms, stream.key))

        return self.exclusively(key, delete)

    def create_bucket(self, name: str) -> Pending[None]:
        def create() -> Pending[None]:
            record = self.checks.check_create_bucket(name, self.clock.now_ms())
            if not self.budget.has_room(BUCKET_BYTES):
                raise self.backpressure()
            return self.committer.commit(record)

        return self.exclusively(("bucket", name), create)

    def delete_bucket(self, name: str) -> Pending[None]:
        def delete(_: None) -> Pending[None]:
            return self.committer.commit(self.checks.check_delete_bucket(name, self.clock.now_ms()))

        # Streams being created in it must be seen; new ones wait behind this.
        return self.exclusively(("bucket", name), lambda: self.committer.after_durable(None).then(delete))

    def publish_snapshot(
        self,
        key: StreamKey,
        offset: Offset,
        content_type: str,
        upload: Upload,
        *,
        trims: bool = True,
        incarnation: Incarnation | None = None,
    ) -> Pending[Stream]:
        """Make an upload the stream's snapshot. Appends go on meanwhile.

        With an incarnation, only if the stream of that name is still that one.
        """
        return self.background.run(
            self._publish_snapshot(key, offset, content_type, upload, trims=trims, incarnation=incarnation)
        )

    async def _publish_snapshot(
        self,
        key: StreamKey,
        offset: Offset,
        content_type: str,
        upload: Upload,
        *,
        trims: bool,
        incarnation: Incarnation | None,
    ) -> Stream:
        try:
            await self._check_snapshot(key, offset)
            blob = self.blobs.new_name(key, offset, self.clock.random_bytes(8))
            try:
                await self.blobs.commit(upload, blob)
                snapshot = SnapshotRef(offset, content_type, blob, upload.size, upload.checksum)
                submit = partial(self._submit_snapshot, key, snapshot, trims=trims, incarnation=incarnation)
                return await self.exclusively(("snapshot", str(key)), submit)
            except OutcomeUnknown:
                raise  # its record may be in the log all the same: the blob stays, and is a leftover if it is not
            except MillstreamError:
                self.delete_blob(blob)
                raise
            finally:
                self.blobs.settled(blob)
        finally:
            upload.discard()

    async def _check_snapshot(self, key: StreamKey, offset: Offset) -> None:
        """Refuse a snapshot that cannot be published, before its bytes are stored."""
        if self.committer.failure is not None:
            raise self.committer.failure
        stream = self.get(key)
        if not self.budget.has_room(STREAM_BYTES):
            raise self.backpressure()
        self.checks.check_snapshot(stream, offset)
        survey = await self.reader.survey(stream, offset)
        self.checks.check_snapshot(stream, offset, is_boundary=survey.is_boundary)

    def _submit_snapshot(
        self, key: StreamKey, snapshot: SnapshotRef, *, trims: bool, incarnation: Incarnation | None
    ) -> Pending[Stream]:
        stream = self.get(key)
        if incarnation not in (None, stream.incarnation):
            raise NotFound(f"stream {key} was deleted and made anew meanwhile")
        self.checks.check_snapshot(stream, snapshot.offset)

        def published(_: None) -> Stream:
            if stream.deleted:
                raise NotFound(f"stream {key} was deleted meanwhile")
            return stream

        record = SnapshotPublished(stream.incarnation, self.clock.now_ms(), snapshot, trims)
        return self.committer.commit(record).then(published)

    def delete_blob(self, name: str) -> None:
        """Delete a snapshot's bytes that nothing names, some time soon; what fails is a leftover."""

        def deleted(outcome: MillstreamError | None) -> None:
            if outcome is not None:
                logger.warning("the object store could not be tidied up: %s", outcome)

        self.background.run(self.blobs.delete(name)).when_settled(deleted)

    def trim(self, stream: Stream, offset: Offset) -> Pending[None]:
        """Give up what lies before a message boundary."""
        return self.committer.commit(StreamTrimmed(stream.incarnation, self.clock.now_ms(), offset))

    def exclusively(self, name: Hashable, action: Callable[[], Pending[T]]) -> Pending[T]:
        """Run an action while nothing else is in flight on a name, and keep it so until its outcome is there."""
        if self.names.is_held(name):
            return self.names.wait_for(name, partial(self.exclusively, name, action))
        self.names.hold(name)

        def release(outcome: T | MillstreamError) -> T | MillstreamError:
            self.names.release(name)
            return outcome

        stream = self.namespace.find(name) if isinstance(name, StreamKey) else None
        if stream is not None and self.namespace.is_expired(stream, self.clock.now_ms()):
            # A fork of it may be in flight: whether it keeps its name is known when that is durable.
            is_free = self.committer.after_durable(None)
        else:
            is_free = self.after_durable(stream, None)
        return is_free.then(lambda _: action()).then_either(release)

    # -- what durable batches do -----------------------------------------------------------------------------

    def _apply_batch(self, batch: Batch) -> None:
        changed: dict[Incarnation, Stream] = {}
        appends = 0
        apply, publisher = self.machine.apply, self._publisher
        record: AnyRecord | None = None
        position = batch.first
        try:
            for record, position, _ in batch.entries:
                if record is None:
                    continue
                stream = apply(record, position)
                if type(record) is Appended:
                    appends += 1
                    if stream is not None:
                        publisher.appended(record, position, stream)
                else:
                    publisher.publish(record, position)
                    if type(record) is StreamCreated:
                        self.deadlines.watch(stream)
                    elif type(record) is StreamDeleted and stream is not None:
                        self.deadlines.unwatch(stream)
                if stream is not None:
                    changed[stream.incarnation] = stream
        except Exception as error:
            raise self._quarantine.refuse(Found(position, record, b""), error) from error
        self.measures.appends += appends
        self.budget.weigh()
        if changed:
            self.listeners.changed(changed)

    def _undo_batch(self, batch: Batch) -> None:
        for record, _, _ in batch.entries:
            if isinstance(record, Appended):
                stream = self.namespace.by_incarnation(record.stream)
                if stream is not None:
                    stream.ahead = None

    # -- reading -------------------------------------------------------------------------------------------

    def get(self, key: StreamKey) -> Stream:
        return self.namespace.get(key, self.clock.now_ms())

    def check_retained(self, stream: Stream, offset: Offset) -> None:
        """Refuse an offset whose messages a snapshot has replaced (Extensions §2.2)."""
        if offset < stream.earliest:
            raise OffsetTrimmed(
                f"stream {stream.key} is kept from offset {stream.earliest} on",
                earliest=stream.earliest,
                hint="read /bootstrap for the snapshot and what follows it",
            )

    def is_hot(self, stream: Stream, offset: Offset) -> bool:
        return self.reader.is_hot(stream, offset)

    def read(self, stream: Stream, offset: Offset, bytes_max: int) -> ReadResult:
        """What is in memory beyond an offset; only where `is_hot`."""
        self._reads += 1
        return self.reader.read(stream, offset, bytes_max)

    def scan_paths(self, prefix: str) -> Iterator[Stream]:
        """Every live stream whose v1 path starts with a prefix, from the catalog and from memory."""
        for some in self.scan_paths_in_slices(prefix):
            yield from some

    def scan_paths_in_slices(self, prefix: str) -> Iterator[list[Stream]]:
        """The same a few at a time, which may be none: nothing is held between two slices, so others may work then."""
        seen: set[Incarnation] = set()
        resident = list(self.namespace.resident())
        for first in range(0, len(resident), SCAN_SLICE):
            yield self._live_below(prefix, resident[first : first + SCAN_SLICE], seen)
        bucket, slash, rest = prefix.partition("/")
        raw = f"{bucket}\0{rest}".encode() if slash else b""
        after = b""
        while names := [name for name, _ in islice(self._catalog.scan(raw, after), SCAN_SLICE)]:
            after = names[-1]
            found = [self.namespace.peek_key(decode_key(name)) for name in names]
            yield self._live_below(prefix, [stream for stream in found if stream is not None], seen)

    def _live_below(self, prefix: str, streams: list[Stream], seen: set[Incarnation]) -> list[Stream]:
        now_ms = self.clock.now_ms()
        live = [
            stream
            for stream in streams
            if stream.incarnation not in seen
            and not stream.deleted
            and stream.key.v1_path.startswith(prefix)
            and not self.namespace.is_expired(stream, now_ms)
        ]
        seen.update(stream.incarnation for stream in live)
        return live

    def _is_quiet(self) -> bool:
        reads, self._reads = self._reads, 0
        return reads <= QUIET_READS_MAX

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            self.deadlines.tick()
