"""One shard on one node: following its log, leading it, and the transitions between the two.

    following ── lease taken, caught up ──▶ starting ── fence in the log ──▶ leading
        ▲                                       │                              │
        └───────────── refused by the log ──────┴── lease lost, or handed over ┘

A follower applies batches as they are committed. A leader has caught up with the end of the log and stored a record of
its own there, its fence; from then on the log refuses its predecessor's appends, whatever the predecessor's state. A
leader's fresh reads rest on its lease, which is checked for each answer; its writes rest on the fence alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final, Protocol

import msgspec
from nats.aio.msg import Msg

from millstream.clock import Clock
from millstream.cluster.membership import Membership
from millstream.errors import MillstreamError, NotLeader, OutcomeUnknown, Unavailable
from millstream.log.broker_link import BrokerLink
from millstream.log.jetstream_log import JetStreamLog, LogTrimmed
from millstream.log.log_tail import LogTail
from millstream.shard.deadlines import TOUCHES_PER_RECORD
from millstream.shard.ownership import StoreRefused
from millstream.shard.quarantine import Unapplicable
from millstream.shard.shard import Shard
from millstream.slices import batched
from millstream.streams.records import LeaderStarted, StoreClaimed
from millstream.tasks import end
from millstream.units import Incarnation, Milliseconds

logger = logging.getLogger("millstream.cluster")

FRESHNESS_POLL_SECONDS: Final = 0.5
FRESH_SECONDS: Final = 2.0
RETRY_SECONDS: Final = 0.2
REFUSED_SECONDS: Final = 5.0
APPLY_SLICE: Final = 32
DRAIN_SECONDS: Final = 5.0
UNSUBSCRIBE_SECONDS: Final = 1.0

_TOUCHES: Final = msgspec.msgpack.Decoder(dict[Incarnation, Milliseconds])


class Outdated(MillstreamError):
    """The log no longer holds what this node needs next: its state must be restored from the object store."""

    code = "outdated"


class LeaderTasks(Protocol):
    """Background work that a node does for a shard only while it leads it."""

    def resume(self) -> None: ...

    def pause(self) -> None: ...


class Replica:
    def __init__(
        self,
        shard: Shard,
        log: JetStreamLog,
        link: BrokerLink,
        membership: Membership,
        clock: Clock,
        leader_tasks: LeaderTasks,
        on_outdated: Callable[[], None],
    ) -> None:
        self.number = shard.number
        self.shard = shard
        self.log = log
        self._link = link
        self._tail = LogTail(link, log)
        self._membership = membership
        self._clock = clock
        self._leader_tasks = leader_tasks
        self.role = "following"
        self.is_caught_up = False
        # Set when the node is about to stop: it must not lead again.
        self.is_retired = False
        self._fresh_at = float("-inf")
        self.known_sequence = self.known_position = 0
        # The last claim of the object store in the log at the moment when this node had caught up.
        self._claim_found: StoreClaimed | None = None
        self._leave = asyncio.Event()
        self._successor: int | None = None
        self._before_release: Callable[[], Awaitable[None]] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._subscriptions: list[Any] = []
        self._on_outdated = on_outdated
        shard.is_current = self.is_current
        shard.deadlines.on_touched = self._forward_touches
        shard.committer.on_failure = self._leave.set
        shard.committer.refuse(NotLeader("this node has not caught up yet"))

    # -- state for other components ----------------------------------------------------------------------------

    @property
    def is_leading(self) -> bool:
        """Whether this node may accept writes and answer as the leader right now."""
        return self.role == "leading" and self._membership.holds(self.number)

    @property
    def may_append(self) -> bool:
        """Whether this node may append, although its lease may have expired. While the brokers are unavailable no node
        can renew or take the lease, and after a new leader's fence the log refuses this node's appends."""
        return self.role == "leading" and self._membership.is_kept(self.number)

    def is_current(self) -> bool:
        """Whether this node is known to have had everything that was committed a moment ago."""
        if self.role == "leading":
            return self._membership.holds(self.number)
        return self._clock.monotonic() - self._fresh_at < FRESH_SECONDS

    @property
    def last_known_position(self) -> int:
        """The last position of the log that this node knows of."""
        return max(self.applied_position, self.known_position)

    @property
    def applied_position(self) -> int:
        return self.shard.committer.applied_position - 1

    # -- start and stop ----------------------------------------------------------------------------------------

    async def start(self) -> None:
        await self._link.ask(self._subscribe())
        self.shard.run()
        self._loop = asyncio.get_running_loop()
        start = partial(self.shard.supervisor.start, of=f"shard {self.number}", is_vital=True)
        self._tasks = [start("replica", self._run_forever), start("freshness", self._verify_forever)]

    async def abandon(self, timeout_seconds: float | None = None) -> None:
        """Stop following and close the shard, whatever its state."""
        await end(*self._tasks)
        self._tasks = []
        with contextlib.suppress(Unavailable):  # a link that is closed has no subscriptions
            await self._link.ask(self._unsubscribe(), UNSUBSCRIBE_SECONDS)
        await self.shard.stop(timeout_seconds)

    async def hand_over(
        self, successor: int | None, before_release: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """Give the lease away and wait until this node has stopped leading.

        `before_release` runs while no node writes: all accepted records are stored, and the successor has not begun.
        """
        if self.role == "following":
            return
        self._successor, self._before_release = successor, before_release
        self._membership.candidates.discard(self.number)
        self._leave.set()
        deadline = self._clock.monotonic() + DRAIN_SECONDS + 1.0
        while self.role in ("leading", "starting", "leaving") and self._clock.monotonic() < deadline:
            await asyncio.sleep(0.01)

    def membership_changed(self) -> None:
        """React to a change of membership: stop leading if the lease is lost, wake the follower if it is ours."""
        if self.role == "leading" and not self._membership.is_kept(self.number):
            self._leave.set()
        elif self.role == "following" and self._membership.is_kept(self.number):
            self._link.loop.call_soon_threadsafe(self._tail.wake)

    async def _run_forever(self) -> None:
        while True:
            try:
                await self._follow()
                await self._lead()
            except (LogTrimmed, Outdated):
                logger.warning("shard %d: the log has gone on without this node; restoring its state", self.number)
                self._membership.candidates.discard(self.number)
                self._on_outdated()
                return
            except Unapplicable as error:
                # Restoring would lead to the same error, so this node neither leads nor follows until an operator acts.
                logger.critical("shard %d stops here: %s; %s", self.number, error.message, error.hint)
                self._membership.candidates.discard(self.number)
                self.shard.committer.refuse(OutcomeUnknown(error.message, code="apply_failed", hint=error.hint))
                return
            except StoreRefused as error:
                logger.critical("shard %d accepts no writes: %s; %s", self.number, error.message, error.hint)
                await asyncio.sleep(REFUSED_SECONDS)
            except MillstreamError as error:
                logger.info("shard %d: %s", self.number, error)
                await asyncio.sleep(RETRY_SECONDS)
            except Exception:
                # State and log may differ now: this node must neither lead nor follow.
                logger.critical("shard %d failed; it is restored from the object store", self.number, exc_info=True)
                self._on_outdated()
                return

    async def _follow(self) -> None:
        """Apply committed batches until this node has the lease and has caught up."""
        self.role = "following"
        self.shard.follow(NotLeader("another node leads this shard"))
        _, end = await self._link.ask(self.log.bounds())
        while not self._membership.is_kept(self.number):
            if self.shard.budget.used > self.shard.hot_bytes_max and self.shard.machine.sealed:
                # Memory is full of messages that a flush has made cold. It is freed when the catalog has caught up.
                self._membership.candidates.discard(self.number)
                await asyncio.sleep(RETRY_SECONDS)
                continue
            await self._advance()
            if not self.is_caught_up and self.log.sequence >= end:
                self.is_caught_up = True
                self._claim_found = self.shard.machine.store_claim
                logger.info("shard %d: caught up at position %d", self.number, self.applied_position)
            if self.is_caught_up and self._may_lead():
                self._membership.candidates.add(self.number)
            else:
                self._membership.candidates.discard(self.number)
        self.role = "starting"
        _, last = await self._link.ask(self.log.bounds())
        while self.log.sequence < last:
            await self._advance()

    def _may_lead(self) -> bool:
        return not self.is_retired and self._membership.heartbeat.node not in self._membership.view.members

    async def _advance(self) -> int:
        if self.shard.catalog_follower.is_behind:
            raise Outdated("the manifests have gone on without this node")
        found = await self._link.ask(self._tail.next(self.log.sequence))
        for count, stored in enumerate(found, 1):
            if self.log.chain.accepts(stored):
                self.shard.apply_committed(stored.batch)
            self.log.sequence = stored.sequence
            if count % APPLY_SLICE == 0:
                await asyncio.sleep(0)
        return len(found)

    async def _lead(self) -> None:
        """Fence the log, serve until the lease is lost or handed over, then stop the leader's work in order."""
        await self._link.ask(self._tail.stop())
        self._leave.clear()
        self._successor = self._before_release = None
        generation = self._membership.generation(self.number)
        if generation == 0:
            return
        fence = LeaderStarted(self._membership.heartbeat.node, generation, self._clock.now_ms())
        try:
            await self.shard.lead(fence, claims_later=self._is_store_known)
        except NotLeader:
            return  # another node wrote meanwhile: catch up first
        except StoreRefused:
            self.shard.committer.refuse(NotLeader("the object store is not this cluster's; nothing was written"))
            await self.shard.committer.drain()
            self.log.resign()
            raise
        self.role = "leading"
        logger.info("leading shard %d, generation %d", self.number, generation)
        self._leader_tasks.resume()
        try:
            await self._leave.wait()
        finally:
            self.role = "leaving"
            self._leader_tasks.pause()
        failure = self.shard.committer.failure
        self.shard.committer.refuse(NotLeader("another node leads this shard from now on; nothing was written"))
        await self.shard.committer.drain()
        self.log.resign()
        logger.info("no longer leading shard %d", self.number)
        if self._before_release is not None:
            await self._before_release()
        await self._link.ask(self._membership.release(self.number, self._successor))
        if isinstance(failure, OutcomeUnknown):
            raise Unapplicable(failure.message, hint=failure.hint)  # this node's state differs from the log

    @property
    def _is_store_known(self) -> bool:
        """Whether a leader has claimed the object store for this cluster while this node followed.

        If so, a change of leader need not make writers wait for the store, which may be slow or down.
        """
        return self.shard.ownership.refusal is None and self.shard.machine.store_claim != self._claim_found

    # -- freshness and touches -----------------------------------------------------------------------------------

    def _topic(self, name: str) -> str:
        return f"millstream.{self._membership.settings.name}.{name}.{self.number:04d}"

    async def _subscribe(self) -> None:
        self._subscriptions = [
            await self._link.subscribe(self._topic("end"), self._answer_end),
            await self._link.subscribe(self._topic("touched"), self._touched_elsewhere),
        ]

    async def _unsubscribe(self) -> None:
        await self._tail.stop()
        for subscription in self._subscriptions:
            await subscription.unsubscribe()
        self._subscriptions = []

    async def _answer_end(self, message: Msg) -> None:
        """Answer a follower's question where the log ends. Only the leader answers, while its lease is valid. On the
        link's loop."""
        if self.role == "leading" and self.log.is_writing and self._membership.holds(self.number):
            await message.respond(b"%d %d" % (self.log.sequence, self.applied_position))

    async def _request_end(self, seconds: float = FRESHNESS_POLL_SECONDS * 2) -> tuple[int, int]:
        answer = await self._link.ask(self._link.request(self._topic("end"), seconds=seconds))
        end, position = map(int, answer.data.split(b" "))
        return end, position

    async def is_led(self) -> bool:
        """Whether a node answers as the leader. The holder of the lease may still be catching up."""
        try:
            await self._request_end(RETRY_SECONDS)
        except (Unavailable, ValueError):
            return False
        return True

    async def _verify_forever(self) -> None:
        """Ask the leader repeatedly where the log ends. A node that has reached that end was current when it asked."""
        while True:
            await asyncio.sleep(FRESHNESS_POLL_SECONDS)
            if self.role == "leading":
                continue
            asked_at = self._clock.monotonic()
            try:
                end, self.known_position = await self._request_end()
            except (Unavailable, ValueError):
                continue
            self.known_sequence = end
            deadline = asked_at + FRESH_SECONDS
            while self.log.sequence < end and self._clock.monotonic() < deadline:
                await asyncio.sleep(0.01)
            if end and self.log.sequence >= end:
                self._fresh_at = asked_at

    def _forward_touches(self, touched: dict[Incarnation, Milliseconds]) -> None:
        for touches in batched(list(touched.items()), TOUCHES_PER_RECORD):
            self._link.submit(self._link.publish(self._topic("touched"), msgspec.msgpack.encode(dict(touches))))

    async def _touched_elsewhere(self, message: Msg) -> None:
        if self.role == "leading":
            with contextlib.suppress(msgspec.MsgspecError):
                self._loop.call_soon_threadsafe(self.shard.deadlines.touched_elsewhere, _TOUCHES.decode(message.data))
