"""The replicated log: each batch one message of a JetStream stream, fenced by the sequence it expects.

A batch carries `Nats-Expected-Last-Sequence`: the broker stores it only right behind the one its writer saw last. So
a writer that another has overtaken is refused, whatever it believes, and publishing the same batch again is harmless:
at most one copy can be stored. That is also how an acknowledgement that never arrives is resolved: read the log; if
the batch is there it is durable, if somebody else's is in its place it never will be, and otherwise publish it again.

A message's header `Millstream-Batch` holds `first next writer`; its data is the batch's payload. `LogTail` reads what
any writer stores, in order, for nodes that follow.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import msgspec
from nats.aio.msg import Msg

from millstream.clock import Clock
from millstream.errors import Corrupt, MillstreamError, NotLeader
from millstream.log.broker_link import BrokerLink, Stored
from millstream.log.interface import Done, LogBatch

logger = logging.getLogger("millstream.log")

WINDOW_DEFAULT: Final = 4
ACKNOWLEDGE_SECONDS: Final = 2.0
RESOLVE_PAUSE_SECONDS: Final = 0.1
IDLE_FETCH_SECONDS: Final = 0.5
CLOSE_SECONDS: Final = 15.0
TAIL_BYTES_MAX: Final = 32 << 20
HEADER_BYTES: Final = 4096
BATCH_BYTES_MAX: Final = 1 << 20

BATCH: Final = "Millstream-Batch"
EXPECTED: Final = "Nats-Expected-Last-Sequence"


class LogNames(NamedTuple):
    """How a shard's log is called at the broker."""

    stream: str
    subject: str
    tail_subject: str


def log_names(cluster: str, shard: int) -> LogNames:
    return LogNames(
        f"millstream-{cluster}-log-{shard:04d}",
        f"millstream.{cluster}.log.{shard:04d}",
        f"millstream.{cluster}.tail.{shard:04d}",
    )


def stream_configuration(names: LogNames, replicas: int) -> dict[str, Any]:
    return {
        "name": names.stream,
        "subjects": [names.subject],
        "storage": "file",
        "num_replicas": replicas,
        "retention": "limits",
        "discard": "new",
        "allow_direct": True,
        "deny_delete": True,
        # What is committed goes out to those who follow; whoever misses it fetches it.
        "republish": {"src": names.subject, "dest": names.tail_subject},
    }


class LogTrimmed(MillstreamError):
    """What a reader needs next is no longer in the log."""

    code = "log_trimmed"


class StoredBatch(NamedTuple):
    sequence: int
    writer: str
    batch: LogBatch


def _decode(stored: Stored) -> StoredBatch:
    try:
        first, following, writer = stored.headers[BATCH].split(" ")
        return StoredBatch(stored.sequence, writer, LogBatch(int(first), int(following), stored.data))
    except (KeyError, ValueError):
        raise Corrupt(
            f"the log holds a message that is no batch, at sequence {stored.sequence}",
            hint="something other than millstream has published to the log's subject",
        ) from None


class _Entry:
    __slots__ = ("batch", "done", "is_stored", "sent_at", "sequence")

    def __init__(self, batch: LogBatch, done: Done, sequence: int) -> None:
        self.batch = batch
        self.done = done
        self.sequence = sequence
        self.is_stored = False
        self.sent_at = 0.0


class JetStreamLog:
    """`read` starts at `read_from`, a position; before it the caller has everything."""

    def __init__(
        self,
        link: BrokerLink,
        names: LogNames,
        clock: Clock,
        *,
        window: int = WINDOW_DEFAULT,
        keep_trims: int = 0,
    ) -> None:
        self._link = link
        self.names = names
        self.window = window
        self.writer = clock.random_bytes(8).hex()
        self.read_from = 1
        self.notices: list[str] = []
        self.failure: str | None = None
        self.batch_bytes_max = min(BATCH_BYTES_MAX, link.payload_bytes_max - HEADER_BYTES)
        # The last sequence that is known to be in the log and applied.
        self.sequence = 0
        self._next = 1
        self._deposed: NotLeader | None = NotLeader("this node does not lead the shard")
        self._in_flight: deque[_Entry] = deque()
        self._trims: deque[int] = deque(maxlen=keep_trims + 1)
        self._deliver: Callable[..., object] = lambda *args: None
        self._acknowledgements: Any = None
        self._inbox = ""
        self._outgoing: asyncio.Queue[_Entry] = asyncio.Queue()
        self._trouble = asyncio.Event()
        self._is_resolving = False
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def exists(self) -> bool:
        return True

    @property
    def is_writing(self) -> bool:
        return self._deposed is None

    # -- reading ---------------------------------------------------------------------------------------------

    def read(self) -> Iterator[LogBatch]:
        """Every batch from `read_from` on, up to the end as it is when reading starts."""
        _, last = self._link.wait(self.bounds())
        sequence = self._link.wait(self.sequence_of(self.read_from))
        expected: int | None = None
        while sequence <= last:
            found = self._link.wait(self.fetch(sequence))
            for one in found:
                if expected is not None and one.batch.first != expected:
                    raise Corrupt(
                        f"the log jumps from position {expected} to {one.batch.first} at sequence {one.sequence}",
                        hint="the broker's store is damaged; restore it, or rebuild the cluster from the object store",
                    )
                expected = one.batch.next
                self.sequence = one.sequence
                yield one.batch
            sequence = self.sequence + 1
            if not found:
                # A replica that lags answered; another will do better.
                self._link.wait(asyncio.sleep(RESOLVE_PAUSE_SECONDS))
        self.sequence = max(self.sequence, last, sequence - 1)

    async def bounds(self) -> tuple[int, int]:
        """The first and the last sequence of the log; if it is empty the first is the one behind the last."""
        state = (await self._link.call(f"STREAM.INFO.{self.names.stream}"))["state"]
        first, last = int(state["first_seq"]), int(state["last_seq"])
        return max(first, 1) if state["messages"] else last + 1, last

    async def fetch(self, sequence: int, *, messages: int = 256) -> list[StoredBatch]:
        """Batches from a sequence on; LogTrimmed if that one is gone."""
        found = await self._link.fetch(self.names.stream, sequence, messages=messages)
        if found and found[0].sequence != sequence:
            raise LogTrimmed(f"the log begins at sequence {found[0].sequence}, and {sequence} is needed")
        return [_decode(stored) for stored in found]

    async def first_position(self) -> int:
        """The first position the log still holds; 1 if nothing was ever written."""
        found = await self._link.fetch(self.names.stream, 1, messages=1)
        return _decode(found[0]).batch.first if found else 1

    async def sequence_of(self, position: int) -> int:
        """The sequence of the first batch that reaches beyond a position, by bisection."""
        low, last = await self.bounds()
        high = last + 1
        while low < high:
            middle = (low + high) // 2
            found = await self.fetch(middle, messages=1)
            if found and found[0].batch.next <= position:
                low = middle + 1
            else:
                high = middle
        return low

    # -- appending -------------------------------------------------------------------------------------------

    def start(self, first_position: int, deliver: Callable[..., object]) -> None:
        """Write from here on, right behind what was read last; somebody who is ahead makes the first append fail."""
        self._deliver = deliver
        self._link.wait(self._start())

    async def _start(self) -> None:
        if self._acknowledgements is None:
            self._inbox = self._link.client.new_inbox()
            self._acknowledgements = await self._link.subscribe(f"{self._inbox}.*", self._acknowledged)
            self._tasks = [
                asyncio.get_running_loop().create_task(self._send_forever()),
                asyncio.get_running_loop().create_task(self._resolve_forever()),
            ]
            self._link.on_reconnect.append(self._trouble.set)
        assert not self._in_flight
        self._next = self.sequence + 1
        self._deposed = None

    def append(self, batch: LogBatch, done: Done) -> None:
        self._link.loop.call_soon_threadsafe(self._accept, batch, done)

    def _accept(self, batch: LogBatch, done: Done) -> None:
        if self._deposed is not None:
            self._deliver(done, self._deposed)
            return
        entry = _Entry(batch, done, self._next)
        self._next += 1
        self._in_flight.append(entry)
        if not self._is_resolving:
            self._outgoing.put_nowait(entry)

    async def _send_forever(self) -> None:
        while True:
            entry = await self._outgoing.get()
            try:
                await self._send(entry)
            except MillstreamError:
                self._trouble.set()

    async def _send(self, entry: _Entry) -> None:
        first, following, payload = entry.batch
        entry.sent_at = asyncio.get_running_loop().time()
        headers = {EXPECTED: str(entry.sequence - 1), BATCH: f"{first} {following} {self.writer}"}
        await self._link.publish(self.names.subject, payload, headers, f"{self._inbox}.{entry.sequence}")

    async def _acknowledged(self, message: Msg) -> None:
        """The broker's word on one batch. Anything but success is looked into, not believed."""
        sequence = int(message.subject.rpartition(".")[2])
        try:
            answer = msgspec.json.decode(message.data)
        except msgspec.DecodeError:
            answer = {"error": "no responders"}
        if answer.get("error") is not None or answer.get("seq") != sequence:
            self._trouble.set()
            return
        for entry in self._in_flight:
            if entry.sequence == sequence:
                entry.is_stored = True
                break
        self._confirm()

    def _confirm(self) -> None:
        while self._in_flight and self._in_flight[0].is_stored:
            entry = self._in_flight.popleft()
            self.sequence = entry.sequence
            self._deliver(entry.done, None)

    # -- what became of it -----------------------------------------------------------------------------------

    async def _resolve_forever(self) -> None:
        while True:
            try:
                await asyncio.wait_for(self._trouble.wait(), ACKNOWLEDGE_SECONDS / 4)
            except TimeoutError:
                now = asyncio.get_running_loop().time()
                if not self._in_flight or now - self._in_flight[0].sent_at < ACKNOWLEDGE_SECONDS:
                    continue
            self._trouble.clear()
            if not self._in_flight:
                continue
            self._is_resolving = True
            try:
                await self._resolve()
            except MillstreamError as error:
                logger.info("the outcome of %d batches is open, trying again: %s", len(self._in_flight), error)
                self._trouble.set()
                await asyncio.sleep(RESOLVE_PAUSE_SECONDS)
            finally:
                self._is_resolving = False

    async def _resolve(self) -> None:
        """Read on from the last batch known to be stored, then publish what is not there again, in order."""
        while not self._outgoing.empty():
            self._outgoing.get_nowait()
        while self._in_flight:
            found = await self.fetch(self.sequence + 1)
            if not found:
                break
            for one in found:
                if not self._in_flight:
                    break
                entry = self._in_flight[0]
                if one.writer != self.writer or one.batch.first != entry.batch.first:
                    self._step_down(one)
                    return
                entry.is_stored = True
                self._confirm()
        await asyncio.sleep(RESOLVE_PAUSE_SECONDS / 4)
        for entry in self._in_flight:
            await self._send(entry)

    def _step_down(self, winner: StoredBatch) -> None:
        """Somebody else's batch lies where ours would have gone: none of ours can ever be stored."""
        logger.info("sequence %d was written by another node: this one no longer leads", winner.sequence)
        self._deposed = NotLeader("another node leads the shard by now; nothing of this was written")
        refused, self._in_flight = self._in_flight, deque()
        for entry in refused:
            self._deliver(entry.done, self._deposed)

    def resign(self) -> None:
        """Accept nothing more; what is in flight is still resolved."""
        self._link.loop.call_soon_threadsafe(self._resign)

    def _resign(self) -> None:
        if self._deposed is None:
            self._deposed = NotLeader("this node has handed the shard over; nothing of this was written")

    # -- letting go ------------------------------------------------------------------------------------------

    def trim(self, position: int) -> None:
        """Forget batches up to a position, but not the newest ones: nodes that were away shortly still need them."""
        self._trims.append(position)
        if len(self._trims) == self._trims.maxlen:
            try:
                self.purge(self._trims[0])
            except (MillstreamError, TimeoutError) as error:
                logger.warning("the log could not be trimmed; the next flush tries again: %s", error)

    def purge(self, position: int) -> None:
        """Forget batches that end at or before a position. The last one stays: it says where the log stands."""
        self._link.wait(self._purge(position))

    async def _purge(self, position: int) -> None:
        first, last = await self.bounds()
        sequence = min(await self.sequence_of(position), last)
        if sequence > first:
            await self._link.call(f"STREAM.PURGE.{self.names.stream}", {"seq": sequence})

    def close(self) -> None:
        self._link.wait(self._close(), CLOSE_SECONDS + 5.0)

    async def _close(self) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + CLOSE_SECONDS
        while self._in_flight and loop.time() < deadline:
            await asyncio.sleep(0.01)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        if self._acknowledgements is not None:
            self._link.on_reconnect.remove(self._trouble.set)
            await self._acknowledgements.unsubscribe()
            self._acknowledgements = None


class LogTail:
    """What is committed to a log, in order, as it happens: pushed by the broker, fetched where a push is missing."""

    def __init__(self, link: BrokerLink, log: JetStreamLog) -> None:
        self._link = link
        self._log = log
        self._subscription: Any = None
        self._pushed: deque[StoredBatch] = deque()
        self._bytes = 0
        self._arrived = asyncio.Event()
        self._is_woken = False

    async def next(self, after: int, wait_seconds: float = IDLE_FETCH_SECONDS) -> list[StoredBatch]:
        """The batches that follow a sequence, as many as there are; none if there are none for a while."""
        if self._subscription is None:
            self._subscription = await self._link.subscribe(self._log.names.tail_subject, self._push)
            return await self._log.fetch(after + 1)
        found = self._take(after)
        if not found:
            self._arrived.clear()
            try:
                await asyncio.wait_for(self._arrived.wait(), wait_seconds)
            except TimeoutError:
                return await self._log.fetch(after + 1)
            if self._is_woken:
                self._is_woken = False
                return []
            found = self._take(after)
        return found or await self._log.fetch(after + 1)

    def wake(self) -> None:
        """Let `next` return, with nothing if there is nothing. On the link's loop."""
        self._is_woken = True
        self._arrived.set()

    async def stop(self) -> None:
        if self._subscription is not None:
            await self._subscription.unsubscribe()
            self._subscription = None
        self._pushed.clear()
        self._bytes = 0

    async def _push(self, message: Msg) -> None:
        headers = message.headers or {}
        self._pushed.append(_decode(Stored(int(headers["Nats-Sequence"]), headers, message.data)))
        self._bytes += len(message.data)
        if self._bytes > TAIL_BYTES_MAX:
            # Whoever applies them is behind: they are in the log, and will be fetched from there.
            self._pushed.clear()
            self._bytes = 0
        self._arrived.set()

    def _take(self, after: int) -> list[StoredBatch]:
        found: list[StoredBatch] = []
        while self._pushed and self._pushed[0].sequence <= after + 1:
            one = self._pushed.popleft()
            self._bytes -= len(one.batch.payload)
            if one.sequence == after + 1:
                found.append(one)
                after += 1
        return found
