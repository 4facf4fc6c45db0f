"""The replicated log: each batch one message of a JetStream stream, fenced by the sequence it expects.

A batch carries `Nats-Expected-Last-Sequence`: the broker stores it only right behind the sequence its writer counted
on. A writer's first batch, its *fence*, goes out alone, so it lies right behind everything its writer has read. Batches
after it are pipelined, on predicted sequences; one of those can be stored although the one before it was not, if
somebody else's took its place. So a stored batch counts only if it belongs to the latest fence and begins at the
position where the log stands: every reader decides that alike (`chain.py`), and skips what does not count.

Therefore a writer that another's fence has overtaken can add nothing, whatever it believes, and publishing a batch
again is harmless: at most one copy counts. That is how an acknowledgement that never arrives is resolved: read the log;
if the batch is there it is durable, if a foreign fence is there it never will be, and otherwise publish it again.
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
# A wait on the event loop of the server, and one on the thread of its flushes.
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
        self.window = min(window, WINDOW_MAX)
        self.writer = clock.random_bytes(8).hex()
        self.read_from = 1
        self.notices: list[str] = []
        self.failure: str | None = None
        self.batch_bytes_max = min(BATCH_BYTES_MAX, link.payload_bytes_max - HEADER_BYTES)
        # The last sequence that was read, and what counts from there on.
        self.sequence = 0
        self.chain = Chain()
        self._fence = 0  # the sequence of our own, once it is in the log
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
        """What the broker takes now: it may have been given another configuration since."""
        return self._link.payload_bytes_max - HEADER_BYTES

    @property
    def is_writing(self) -> bool:
        return self._deposed is None

    # -- reading ---------------------------------------------------------------------------------------------

    def read(self) -> Iterator[LogBatch]:
        """Every batch that counts from `read_from` on, up to the end as it is when reading starts."""
        _, last = self._link.wait(self.bounds())
        start = self._link.wait(self.sequence_of(self.read_from))
        position = max(self.read_from, self._link.wait(self.first_position()))
        self.chain = Chain(position, self._link.wait(self._around(start)))
        behind = self.chain.begin_behind(self._link.wait(self._window(start)))
        self.sequence = behind if behind is not None else start - 1
        while self.sequence < last:
            found = self._link.wait(self.fetch(self.sequence + 1))
            for one in found:
                self.sequence = one.sequence
                if self.chain.accepts(one):
                    yield one.batch
            if not found:
                # A replica that lags answered; another will do better.
                self._link.wait(asyncio.sleep(RESOLVE_PAUSE_SECONDS))

    async def _window(self, sequence: int) -> list[StoredBatch]:
        """The batches shortly before and behind a sequence."""
        first, last = await self.bounds()
        found: list[StoredBatch] = []
        at, end = max(first, sequence - LOOK_BACK), min(last, sequence + LOOK_BACK)
        while at <= end:
            more = await self.fetch(at, messages=2 * LOOK_BACK)
            if not more:
                await asyncio.sleep(RESOLVE_PAUSE_SECONDS)
                continue
            found += [one for one in more if one.sequence <= end]
            at = more[-1].sequence + 1
        return found

    async def _around(self, sequence: int) -> list[StoredBatch]:
        """The batches shortly before a sequence. What an overtaken writer left behind lies no further from the fence
        that overtook it than it had batches in flight, so among these is one of whoever writes now.

        At the very beginning of the log there are none: there those count that come before the first fence."""
        first, last = await self.bounds()
        found: list[StoredBatch] = []
        if sequence <= first <= last:
            beginning = await self.fetch(first, messages=LOOK_BACK)
            return list(takewhile(lambda one: not one.is_fence, beginning))
        at = max(first, sequence - LOOK_BACK)
        while at < sequence:
            more = await self.fetch(at)
            if not more:
                await asyncio.sleep(RESOLVE_PAUSE_SECONDS)
                continue
            found += [one for one in more if one.sequence < sequence]
            at = more[-1].sequence + 1
        return found

    async def bounds(self, seconds: float = REQUEST_SECONDS) -> tuple[int, int]:
        """The first and the last sequence of the log; if it is empty the first is the one behind the last."""
        state = (await self._link.info(self.names.stream, seconds))["state"]
        first, last = int(state["first_seq"]), int(state["last_seq"])
        return max(first, 1) if state["messages"] else last + 1, last

    async def fetch(self, sequence: int, *, messages: int = 256) -> list[StoredBatch]:
        """Batches from a sequence on; LogTrimmed if that one is gone."""
        found = await self._link.fetch(self.names.stream, sequence, messages=messages)
        if found and found[0].sequence != sequence:
            raise LogTrimmed(f"the log begins at sequence {found[0].sequence}, and {sequence} is needed")
        return [decode_batch(stored) for stored in found]

    async def first_position(self) -> int:
        """The first position the log still holds; 1 if nothing was ever written."""
        found = await self._link.fetch(self.names.stream, 1, messages=1)
        return decode_batch(found[0]).batch.first if found else 1

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
        # The fence goes out alone: what follows must not be stored behind somebody else's.
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
                self._trouble.set()  # what became of it is looked into before this goes on
                raise

    async def _send(self, entry: _Entry) -> None:
        first, following, payload = entry.batch
        entry.sent_at = asyncio.get_running_loop().time()
        fence = self._fence or entry.sequence
        headers = {EXPECTED: str(entry.sequence - 1), BATCH: f"{first} {following} {self.writer} {fence}"}
        reply = f"{self._inbox}.{self._attempt}.{entry.sequence}"
        await self._link.publish(self.names.subject, payload, headers, reply)

    async def _acknowledged(self, message: Msg) -> None:
        """The broker's word on one batch. Anything but success is looked into, not believed."""
        attempt, sequence = map(int, message.subject.rsplit(".", 2)[1:])
        if attempt != self._attempt:
            return  # a copy that was published again since: the sequences are others now
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
        """Another broker leads the log. What was on its way to the last one may be lost, so it is looked into."""
        if self._in_flight:
            self._trouble.set()

    def _confirm(self) -> None:
        while self._in_flight and self._in_flight[0].is_stored:
            self._stored(self._in_flight[0].sequence)

    def _stored(self, sequence: int) -> None:
        """The oldest batch in flight is in the log, at this sequence."""
        entry = self._in_flight.popleft()
        self.sequence = sequence
        self.chain.position = entry.batch.next
        if not self._fence:
            self._fence = self.chain.fence = sequence
            for following in self._in_flight:
                self._outgoing.put_nowait(following)
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
                is_ours = one.writer == self.writer and one.batch.first == self._in_flight[0].batch.first
                if is_ours and one.fence == (self._fence or one.sequence):
                    self._stored(one.sequence)
                elif not self._fence or one.fence > self._fence:
                    self._step_down(one)
                    return
                else:
                    self.sequence = one.sequence  # it does not count
        await asyncio.sleep(RESOLVE_PAUSE_SECONDS / 4)
        while not self._outgoing.empty():
            self._outgoing.get_nowait()
        self._attempt += 1
        for number, entry in enumerate(self._in_flight, 1):
            entry.sequence, entry.is_stored = self.sequence + number, False
        for entry in list(self._in_flight)[: None if self._fence else 1]:
            await self._send(entry)

    def _step_down(self, winner: StoredBatch) -> None:
        """Somebody else's batch lies where ours would have gone: none of ours can ever be stored."""
        logger.info("sequence %d was written by another node: this one no longer leads", winner.sequence)
        self._depose(NotLeader("another node leads the shard by now; nothing of this was written"))

    def _depose(self, reason: NotLeader) -> None:
        self._deposed = reason
        refused, self._in_flight = self._in_flight, deque()
        for entry in refused:
            self._deliver(entry.done, reason)

    def _give_up(self, refusal: BrokerRefusal) -> None:
        """The broker will never take a batch. Those behind it rest on it, and a copy of one of them may still be on its
        way; so this writer ends here, and whoever goes on does so behind a fence of its own."""
        sizes = [len(entry.batch.payload) for entry in self._in_flight]
        logger.error("the broker refuses a batch for good (%s); batches in flight: %s bytes", refusal, sizes)
        self._depose(NotLeader(f"the broker refused to store this: {refusal.message}; nothing was written"))

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
            except MillstreamError as error:
                logger.warning("the log could not be trimmed; the next flush tries again: %s", error)

    def purge(self, position: int) -> None:
        """Forget batches that end at or before a position, but for those that tell whose fence holds there."""
        self._link.wait(self._purge(position), PURGE_SECONDS)

    async def _purge(self, position: int) -> None:
        self._purging = asyncio.current_task()
        first, last = await self.bounds()
        sequence = min(await self.sequence_of(position), last) - LOOK_BACK
        if sequence > first:
            await self._link.call(f"STREAM.PURGE.{self.names.stream}", {"seq": sequence})

    def close(self) -> None:
        """Let go, within seconds: what a broker that does not answer was asked is given up."""
        try:
            self._link.wait(self._close(), 2 * CLOSE_SECONDS)
        except MillstreamError as error:
            logger.warning("%s could not be left in order: %s", self.names.stream, error)

    async def _close(self) -> None:
        await end(self._purging)  # the flush's thread waits for it
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
