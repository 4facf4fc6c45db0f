"""The shard: what the server asks to create, append, read, delete and follow streams.

Writers pass a command and a `reply`; the reply gets the outcome, or the error, once it is durable. Readers get
committed state at once. All methods run on one event loop.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Hashable, Iterator, Sequence
from functools import partial
from typing import Any, Final, Protocol

import msgspec

from millstream.clock import Clock, monotonic_seconds
from millstream.errors import MillstreamError, NotFound, OffsetTrimmed, Unavailable
from millstream.log.interface import Log, LogBatch
from millstream.measures import ShardMeasures
from millstream.protocol.keys import StreamKey
from millstream.shard.catalog_follower import CatalogFollower
from millstream.shard.committer import Batch, Committer, Reply
from millstream.shard.compaction import Compaction
from millstream.shard.feed import Feed
from millstream.shard.flusher import Flusher, FlushLimits
from millstream.shard.listing import Listing
from millstream.shard.names import Names
from millstream.shard.publisher import Publisher
from millstream.shard.reader import Reader, ReadResult, Survey
from millstream.shard.reclaimer import Reclaimer
from millstream.shard.recovery import recover
from millstream.streams.commands import AppendMessages, Created, CreateStream
from millstream.streams.machine import StateMachine
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
    StreamsTouched,
    StreamTrimmed,
    decode_batch,
    span,
)
from millstream.streams.state import Stream
from millstream.tasks import end
from millstream.tiers.blobs import Blobs, Upload
from millstream.tiers.catalog import Catalog
from millstream.tiers.catalog_rows import ColdTotals, decode_key
from millstream.tiers.cold import ColdTier
from millstream.tiers.hot import HotTier
from millstream.tiers.journal import Journals

logger = logging.getLogger("millstream.shard")

TICK_SECONDS = 1.0
WAKE_SLICE: Final = 64
ALIVE_SLICE: Final = 256
# Reads between two batches that leave the loop free enough to wait for the disk itself.
QUIET_READS_MAX: Final = 8
BACKPRESSURE_SHOWN_MS: Final = 5_000
START_OVER: Final = object()


Topic = int | tuple[str, str]
"""What can be listened to: a stream by its incarnation, or a bucket by `bucket_topic`."""


def bucket_topic(bucket: str) -> Topic:
    return ("bucket", bucket)


class Listener(Protocol):
    def wake(self) -> None:
        """The stream has new messages, was closed or deleted; or something happened in the bucket."""
        ...


def _if_alive(stream: Stream) -> Stream | NotFound:
    return NotFound(f"stream {stream.key} was deleted meanwhile") if stream.deleted else stream


class Shard:
    def __init__(
        self,
        log: Log,
        catalog: Catalog,
        cold: ColdTier,
        blobs: Blobs,
        clock: Clock,
        *,
        hot_bytes_max: int,
        flush_limits: FlushLimits,
        reclaim_grace_seconds: float,
        number: int = 0,
        leftover_age_seconds: float = 0.0,
        measures: ShardMeasures | None = None,
    ) -> None:
        self.number = number
        self.clock = clock
        self.measures = measures or ShardMeasures()
        self._log = log
        self._catalog = catalog
        self.hot_bytes_max = hot_bytes_max
        self.machine = StateMachine(catalog)
        self.hot = HotTier()
        self.journals = Journals()
        self.journals.start = catalog.position
        self.cold = cold
        self.blobs = blobs
        self._publisher = Publisher(self.machine, self.hot, self.journals)
        recovered = recover(log, catalog, self.machine, self._publisher)
        self.hot.published_bytes = self.hot.published_messages = 0  # what is replayed was counted when it came
        self.notices = [*log.notices, f"recovered: {recovered.records_applied} records replayed"]
        self.committer = Committer(
            log, recovered.next_position, self._apply_batch, self._undo_batch, self._is_quiet, self.measures
        )
        self._reads = 0
        self.reader = Reader(self.machine, self.hot, cold)
        self.listing = Listing(self.machine, catalog)
        self.names = Names()
        self.feed = Feed(self.machine, self.hot, self.journals, self.committer, catalog, cold)
        self.flusher = Flusher(
            self.machine,
            self.hot,
            self.journals,
            catalog,
            cold,
            blobs,
            log,
            self.committer,
            clock,
            flush_limits,
            number,
        )
        self.catalog_follower = CatalogFollower(self.machine, self.hot, catalog, cold, self.flusher, clock)
        self.flusher.can_evict = lambda incarnation: incarnation not in self._listeners
        self.flusher.measures = self.measures
        self._reclaimer = Reclaimer(
            catalog,
            cold,
            self.flusher,
            blobs,
            self.machine,
            clock,
            self.committer,
            reclaim_grace_seconds,
            number,
            leftover_age_seconds,
        )
        self.compaction = Compaction(
            self.machine, catalog, cold, self.committer, self.flusher, clock, lambda: self._reclaimer.is_tidy, number
        )
        # Whether this node knows that it has everything that was committed a moment ago; one that leads always does.
        self.is_current: Callable[[], bool] = lambda: True
        self._listeners: dict[Topic, set[Listener]] = {}
        # Streams that have changed and live readers that are still to hear of it.
        self._changed: dict[int, Stream] = {}
        self._woken: deque[tuple[Topic, Listener, float]] = deque()
        self._changed_at = 0.0
        self._is_waking = False
        self._refused_at_ms = 0
        self._touched: dict[int, int] = {}
        self._deadlines: list[tuple[int, int]] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._errands: set[asyncio.Task[None]] = set()
        self.on_committed: Callable[[list[Stream]], None] = lambda streams: None
        # Where reads restarted windows and this shard does not lead: whoever does must hear of it.
        self.on_touched: Callable[[dict[int, int]], None] = lambda touched: None

    async def start(self) -> None:
        """Run and accept writes: what a shard does whose log is nobody else's."""
        self.run()
        await self.lead()

    def run(self) -> None:
        """Do what is due over time. Writes are accepted only while the shard leads."""
        loop = asyncio.get_running_loop()
        self._deadlines = [(deadline, incarnation) for incarnation, deadline in self._catalog.expiring()]
        heapq.heapify(self._deadlines)
        for stream in self.machine.dirty.values():
            self._watch_deadline(stream)
        self._tasks = [
            loop.create_task(self._tick_forever()),
            loop.create_task(self.flusher.run_forever()),
            loop.create_task(self._reclaimer.run_forever()),
            loop.create_task(self.compaction.sweep_forever()),
        ]

    async def lead(self, *fence: AnyRecord) -> None:
        """Accept writes from here on. The fence, if there is one, must get into the log before anything else."""
        await self.catalog_follower.stop()
        self._reclaimer.started_at = max(self._reclaimer.started_at, self._catalog.position)
        self.committer.start(asyncio.get_running_loop())
        records = list(fence)
        if self.machine.secrets is None:
            records.append(SecretsCreated(self.clock.random_bytes(32), self.clock.random_bytes(32)))
        for record in records:
            error = await self.committer.submit_and_wait(record)
            if error is not None:
                raise error

    def follow(self, reason: MillstreamError) -> None:
        """Accept no writes: another node leads, and what it commits comes through `apply_committed`."""
        self.committer.refuse(reason)
        self.catalog_follower.start()

    def apply_committed(self, stored: LogBatch) -> None:
        """Make a batch true that another node has committed."""
        batch = Batch(stored.first)
        for record in decode_batch(stored.payload):
            batch.entries.append((record, batch.next, None, None))
            batch.next += span(record)
        self._apply_batch(batch)
        self.committer.go_on_behind(stored.next)
        for one, position, _, _ in batch.entries:
            if isinstance(one, SegmentSealed):
                self.catalog_follower.sealed(position)

    async def stop(self, timeout_seconds: float | None = None) -> None:
        """Finish what is in flight, flush, and let go of the files. A store that is down does not keep us."""
        await self.catalog_follower.stop()
        await end(*self._tasks, *self._errands)
        await self.compaction.stop()
        try:
            if self.committer.failure is None:
                self._flush_touches()
                await self.committer.drain()
                async with asyncio.timeout(timeout_seconds):
                    await self.flusher.flush()
        except TimeoutError:
            logger.warning("the last flush took too long and is given up; the log keeps everything")
        except Exception as error:
            logger.warning("the last flush failed, the log keeps everything: %s", error)
        finally:
            self._log.close()
            self.flusher.close()
            self.cold.close()
            self._catalog.close()

    # -- writing -------------------------------------------------------------------------------------------

    def append(self, command: AppendMessages, reply: Reply) -> None:
        """Append or close; the reply gets an AppendOutcome or an error."""
        key = command.key
        if self.names and self.names.wait_for(key, partial(self.append, command, reply)):
            return
        now_ms = self.clock.now_ms()
        stream = None
        try:
            stream = self.machine.get(key, now_ms)
            record, outcome = self.machine.check_append(stream, command, now_ms)
            if record is None:
                self.settle(stream, reply, outcome)
                return
            if self.hot.bytes + self.committer.pending_bytes + len(command.body) > self.hot_bytes_max:
                raise self._backpressure()
            position = self.committer.submit(record, reply, outcome)
            self.machine.accept(stream, record, outcome.tail, position)
        except MillstreamError as error:
            self.settle(stream, reply, error)

    def _backpressure(self) -> Unavailable:
        """Memory is full: either the cold tier does not take it, or writers are faster than it is."""
        self._refused_at_ms = self.clock.now_ms()
        self.measures.backpressure_refusals += 1
        reason = self.backpressure_reason()
        return Unavailable(
            f"the memory for recent messages is used up: {reason}",
            code="backpressure",
            hint="retry later; raise hot.bytes_max if this is the normal load",
            retry_after_seconds=2,
        )

    def cold_totals(self) -> ColdTotals:
        return self._catalog.cold_totals()

    def cold_segments(self, bucket: str, after: int) -> tuple[int, list[SegmentRef]]:
        """The first position that is not cold, and the bucket's segments before it that reach beyond `after`."""
        return self._catalog.segments_of(bucket, after)

    async def alive(self, bucket: str, incarnations: list[int]) -> list[tuple[int, int]]:
        """Those of the incarnations that still count, each with the offset before which nothing of it does."""
        found: list[tuple[int, int]] = []
        for count, incarnation in enumerate(incarnations, 1):
            stream = self.machine.peek(incarnation)
            if stream is not None and stream.key.bucket == bucket:
                found.append((incarnation, 0 if stream.forks else stream.earliest))
            if count % ALIVE_SLICE == 0:
                await asyncio.sleep(0)
        return found

    def backpressure_reason(self) -> str | None:
        """Why writers are being refused; None if lately none was, or there is room again."""
        is_recent = self.clock.now_ms() - self._refused_at_ms <= BACKPRESSURE_SHOWN_MS
        if not is_recent or self.hot.bytes + self.committer.pending_bytes < self.hot_bytes_max // 2:
            return None
        return self.flusher.failure or "messages arrive faster than they can be moved to the cold tier"

    def settle(self, stream: Stream | None, reply: Reply, outcome: object) -> None:
        """Answer what rests on a stream's state, once that state is durable."""
        if stream is not None and stream.ahead is not None:
            self.committer.settle(reply, outcome)
        else:
            reply(outcome)

    def create(self, command: CreateStream, reply: Reply) -> None:
        """Create a stream, or find that it exists as asked; the reply gets a Created or an error."""
        again = partial(self.create, command, reply)
        if any(self.names.wait_for(name, again) for name in self._other_names(command)):
            return
        source = self.machine.find(command.fork.source) if command.fork is not None else None
        if command.fork is None or source is None:
            self._create_surveyed(command, reply, Survey(True, []))
            return
        offset = source.tail if command.fork.offset is None else command.fork.offset
        survey = self.reader.survey_hot(source, offset) if offset >= source.earliest else Survey(False, [])
        if survey is not None:
            self._create_surveyed(command, reply, survey)
        else:
            surveyed = partial(self._reply_if_failed, reply)
            self.errand(self._survey_and_create(command, reply, source, offset), surveyed)

    @staticmethod
    def _reply_if_failed(reply: Reply, error: MillstreamError | None) -> None:
        if error is not None:
            reply(error)

    async def _survey_and_create(self, command: CreateStream, reply: Reply, source: Stream, offset: int) -> None:
        self._create_surveyed(command, reply, await self.reader.survey(source, offset))

    def _create_surveyed(self, command: CreateStream, reply: Reply, survey: Survey) -> None:
        """Create, knowing what lies at the fork point; messages never change, so that stays true."""

        def finish(outcome: object) -> None:
            if outcome is START_OVER:
                self.create(command, reply)
            else:
                reply(outcome)

        self.alone(command.key, partial(self._create, command, survey), finish)

    @staticmethod
    def _other_names(command: CreateStream) -> list[Hashable]:
        """What else a creation depends on: its bucket, and the source of a fork with its snapshot."""
        names: list[Hashable] = [("bucket", command.key.bucket)]
        if command.fork is not None and command.fork.source != command.key:
            names += [command.fork.source, ("snapshot", str(command.fork.source))]
        return names

    def _must_wait(self, command: CreateStream) -> bool:
        """Whether something is happening to a name the creation depends on. It then starts over, holding nothing:
        two that waited for each other's names while holding their own would wait for ever."""
        return any(self.names.is_held(name) for name in self._other_names(command))

    def _create(self, command: CreateStream, survey: Survey, reply: Reply) -> None:
        if self._must_wait(command):
            reply(START_OVER)
            return
        now_ms = self.clock.now_ms()
        resolve_fork = partial(self.reader.resolve_fork, survey=survey)
        records, existing = self.machine.check_create(command, now_ms, resolve_fork)
        if existing is not None:
            reply(existing)
            return
        if self.hot.bytes + self.committer.pending_bytes + len(command.body) > self.hot_bytes_max:
            raise self._backpressure()
        created = records[-1]
        assert isinstance(created, StreamCreated)
        if created.snapshot is not None:
            # A fork's snapshot is a blob of its own, so neither stream can take the other's away.
            self._copy_snapshot(command, created, partial(self._submit_created, command, records[:-1], reply), reply)
        else:
            self._submit_created(command, records[:-1], reply, created)

    def _copy_snapshot(
        self, command: CreateStream, created: StreamCreated, then: Callable[[StreamCreated], None], reply: Reply
    ) -> None:
        assert created.snapshot is not None and created.fork is not None
        source = created.fork.source
        name = self.blobs.new_name(command.key, created.snapshot.offset, self.clock.random_bytes(8))
        copied = msgspec.structs.replace(created, snapshot=msgspec.structs.replace(created.snapshot, blob=name))

        def finished(error: MillstreamError | None) -> None:
            try:
                if error is not None:
                    raise error
                origin = self.machine.by_incarnation(source)
                if self._must_wait(command) or origin is None or origin.snapshot != created.snapshot:
                    self.errand(self.blobs.delete(name))
                    reply(START_OVER)
                else:
                    then(copied)
            except MillstreamError as refusal:
                reply(refusal)

        self.errand(self.blobs.copy(created.snapshot.blob, name), finished)

    def _submit_created(
        self, command: CreateStream, before: Sequence[AnyRecord], reply: Reply, created: StreamCreated
    ) -> None:
        for record in before:
            self.submit(record)

        def answer(outcome: object) -> None:
            if isinstance(outcome, MillstreamError):
                reply(outcome)
                return
            stream = self.machine.find(command.key)
            assert stream is not None
            reply(Created(True, stream.incarnation, stream.content_type, stream.tail, stream.closed))

        self.submit(created, answer)

    def delete(self, key: StreamKey, reply: Reply) -> None:
        """Delete a stream; the reply gets None or an error."""
        self.alone(key, partial(self._delete, key), reply)

    def _delete(self, key: StreamKey, reply: Reply) -> None:
        now_ms = self.clock.now_ms()
        stream = self.machine.get(key, now_ms)
        self.submit(StreamDeleted(stream.incarnation, now_ms, stream.key), reply)

    def create_bucket(self, name: str, reply: Reply) -> None:
        def action(done: Reply) -> None:
            self.submit(self.machine.check_create_bucket(name, self.clock.now_ms()), done)

        self.alone(("bucket", name), action, reply)

    def delete_bucket(self, name: str, reply: Reply) -> None:
        def action(done: Reply) -> None:
            # Streams being created in it must be seen; new ones wait behind this.
            self.committer.settle(lambda error: delete(done, error))

        def delete(done: Reply, error: object) -> None:
            try:
                if isinstance(error, MillstreamError):
                    raise error
                self.submit(self.machine.check_delete_bucket(name, self.clock.now_ms()), done)
            except MillstreamError as refusal:
                done(refusal)

        self.alone(("bucket", name), action, reply)

    def publish_snapshot(
        self,
        key: StreamKey,
        offset: int,
        content_type: str,
        upload: Upload,
        reply: Reply,
        *,
        trims: bool = True,
        incarnation: int | None = None,
    ) -> None:
        """Make an upload the stream's snapshot; the reply gets the stream or an error. Appends go on meanwhile.

        With an incarnation, only if the stream of that name is still that one.
        """
        name = ""

        def finish(outcome: object) -> None:
            if isinstance(outcome, MillstreamError):
                upload.discard()
                if name:
                    self.errand(self.blobs.delete(name))
            reply(outcome)

        async def store() -> None:
            self.machine.check_snapshot(stream, offset)
            survey = await self.reader.survey(stream, offset)
            self.machine.check_snapshot(stream, offset, is_boundary=survey.is_boundary)
            await self.blobs.commit(upload, name)

        def durable(error: MillstreamError | None) -> None:
            if error is not None:
                finish(error)
            else:
                self.alone(("snapshot", str(key)), publish, finish)

        def publish(done: Reply) -> None:
            stream = self.get(key)
            if incarnation not in (None, stream.incarnation):
                raise NotFound(f"stream {key} was deleted and made anew meanwhile")
            self.machine.check_snapshot(stream, offset)
            snapshot = SnapshotRef(offset, content_type, name, upload.size, upload.checksum)
            record = SnapshotPublished(stream.incarnation, self.clock.now_ms(), snapshot, trims)
            self.submit(record, lambda error: done(error or _if_alive(stream)))

        try:
            stream = self.get(key)
        except MillstreamError as error:
            finish(error)
            return
        name = self.blobs.new_name(key, offset, self.clock.random_bytes(8))
        self.errand(store(), durable)

    def trim(self, stream: Stream, offset: int, reply: Reply) -> None:
        """Give up what lies before a message boundary; the reply gets None or an error."""
        self.submit(StreamTrimmed(stream.incarnation, self.clock.now_ms(), offset), reply)

    def errand(
        self, work: Coroutine[Any, Any, None], done: Callable[[MillstreamError | None], None] | None = None
    ) -> None:
        """Do something that waits for the object store; `done` gets the error, if there was one."""

        async def run() -> None:
            failure: MillstreamError | None = None
            try:
                await work
            except MillstreamError as error:
                failure = error
            except OSError as error:
                failure = Unavailable(f"a file could not be written: {error.strerror}", code="disk_error")
            except Exception:
                logger.exception("an errand failed")
                failure = MillstreamError("the server failed; its log says why", code="internal_error")
            if done is not None:
                done(failure)
            elif failure is not None:
                logger.warning("the object store could not be tidied up: %s", failure)

        task = asyncio.get_running_loop().create_task(run())
        self._errands.add(task)
        task.add_done_callback(self._errands.discard)

    def submit(self, record: AnyRecord, reply: Reply | None = None, outcome: object = None) -> int:
        return self.committer.submit(record, reply, outcome)

    def alone(self, name: Hashable, action: Callable[[Reply], None], reply: Reply) -> None:
        """Run an action while nothing else is in flight on a name, and keep it so until the action has replied."""
        if self.names.wait_for(name, partial(self.alone, name, action, reply)):
            return
        self.names.hold(name)

        def finish(outcome: object) -> None:
            self.names.release(name)
            reply(outcome)

        def run(settled: object) -> None:
            if isinstance(settled, MillstreamError):
                finish(settled)
                return
            try:
                action(finish)
            except MillstreamError as error:
                finish(error)

        stream = self.machine.find(name) if isinstance(name, StreamKey) else None
        if stream is not None and stream.is_expired(self.clock.now_ms()):
            # A fork of it may be in flight: whether it keeps its name is known when that is durable.
            self.committer.settle(run, None)
        else:
            self.settle(stream, run, None)

    # -- what durable batches do -----------------------------------------------------------------------------

    def _apply_batch(self, batch: Batch) -> None:
        changed: dict[int, Stream] = {}
        appends = 0
        apply, publisher = self.machine.apply, self._publisher
        for record, position, _, _ in batch.entries:
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
                    self._watch_deadline(stream)
            if stream is not None:
                changed[stream.incarnation] = stream
        self.measures.appends += appends
        if changed:
            if not self._changed:
                self._changed_at = monotonic_seconds()
            self._changed |= changed
            if not self._is_waking:
                self._is_waking = True
                asyncio.get_running_loop().call_soon(self._wake)

    def _undo_batch(self, batch: Batch) -> None:
        for record, _, _, _ in batch.entries:
            if isinstance(record, Appended):
                stream = self.machine.by_incarnation(record.stream)
                if stream is not None:
                    stream.ahead = None

    # -- reading -------------------------------------------------------------------------------------------

    def get(self, key: StreamKey) -> Stream:
        return self.machine.get(key, self.clock.now_ms())

    def check_retained(self, stream: Stream, offset: int) -> None:
        """Refuse an offset whose messages a snapshot has replaced (Extensions §2.2)."""
        if offset < stream.earliest:
            raise OffsetTrimmed(
                f"stream {stream.key} is kept from offset {stream.earliest} on",
                earliest=stream.earliest,
                hint="read /bootstrap for the snapshot and what follows it",
            )

    def is_hot(self, stream: Stream, offset: int) -> bool:
        return self.reader.is_hot(stream, offset)

    def read(self, stream: Stream, offset: int, bytes_max: int) -> ReadResult:
        """What is in memory beyond an offset; only where `is_hot`."""
        self._reads += 1
        return self.reader.read(stream, offset, bytes_max)

    def touch(self, stream: Stream) -> None:
        """A read restarts a sliding window. That becomes a record once a second, not once a read."""
        if stream.expiry.ttl_seconds is not None:
            stream.last_access_ms = self.clock.now_ms()
            self._touched[stream.incarnation] = stream.last_access_ms

    def touched_elsewhere(self, touched: dict[int, int]) -> None:
        """Reads at other nodes restarted these windows."""
        for incarnation, at_ms in touched.items():
            if self._touched.get(incarnation, 0) < at_ms:
                self._touched[incarnation] = at_ms

    def scan_paths(self, prefix: str) -> Iterator[Stream]:
        """Every live stream whose v1 path starts with a prefix, from the catalog and from memory."""
        now_ms = self.clock.now_ms()
        seen: set[int] = set()
        candidates = [stream for stream in self.machine.resident() if stream.key.v1_path.startswith(prefix)]
        bucket, slash, rest = prefix.partition("/")
        raw = f"{bucket}\0{rest}".encode() if slash else b""
        for name, _ in self._catalog.scan(raw):
            key = decode_key(name)
            if key.v1_path.startswith(prefix):
                stream = self.machine.find(key)
                if stream is not None:
                    candidates.append(stream)
        for stream in candidates:
            if stream.incarnation not in seen and not stream.deleted and not stream.is_expired(now_ms):
                seen.add(stream.incarnation)
                yield stream

    # -- following -----------------------------------------------------------------------------------------

    def listen(self, topic: Topic, listener: Listener) -> None:
        self._listeners.setdefault(topic, set()).add(listener)

    def unlisten(self, topic: Topic, listener: Listener) -> None:
        listeners = self._listeners.get(topic)
        if listeners is not None:
            listeners.discard(listener)
            if not listeners:
                del self._listeners[topic]

    def listener_count(self, topic: Topic) -> int:
        return len(self._listeners.get(topic, ()))

    def _is_quiet(self) -> bool:
        reads, self._reads = self._reads, 0
        return reads <= QUIET_READS_MAX

    @staticmethod
    def _wake_one(listener: Listener) -> None:
        try:
            listener.wake()
        except Exception:
            # One reader's failure is not another's, nor the writer's.
            logger.exception("a live reader failed")

    def _wake(self) -> None:
        """Tell live readers what has changed: after the writers have their answers, and not all readers at once."""
        changed, self._changed = self._changed, {}
        if self._listeners:
            for topic in [*changed, *{bucket_topic(stream.key.bucket) for stream in changed.values()}]:
                self._woken.extend((topic, listener, self._changed_at) for listener in self._listeners.get(topic, ()))
        self.on_committed(list(changed.values()))
        self._wake_slice()

    def _wake_slice(self) -> None:
        for _ in range(min(WAKE_SLICE, len(self._woken))):
            topic, listener, since = self._woken.popleft()
            if listener in self._listeners.get(topic, ()):  # otherwise it has had its answer meanwhile
                self._wake_one(listener)
                self.measures.wake_seconds.observe(monotonic_seconds() - since)
        if self._woken or self._changed:
            asyncio.get_running_loop().call_soon(self._wake if self._changed else self._wake_slice)
        else:
            self._is_waking = False

    # -- time ----------------------------------------------------------------------------------------------

    def _watch_deadline(self, stream: Stream | None) -> None:
        if stream is not None:
            deadline_ms = stream.expiry.deadline_ms(stream.last_access_ms)
            if deadline_ms is not None:
                heapq.heappush(self._deadlines, (deadline_ms, stream.incarnation))

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            if self.committer.failure is None:
                self._flush_touches()
                self._expire()
            elif self._touched:
                touched, self._touched = self._touched, {}
                self.on_touched(touched)

    def _flush_touches(self) -> None:
        touched, self._touched = self._touched, {}
        if touched:

            def written(error: object) -> None:
                if error is not None:
                    self._touched = touched | self._touched

            self.submit(StreamsTouched(touched), written)

    def _expire(self) -> None:
        """Delete streams whose time has come. A window that slid since it was noted is noted anew."""
        now_ms = self.clock.now_ms()
        while self._deadlines and self._deadlines[0][0] <= now_ms:
            _, incarnation = heapq.heappop(self._deadlines)
            stream = self.machine.by_incarnation(incarnation)
            if stream is None or stream.deleted:
                continue
            if stream.is_expired(now_ms):
                self.alone(stream.key, partial(self._enact_expiry, incarnation), lambda outcome: None)
            else:
                self._watch_deadline(stream)

    def _enact_expiry(self, incarnation: int, reply: Reply) -> None:
        stream = self.machine.by_incarnation(incarnation)
        now_ms = self.clock.now_ms()
        if stream is None or stream.deleted:
            reply(None)
        elif stream.is_expired(now_ms):
            self.submit(StreamDeleted(incarnation, now_ms, stream.key, expired=True), reply)
        else:
            self._watch_deadline(stream)
            reply(None)
