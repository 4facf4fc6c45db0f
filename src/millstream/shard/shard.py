"""The shard: what the server asks to create, append, read, delete and follow streams.

Writers pass a command and a `reply`; the reply gets the outcome, or the error, once it is durable. Readers get
committed state at once. All methods run on one event loop.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Protocol

from millstream.clock import Clock
from millstream.errors import MillstreamError
from millstream.log.interface import Log
from millstream.protocol.keys import StreamKey
from millstream.shard.checkpointer import Checkpointer
from millstream.shard.committer import Batch, Committer, Reply, hot_budget_exhausted
from millstream.shard.names import Names
from millstream.shard.reader import Reader, ReadResult
from millstream.shard.recovery import publish, recover
from millstream.streams.commands import AppendMessages, Created, CreateStream
from millstream.streams.machine import StateMachine
from millstream.streams.records import (
    AnyRecord,
    Appended,
    SecretsCreated,
    StreamCreated,
    StreamDeleted,
    StreamsTouched,
)
from millstream.streams.state import Stream
from millstream.tiers.catalog import Catalog, decode_key
from millstream.tiers.hot import HotTier

logger = logging.getLogger("millstream.shard")

TICK_SECONDS = 1.0


class Listener(Protocol):
    def wake(self, stream: Stream) -> None:
        """The stream has new messages, was closed or was deleted."""
        ...


class Shard:
    def __init__(
        self,
        log: Log,
        catalog: Catalog,
        clock: Clock,
        *,
        hot_bytes_max: int,
        checkpoint_seconds: float,
    ) -> None:
        self.clock = clock
        self._log = log
        self._catalog = catalog
        self._hot_bytes_max = hot_bytes_max
        self._checkpoint_seconds = checkpoint_seconds
        self.machine = StateMachine(catalog)
        self.hot = HotTier()
        recovered = recover(log, catalog, self.machine, self.hot)
        self.notices = [*log.notices, f"recovered: {recovered.records_applied} records replayed"]
        self.committer = Committer(log, recovered.next_position, self._apply_batch, self._undo_batch)
        self.reader = Reader(self.machine, self.hot)
        self.names = Names()
        self._listeners: dict[int, set[Listener]] = {}
        self._touched: set[int] = set()
        self._deadlines: list[tuple[int, int]] = []
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="millstream-catalog")
        self._checkpointer = Checkpointer(self.machine, catalog, self.committer, self._executor)
        self._tasks: list[asyncio.Task[None]] = []
        self.on_committed: Callable[[list[Stream]], None] = lambda streams: None

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self.committer.start(loop)
        self._deadlines = [(deadline, incarnation) for incarnation, deadline in self._catalog.expiring()]
        heapq.heapify(self._deadlines)
        for stream in self.machine.dirty.values():
            self._watch_deadline(stream)
        if self.machine.secrets is None:
            self.submit(SecretsCreated(self.clock.random_bytes(32), self.clock.random_bytes(32)))
            await self.committer.drain()
        self._tasks = [loop.create_task(self._tick_forever()), loop.create_task(self._checkpoint_forever())]

    async def stop(self) -> None:
        """Finish what is in flight, write a last checkpoint and let go of the files."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.committer.failure is None:
            self._flush_touches()
            await self.committer.drain()
            await self._checkpointer.checkpoint()
        self._log.close()
        self._executor.shutdown()
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
            if self.hot.bytes + self.committer.pending_bytes + len(command.body) > self._hot_bytes_max:
                raise hot_budget_exhausted(self._hot_bytes_max)
            position = self.committer.submit(record, reply, outcome)
            self.machine.accept(stream, record, outcome.tail, position)
        except MillstreamError as error:
            self.settle(stream, reply, error)

    def settle(self, stream: Stream | None, reply: Reply, outcome: object) -> None:
        """Answer what rests on a stream's state, once that state is durable."""
        if stream is not None and stream.ahead is not None:
            self.committer.settle(reply, outcome)
        else:
            reply(outcome)

    def create(self, command: CreateStream, reply: Reply) -> None:
        """Create a stream, or find that it exists as asked; the reply gets a Created or an error."""
        if command.fork is not None and self.names.wait_for(command.fork.source, partial(self.create, command, reply)):
            return
        self.alone(command.key, partial(self._create, command), reply)

    def _create(self, command: CreateStream, reply: Reply) -> None:
        now_ms = self.clock.now_ms()
        records, existing = self.machine.check_create(command, now_ms, self.reader.resolve_fork)
        if existing is not None:
            reply(existing)
            return
        if self.hot.bytes + self.committer.pending_bytes + len(command.body) > self._hot_bytes_max:
            raise hot_budget_exhausted(self._hot_bytes_max)
        for record in records[:-1]:
            self.submit(record)
        created = records[-1]
        assert isinstance(created, StreamCreated)

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
        self.submit(StreamDeleted(stream.incarnation, now_ms), reply)

    def submit(self, record: AnyRecord, reply: Reply | None = None, outcome: object = None) -> int:
        return self.committer.submit(record, reply, outcome)

    def alone(self, name: StreamKey | tuple[str, str], action: Callable[[Reply], None], reply: Reply) -> None:
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
        self.settle(stream, run, None)

    # -- what durable batches do -----------------------------------------------------------------------------

    def _apply_batch(self, batch: Batch) -> None:
        changed: dict[int, Stream] = {}
        machine, hot = self.machine, self.hot
        for record, position, _, _ in batch.entries:
            if record is None:
                continue
            stream = machine.apply(record, position)
            if type(record) is Appended:
                if stream is not None and record.messages:
                    hot.publish(record.stream, record.offset, position, record.at_ms, record.messages)
            elif type(record) is StreamCreated:
                publish(record, position, machine, hot)
                self._watch_deadline(stream)
            if stream is not None:
                changed[stream.incarnation] = stream
            if machine.purged:
                self._free_purged(changed)
        if changed:
            self._wake(changed)

    def _free_purged(self, changed: dict[int, Stream]) -> None:
        for stream in self.machine.purged:
            self.hot.drop(stream.incarnation)
            changed[stream.incarnation] = stream
        self.machine.purged.clear()

    def _undo_batch(self, batch: Batch) -> None:
        for record, _, _, _ in batch.entries:
            if isinstance(record, Appended):
                stream = self.machine.by_incarnation(record.stream)
                if stream is not None:
                    stream.ahead = None

    # -- reading -------------------------------------------------------------------------------------------

    def get(self, key: StreamKey) -> Stream:
        return self.machine.get(key, self.clock.now_ms())

    def read(self, stream: Stream, offset: int, bytes_max: int) -> ReadResult:
        return self.reader.read(stream, offset, bytes_max)

    def touch(self, stream: Stream) -> None:
        """A read restarts a sliding window. That becomes a record once a second, not once a read."""
        if stream.expiry.ttl_seconds is not None:
            stream.last_access_ms = self.clock.now_ms()
            self._touched.add(stream.incarnation)

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

    def listen(self, stream: Stream, listener: Listener) -> None:
        self._listeners.setdefault(stream.incarnation, set()).add(listener)

    def unlisten(self, stream: Stream, listener: Listener) -> None:
        listeners = self._listeners.get(stream.incarnation)
        if listeners is not None:
            listeners.discard(listener)
            if not listeners:
                del self._listeners[stream.incarnation]

    def listener_count(self, stream: Stream) -> int:
        return len(self._listeners.get(stream.incarnation, ()))

    def _wake(self, changed: dict[int, Stream]) -> None:
        if self._listeners:
            for incarnation, stream in changed.items():
                listeners = self._listeners.get(incarnation)
                if listeners is not None:
                    for listener in tuple(listeners):
                        try:
                            listener.wake(stream)
                        except Exception:
                            # One reader's failure is not another's, nor the writer's.
                            logger.exception("a reader of %s failed", stream.key)
        self.on_committed(list(changed.values()))

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

    def _flush_touches(self) -> None:
        if self._touched:
            self.submit(StreamsTouched(sorted(self._touched), self.clock.now_ms()))
            self._touched.clear()

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
            self.submit(StreamDeleted(incarnation, now_ms, expired=True), reply)
        else:
            self._watch_deadline(stream)
            reply(None)

    async def _checkpoint_forever(self) -> None:
        while True:
            await asyncio.sleep(self._checkpoint_seconds)
            try:
                await self._checkpointer.checkpoint()
            except Exception:
                # The log still holds everything; a later checkpoint may succeed (a disk that was full, say).
                logger.exception("checkpoint failed; the next one is tried in %s s", self._checkpoint_seconds)
