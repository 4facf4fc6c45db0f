"""The replicated log: each batch is one message of a JetStream stream, fenced by the sequence it expects.

A batch carries `Nats-Expected-Last-Sequence`: the broker stores it only right after the sequence that its writer
expects. A writer's first batch, its *fence*, is sent alone, so it is stored right after everything its writer has read.
Later batches are pipelined with predicted sequences. One of them can be stored although the one before it was not, if
another writer's batch took that sequence. So a stored batch counts only if it belongs to the latest fence and begins at
the log's current position. Every reader decides that in the same way (`chain.py`) and skips what does not count.

Therefore a writer can add nothing after another writer's fence, whatever its own state, and publishing a batch again is
harmless: at most one copy counts. This resolves an acknowledgement that never arrives: read the log; if the batch is
there, it is durable; if another writer's fence is there, the batch will never count; otherwise publish it again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import takewhile
from typing import Any, Final, NamedTuple

import msgspec
from nats.aio.msg import Msg

from millstream.clock import Clock
from millstream.errors import MillstreamError, NotLeader
from millstream.log.broker_link import REQUEST_SECONDS, TOO_LARGE, BrokerLink, BrokerRefusal
from millstream.log.chain import BATCH, Chain, StoredBatch, decode_batch
from millstream.log.interface import Done, LogBatch
from millstream.tasks import end

logger = logging.getLogger("millstream.log")

WINDOW_DEFAULT: Final = 2
ACKNOWLEDGE_SECONDS: Final = 1.0
RESOLVE_PAUSE_SECONDS: Final = 0.1
RESTART_SECONDS: Final = (0.1, 5.0)
# Timeouts for waits on the server's event loop and on the flush thread.
START_SECONDS: Final = 5.0
PURGE_SECONDS: Final = 30.0
CLOSE_SECONDS: Final = 2.0
WINDOW_MAX: Final = 32
LOOK_BACK: Final = 2 * WINDOW_MAX
HEADER_BYTES: Final = 4096
BATCH_BYTES_MAX: Final = 1 << 20

EXPECTED: Final = "Nats-Expected-Last-Sequence"
ELECTED: Final = "$JS.EVENT.ADVISORY.STREAM.LEADER_ELECTED"


class LogNames(NamedTuple):
    """The names of a shard's stream and subjects at the broker."""

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
        # Committed batches are pushed to followers; a follower that misses one fetches it.
        "republish": {"src": names.subject, "dest": names.tail_subject},
    }


class LogTrimmed(MillstreamError):
    """The next batch that a reader needs is no longer in the log."""

    code = "log_trimmed"


class _Entry:
    __slots__ = ("batch", "done", "is_stored", "sent_at", "sequence")

    def __init__(self, batch: LogBatch, done: Done, sequence: int) -> None:
        self.batch = batch
        self.done = done
        self.sequence = sequence
        self.is_stored = False
        self.sent_at = 0.0


class JetStreamLog:
    """`read` starts at the position `read_from`; the caller has everything before it."""

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
        self.window = min(window, WINDOW_MAX)
        self.writer = clock.random_bytes(8).hex()
        self.read_from = 1
        self.notices: list[str] = []
        self.failure: str | None = None
        self.batch_bytes_max = min(BATCH_BYTES_MAX, link.payload_bytes_max - HEADER_BYTES)
        # The last sequence that was read, and the chain that decides what counts after it.
        self.sequence = 0
        self.chain = Chain()
        self._fence = 0  # the sequence of our own fence, once it is stored
        self._attempt = 0
        self._deposed: NotLeader | None = NotLeader("this node does not lead the shard")
        self._in_flight: deque[_Entry] = deque()
        self._trims: deque[int] = deque(maxlen=keep_trims + 1)
        self._deliver: Callable[..., object] = lambda *args: None
        self._subscriptions: list[Any] = []
        self._inbox = ""
        self._outgoing: asyncio.Queue[_Entry] = asyncio.Queue()
        self._trouble = asyncio.Event()
        self._is_resolving = False
        self._tasks: list[asyncio.Task[None]] = []
        self._purging: asyncio.Task[Any] | None = None

    @property
    def exists(self) -> bool:
        return True

    @property
    def record_bytes_max(self) -> int:
        """What the broker accepts now: its configuration may have changed."""
        return self._link.payload_bytes_max - HEADER_BYTES

    @property
    def is_writing(self) -> bool:
        return self._deposed is None

    # -- reading ---------------------------------------------------------------------------------------------

    def read(self) -> Iterator[LogBatch]:
        """Every batch that counts from `read_from` to the end of the log at the time of the call."""
        _, last = self._link.wait(self.bounds())
        start = self._link.wait(self.sequence_of(self.read_from))
        position = max(self.read_from, self._link.wait(self.first_position()))
        self.chain = Chain(position, self._link.wait(self._around(start)))
        behind = self.chain.begin_after(self._link.wait(self._window(start)))
        self.sequence = behind if behind is not None else start - 1
        while self.sequence < last:
            found = self._link.wait(self.fetch(self.sequence + 1))
            for stored in found:
                self.sequence = stored.sequence
                if self.chain.accepts(stored):
                    yield stored.batch
            if not found:
                # A lagging replica answered; another one has more.
                self._link.wait(asyncio.sleep(RESOLVE_PAUSE_SECONDS))

    async def _window(self, sequence: int) -> list[StoredBatch]:
        """The batches shortly before and after a sequence."""
        first, last = await self.bounds()
        found: list[StoredBatch] = []
        at, end = max(first, sequence - LOOK_BACK), min(last, sequence + LOOK_BACK)
        while at <= end:
            more = await self.fetch(at, messages=2 * LOOK_BACK)
            if not more:
                await asyncio.sleep(RESOLVE_PAUSE_SECONDS)
                continue
            found += [stored for stored in more if stored.sequence <= end]
            at = more[-1].sequence + 1
        return found

    async def _around(self, sequence: int) -> list[StoredBatch]:
        """The batches shortly before a sequence. A deposed writer's leftovers are at most its batches in flight behind
        the fence that deposed it, so these batches include one of the current writer.

        At the beginning of the log there are none; there the batches before the first fence count.
        """
        first, last = await self.bounds()
        found: list[StoredBatch] = []
        if sequence <= first <= last:
            beginning = await self.fetch(first, messages=LOOK_BACK)
            return list(takewhile(lambda stored: not stored.is_fence, beginning))
        at = max(first, sequence - LOOK_BACK)
        while at < sequence:
            more = await self.fetch(at)
            if not more:
                await asyncio.sleep(RESOLVE_PAUSE_SECONDS)
                continue
            found += [stored for stored in more if stored.sequence < sequence]
            at = more[-1].sequence + 1
        return found

    async def bounds(self, seconds: float = REQUEST_SECONDS) -> tuple[int, int]:
        """The first and the last sequence of the log; if it is empty, the first is one more than the last."""
        state = (await self._link.info(self.names.stream, seconds))["state"]
        first, last = int(state["first_seq"]), int(state["last_seq"])
        return max(first, 1) if state["messages"] else last + 1, last

    async def fetch(self, sequence: int, *, messages: int = 256) -> list[StoredBatch]:
        """Batches from a sequence on; raises LogTrimmed if that sequence is deleted."""
        found = await self._link.fetch(self.names.stream, sequence, messages=messages)
        if found and found[0].sequence != sequence:
            raise LogTrimmed(f"the log begins at sequence {found[0].sequence}, and {sequence} is needed")
        return [decode_batch(stored) for stored in found]

    async def first_position(self) -> int:
        """The first position that the log still holds; 1 if nothing was ever written."""
        found = await self._link.fetch(self.names.stream, 1, messages=1)
        return decode_batch(found[0]).batch.first if found else 1

    async def sequence_of(self, position: int) -> int:
        """The sequence of the first batch that ends after a position, by bisection."""
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
        """Accept appends right after what was read last. If another writer has stored more, the first append fails."""
        self._deliver = deliver
        self._link.wait(self._start(), START_SECONDS)

    async def _start(self) -> None:
        if not self._subscriptions:
            self._inbox = self._link.client.new_inbox()
            self._subscriptions = [
                await self._link.subscribe(f"{self._inbox}.>", self._acknowledged),
                await self._link.subscribe(f"{ELECTED}.{self.names.stream}", self._elected),
            ]
            start = partial(
                self._link.supervisor.start, of=self.names.stream, is_vital=True, pause_seconds=RESTART_SECONDS
            )
            self._tasks = [start("log sending", self._send_forever), start("log resolving", self._resolve_forever)]
            self._link.on_reconnect.append(self._trouble.set)
        assert not self._in_flight
        self._fence = 0
        self._deposed = None

    def append(self, batch: LogBatch, done: Done, *, may_block: bool = False) -> None:
        self._link.loop.call_soon_threadsafe(self._accept, batch, done)

    def _accept(self, batch: LogBatch, done: Done) -> None:
        if self._deposed is not None:
            self._deliver(done, self._deposed)
            return
        entry = _Entry(batch, done, self.sequence + len(self._in_flight) + 1)
        self._in_flight.append(entry)
        # The fence is sent alone: no batch of ours may be stored after another writer's fence.
        if not self._is_resolving and (self._fence or len(self._in_flight) == 1):
            self._outgoing.put_nowait(entry)

    async def _send_forever(self) -> None:
        while True:
            entry = await self._outgoing.get()
            try:
                await self._send(entry)
            except BrokerRefusal as refusal:
                self._give_up(refusal)
            except MillstreamError:
                self._trouble.set()
            except Exception:
                self._trouble.set()  # resolve what became of it before sending more
                raise

    async def _send(self, entry: _Entry) -> None:
        first, following, payload = entry.batch
        entry.sent_at = asyncio.get_running_loop().time()
        fence = self._fence or entry.sequence
        headers = {EXPECTED: str(entry.sequence - 1), BATCH: f"{first} {following} {self.writer} {fence}"}
        reply = f"{self._inbox}.{self._attempt}.{entry.sequence}"
        await self._link.publish(self.names.subject, payload, headers, reply)

    async def _acknowledged(self, message: Msg) -> None:
        """The broker's acknowledgement of one batch. Anything but success is resolved by reading the log."""
        attempt, sequence = map(int, message.subject.rsplit(".", 2)[1:])
        if attempt != self._attempt:
            return  # for an earlier copy: the batch was published again with another sequence
        try:
            answer = msgspec.json.decode(message.data)
        except msgspec.DecodeError:
            answer = {"error": "no responders"}
        error = answer.get("error")
        if isinstance(error, dict) and error.get("err_code") == TOO_LARGE:
            self._give_up(BrokerRefusal(str(error.get("description")), TOO_LARGE))
            return
        if error is not None or answer.get("seq") != sequence:
            self._trouble.set()
            return
        for entry in self._in_flight:
            if entry.sequence == sequence:
                entry.is_stored = True
                break
        self._confirm()

    async def _elected(self, message: Msg) -> None:
        """Another broker leads the stream. Messages to the former leader may be lost, so the log is read to resolve
        them."""
        if self._in_flight:
            self._trouble.set()

    def _confirm(self) -> None:
        while self._in_flight and self._in_flight[0].is_stored:
            self._stored(self._in_flight[0].sequence)

    def _stored(self, sequence: int) -> None:
        """The oldest batch in flight is stored at this sequence."""
        entry = self._in_flight.popleft()
        self.sequence = sequence
        self.chain.position = entry.batch.next
        if not self._fence:
            self._fence = self.chain.fence = sequence
            for following in self._in_flight:
                self._outgoing.put_nowait(following)
        self._deliver(entry.done, None)

    # -- resolving lost acknowledgements ----------------------------------------------------------------------

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
            except BrokerRefusal as refusal:
                self._give_up(refusal)
            except MillstreamError as error:
                logger.info("the outcome of %d batches is open, trying again: %s", len(self._in_flight), error)
                self._trouble.set()
                await asyncio.sleep(RESOLVE_PAUSE_SECONDS)
            except Exception:
                self._trouble.set()
                raise
            finally:
                self._is_resolving = False

    async def _resolve(self) -> None:
        """Read on from the last batch known to be stored, then publish the missing batches again, in order."""
        while not self._outgoing.empty():
            self._outgoing.get_nowait()
        while self._in_flight:
            found = await self.fetch(self.sequence + 1)
            if not found:
                break
            for stored in found:
                if not self._in_flight:
                    break
                is_ours = stored.writer == self.writer and stored.batch.first == self._in_flight[0].batch.first
                if is_ours and stored.fence == (self._fence or stored.sequence):
                    self._stored(stored.sequence)
                elif not self._fence or stored.fence > self._fence:
                    self._step_down(stored)
                    return
                else:
                    self.sequence = stored.sequence  # stored, but it does not count
        await asyncio.sleep(RESOLVE_PAUSE_SECONDS / 4)
        while not self._outgoing.empty():
            self._outgoing.get_nowait()
        self._attempt += 1
        for number, entry in enumerate(self._in_flight, 1):
            entry.sequence, entry.is_stored = self.sequence + number, False
        for entry in list(self._in_flight)[: None if self._fence else 1]:
            await self._send(entry)

    def _step_down(self, winner: StoredBatch) -> None:
        """Another writer's batch is stored at our next sequence: none of ours can be stored any more."""
        logger.info("sequence %d was written by another node: this one no longer leads", winner.sequence)
        self._depose(NotLeader("another node leads the shard by now; nothing of this was written"))

    def _depose(self, reason: NotLeader) -> None:
        self._deposed = reason
        refused, self._in_flight = self._in_flight, deque()
        for entry in refused:
            self._deliver(entry.done, reason)

    def _give_up(self, refusal: BrokerRefusal) -> None:
        """The broker will never accept a batch. Later batches depend on it, and copies of them may still be on their
        way. So this writer ends, and the next writer starts with its own fence."""
        sizes = [len(entry.batch.payload) for entry in self._in_flight]
        logger.error("the broker refuses a batch for good (%s); batches in flight: %s bytes", refusal, sizes)
        self._depose(NotLeader(f"the broker refused to store this: {refusal.message}; nothing was written"))

    def resign(self) -> None:
        """Accept nothing more; batches in flight are still resolved."""
        self._link.loop.call_soon_threadsafe(self._resign)

    def _resign(self) -> None:
        if self._deposed is None:
            self._deposed = NotLeader("this node has handed the shard over; nothing of this was written")

    # -- trimming and closing ----------------------------------------------------------------------------------

    def trim(self, position: int) -> None:
        """Delete batches up to a position, but keep the newest ones for nodes that were down for a short time."""
        self._trims.append(position)
        if len(self._trims) == self._trims.maxlen:
            try:
                self.purge(self._trims[0])
            except MillstreamError as error:
                logger.warning("the log could not be trimmed; the next flush tries again: %s", error)

    def purge(self, position: int) -> None:
        """Delete batches that end at or before a position, except those that determine the fence in force there."""
        self._link.wait(self._purge(position), PURGE_SECONDS)

    async def _purge(self, position: int) -> None:
        self._purging = asyncio.current_task()
        first, last = await self.bounds()
        sequence = min(await self.sequence_of(position), last) - LOOK_BACK
        if sequence > first:
            await self._link.call(f"STREAM.PURGE.{self.names.stream}", {"seq": sequence})

    def close(self) -> None:
        """Close within seconds: requests that a broker does not answer are abandoned."""
        try:
            self._link.wait(self._close(), 2 * CLOSE_SECONDS)
        except MillstreamError as error:
            logger.warning("%s could not be left in order: %s", self.names.stream, error)

    async def _close(self) -> None:
        await end(self._purging)  # the flush thread waits for it
        loop = asyncio.get_running_loop()
        deadline = loop.time() + CLOSE_SECONDS
        while self._in_flight and loop.time() < deadline:
            await asyncio.sleep(0.01)
        await end(*self._tasks)
        self._tasks = []
        if self._subscriptions:
            self._link.on_reconnect.remove(self._trouble.set)
            for subscription in self._subscriptions:
                await subscription.unsubscribe()
            self._subscriptions = []
