"""Membership of the cluster and leases of its shards, in one key-value bucket at the broker.

    cluster        settings fixed when the cluster was created: shards, replicas
    lease.<shard>  the node that leads, with a generation that grows with each new leader
    node.<id>      a node's heartbeat
    member.<id>    an operator's decision about a node: draining, removed

A lease lasts `lease_seconds`. Its holder counts from *before* it wrote the lease, by its own monotonic clock; other
nodes count from when they *saw* it, by theirs. So no node takes a lease while its holder still considers it valid,
however the clocks are set, and a process that was suspended finds its lease expired. Every write names the revision
that it replaces.

Runs on the broker link's event loop; `holds`, `view` and `candidates` are used from the server's loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
from nats.aio.msg import Msg

from millstream.clock import Clock
from millstream.errors import ConfigurationError, MillstreamError, NotFound, Unavailable
from millstream.log.broker_link import STREAM_NOT_FOUND, WRONG_LAST_SEQUENCE, BrokerLink, BrokerRefusal
from millstream.log.jetstream_log import log_names, stream_configuration
from millstream.streams.records import StoreClaimed
from millstream.tasks import end
from millstream.units import Position

logger = logging.getLogger("millstream.cluster")

T = TypeVar("T")

POLL_SECONDS: Final = 0.2
RESTART_SECONDS: Final = (0.2, 1.0)
ANSWER_SECONDS: Final = 1.0
RENEWALS_PER_LEASE: Final = 5
# Clocks of different machines may run at slightly different speeds.
LEASE_MARGIN: Final = 0.1
SUCCESSOR_SECONDS: Final = 1.0
NODE_SECONDS: Final = 1.0
NODE_GONE_SECONDS: Final = 5.0
RELEASE_SECONDS: Final = 2.0
SHARDS_MAX: Final = 1024
_EXPECTED: Final = "Nats-Expected-Last-Subject-Sequence"


class Settings(msgspec.Struct, frozen=True):
    """The settings that all nodes of a cluster must agree on."""

    name: str
    shards: int
    replicas: int
    # The first position of each shard's log if the cluster was restored; empty for a new cluster.
    origins: list[Position] = []
    # The claims by which the restore took over the object store, for each shard.
    claims: list[StoreClaimed | None] = []

    def origin(self, shard: int) -> Position:
        return self.origins[shard] if self.origins else Position(1)

    def claim(self, shard: int) -> StoreClaimed | None:
        return self.claims[shard] if self.claims else None


class Lease(msgspec.Struct, frozen=True):
    node: int
    advertise: str
    generation: int
    released: bool = False
    successor: int | None = None


class Heartbeat(msgspec.Struct, frozen=True):
    node: int
    advertise: str
    broker: str
    ready: bool = False
    beat: int = 0


class Seen(NamedTuple):
    """A value, and the time on our clock at which it was first seen."""

    revision: int
    value: Any
    since: float


class View(NamedTuple):
    """The cluster as this node sees it."""

    leases: dict[int, Lease]
    nodes: dict[int, Heartbeat]
    members: dict[int, str]
    # Members of the cluster whose heartbeat has stopped.
    down: dict[int, Heartbeat]

    @property
    def active(self) -> list[int]:
        """The nodes that are up, ready, and allowed to lead."""
        return sorted(node for node, heartbeat in self.nodes.items() if heartbeat.ready and node not in self.members)

    def led_by(self, node: int) -> list[int]:
        return [shard for shard, lease in self.leases.items() if lease.node == node and not lease.released]


class _Held(NamedTuple):
    revision: int
    lease: Lease
    deadline: float
    renewed_at: float


class Membership:
    def __init__(
        self, link: BrokerLink, clock: Clock, settings: Settings, heartbeat: Heartbeat, lease_seconds: float
    ) -> None:
        self.link = link
        self._clock = clock
        self.settings = settings
        self.heartbeat = heartbeat
        self._lease_seconds = lease_seconds
        self._bucket = f"millstream-{settings.name}"
        self._stream = f"KV_{self._bucket}"
        self._seen: dict[str, Seen] = {}
        self._held: dict[int, _Held] = {}
        self._heartbeat_sent_at = float("-inf")
        self._changed = asyncio.Event()
        # Shards whose lease this node would take. The server's loop fills it, the link's loop reads it.
        self.candidates: set[int] = set()
        self.view = View({}, {}, {}, {})
        self.on_change: Callable[[], None] = lambda: None
        self._tasks: list[asyncio.Task[None]] = []

    # -- for the server's thread -------------------------------------------------------------------------------

    def holds(self, shard: int) -> bool:
        """Whether this node holds a valid lease right now."""
        held = self._held.get(shard)
        return held is not None and self._clock.monotonic() < held.deadline

    def is_kept(self, shard: int) -> bool:
        """Whether this node held the lease last and no other node is known to have taken it, even if it has expired."""
        return shard in self._held

    def generation(self, shard: int) -> int:
        held = self._held.get(shard)
        return held.lease.generation if held is not None else 0

    # -- joining -----------------------------------------------------------------------------------------------

    async def join(
        self, *, may_bootstrap: bool, waiting: Callable[[str], None], obstacle: ConfigurationError | None = None
    ) -> None:
        """Wait until the cluster exists, or create it; then check that this node belongs to it.

        `obstacle` is why this node may not create a new cluster, although it may join an existing one.
        """
        while True:
            try:
                found = await self._found()
                if found is None and may_bootstrap and obstacle is not None:
                    raise obstacle
                if found is None and may_bootstrap:
                    await self._bootstrap()
                elif found is None:
                    waiting("no initialised cluster is in sight; waiting for its bootstrap node")
                else:
                    self._check(found)
                    break
            except (Unavailable, BrokerRefusal) as error:
                waiting(error.message)
            await asyncio.sleep(POLL_SECONDS)
        await self._poll()
        await self.link.subscribe(f"millstream.{self.settings.name}.hurry", self._on_change_announced)
        self._changed.set()
        steps = (
            ("renewing", self._renew, POLL_SECONDS / 2),
            ("looking", self._wait_and_poll, 0.0),
            ("heartbeat", self._send_heartbeat, POLL_SECONDS / 2),
        )
        # A defect, or a value that another version wrote, must not end any of these tasks for long: valid leases would
        # be lost, and a node that stops polling would keep following a leader that is gone.
        start = partial(self.link.supervisor.start, is_vital=True, pause_seconds=RESTART_SECONDS)
        self._tasks = [start(f"membership {name}", partial(self._repeat, step, pause)) for name, step, pause in steps]

    async def _found(self) -> Settings | None:
        try:
            await self.link.info(self._stream, ANSWER_SECONDS)
        except BrokerRefusal as refusal:
            if refusal.number == STREAM_NOT_FOUND:
                return None
            raise
        stored = await self.link.last(self._stream, self._subject("cluster"))
        return msgspec.json.decode(stored.data, type=Settings) if stored is not None else None

    def _check(self, found: Settings) -> None:
        for name in ("name", "shards"):
            ours, theirs = getattr(self.settings, name), getattr(found, name)
            if ours != theirs:
                raise ConfigurationError(
                    f"cluster.{name} is {ours!r} here, but the cluster was begun with {theirs!r}",
                    hint=f"set cluster.{name} = {theirs!r}; it cannot change once the cluster exists",
                )
        if self.view.members.get(self.heartbeat.node) == "removed":
            raise ConfigurationError(f"node {self.heartbeat.node} was removed from the cluster")
        self.settings = found

    async def _bootstrap(self) -> None:
        """Create the bucket and the logs, and only then write the key that says that the cluster exists."""
        replicas = self.settings.replicas
        await self.link.call(
            f"STREAM.CREATE.{self._stream}",
            {
                "name": self._stream,
                "subjects": [f"$KV.{self._bucket}.>"],
                "storage": "file",
                "num_replicas": replicas,
                "max_msgs_per_subject": 1,
                "discard": "new",
                "allow_direct": True,
                "allow_rollup_hdrs": True,
                "deny_delete": True,
            },
        )
        for shard in range(self.settings.shards):
            names = log_names(self.settings.name, shard)
            await self.link.call(f"STREAM.CREATE.{names.stream}", stream_configuration(names, replicas))
        await self._put("cluster", self.settings, 0)
        logger.info("began the cluster %s with %d shards", self.settings.name, self.settings.shards)

    # -- background tasks --------------------------------------------------------------------------------------

    async def stop(self) -> None:
        await end(*self._tasks)
        self._tasks = []

    async def _repeat(self, step: Callable[[], Awaitable[None]], seconds: float) -> None:
        """Run a step repeatedly. Each step has its own task, so that renewals do not wait for another step's answer."""
        while True:
            try:
                await step()
            except MillstreamError as error:
                logger.debug("membership: %s", error)
            await asyncio.sleep(seconds)

    async def _wait_and_poll(self) -> None:
        """Poll after an interval, or at once when another node announces a change."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), POLL_SECONDS)
        self._changed.clear()
        await self._poll()
        await self._take()

    async def _on_change_announced(self, message: Msg) -> None:
        self._changed.set()

    async def _renew(self) -> None:
        due = self._lease_seconds / RENEWALS_PER_LEASE
        now = self._clock.monotonic()
        shards = [shard for shard, held in self._held.items() if now - held.renewed_at >= due]
        await asyncio.gather(*(self._renew_one(shard) for shard in shards))

    async def _renew_one(self, shard: int) -> None:
        held = self._held[shard]
        started = self._clock.monotonic()
        try:
            # A renewal that is lost while the brokers elect a leader must not cost the whole lease.
            seconds = 2 * self._lease_seconds / RENEWALS_PER_LEASE
            revision = await self._put(_lease_key(shard), held.lease, held.revision, seconds)
        except BrokerRefusal as refusal:
            if refusal.number in WRONG_LAST_SEQUENCE:
                await self._resolve_refused_renewal(shard, held)
            return
        except Unavailable:
            return  # retried in the next round, until another node has the lease
        if self._held.get(shard) is held:
            self._held[shard] = _Held(revision, held.lease, self._deadline(started), started)

    async def _resolve_refused_renewal(self, shard: int, held: _Held) -> None:
        """Handle a refused renewal: either an earlier renewal was stored without an answer, or another node has the
        lease."""
        stored = await self.link.last(self._stream, self._subject(_lease_key(shard)))
        if stored is None or stored.sequence == held.revision:
            return  # this replica lags; the next round decides
        if msgspec.json.decode(stored.data, type=Lease) == held.lease:
            self._held[shard] = held._replace(revision=stored.sequence)
        else:
            self._drop_lease(shard)

    def _drop_lease(self, shard: int) -> None:
        if self._held.pop(shard, None) is not None:
            self.on_change()

    def _deadline(self, started: float) -> float:
        return started + self._lease_seconds * (1 - LEASE_MARGIN)

    async def _poll(self) -> None:
        """Read all keys. A value that has not changed keeps the time at which it was first seen."""
        stored = await self.link.fetch_last(self._stream, self._subject(">"), ANSWER_SECONDS)
        now = self._clock.monotonic()
        before = self.view
        for message in stored:
            key = message.headers["Nats-Subject"].removeprefix(f"$KV.{self._bucket}.")
            seen = self._seen.get(key)
            if seen is None or message.sequence > seen.revision:
                self._seen[key] = Seen(message.sequence, _decode(key, message.data), now)
        heartbeats = {int(key[5:]): seen for key, seen in self._of("node.") if seen.value is not None}
        members = {int(key[7:]): seen.value for key, seen in self._of("member.") if seen.value not in (None, "active")}
        nodes = {node: seen.value for node, seen in heartbeats.items() if now - seen.since < NODE_GONE_SECONDS}
        self.view = View(
            {int(key[6:]): seen.value for key, seen in self._of("lease.")},
            nodes,
            members,
            {
                node: seen.value
                for node, seen in heartbeats.items()
                if node not in nodes and members.get(node) != "removed"
            },
        )
        for shard, held in list(self._held.items()):
            lease = self.view.leases.get(shard)
            if lease is not None and lease.generation > held.lease.generation:
                self._drop_lease(shard)
        if (before.leases, before.members, before.active) != (self.view.leases, self.view.members, self.view.active):
            self.on_change()

    def _of(self, prefix: str) -> list[tuple[str, Seen]]:
        return [(key, seen) for key, seen in self._seen.items() if key.startswith(prefix)]

    async def _take(self) -> None:
        now = self._clock.monotonic()
        for shard in sorted(self.candidates):
            seen = self._seen.get(_lease_key(shard))
            if shard not in self._held and self._may_take(seen, now):
                await self._take_one(shard, seen)

    def _may_take(self, seen: Seen | None, now: float) -> bool:
        waited = now - seen.since if seen is not None else 0.0
        fair_share = -(-self.settings.shards // max(1, len(self.view.active)))
        patience = SUCCESSOR_SECONDS if len(self._held) >= fair_share else 0.0
        if seen is None:
            return patience == 0.0 or now - self._heartbeat_sent_at > patience
        lease: Lease = seen.value
        if self.heartbeat.node in (lease.successor, None if lease.released else lease.node):
            # Released to this node, or held by it before a restart: the data directory is locked, so no other process
            # holds it.
            return True
        if lease.released:
            return waited >= max(patience, SUCCESSOR_SECONDS if lease.successor is not None else 0.0)
        return waited >= self._lease_seconds + patience

    async def _take_one(self, shard: int, seen: Seen | None) -> None:
        started = self._clock.monotonic()
        generation = seen.value.generation + 1 if seen is not None else 1
        lease = Lease(self.heartbeat.node, self.heartbeat.advertise, generation)
        try:
            revision = await self._put(_lease_key(shard), lease, seen.revision if seen is not None else 0)
        except BrokerRefusal:
            return  # another node was faster
        logger.info("took the lease of shard %d, generation %d", shard, generation)
        self._held[shard] = _Held(revision, lease, self._deadline(started), started)
        self.on_change()

    async def release(self, shard: int, successor: int | None = None) -> None:
        """Release a lease, if possible to a named successor."""
        held = self._held.pop(shard, None)
        self.candidates.discard(shard)
        if held is not None:
            try:
                await self._give_back(shard, held, successor)
                await self.link.publish(f"millstream.{self.settings.name}.hurry", b"")
            except MillstreamError as error:
                logger.info("the lease of shard %d could not be given back, it runs out: %s", shard, error)
            self.on_change()

    async def _give_back(self, shard: int, held: _Held, successor: int | None) -> None:
        """Mark a lease as released. If a renewal was stored meanwhile, its revision is the one to replace."""
        lease = msgspec.structs.replace(held.lease, released=True, successor=successor)
        revision = held.revision
        deadline = self._clock.monotonic() + RELEASE_SECONDS
        while True:
            try:
                await self._put(_lease_key(shard), lease, revision)
                return
            except (BrokerRefusal, Unavailable):
                if self._clock.monotonic() >= deadline:
                    raise
            stored = await self.link.last(self._stream, self._subject(_lease_key(shard)))
            if stored is None or stored.sequence <= revision:
                await asyncio.sleep(POLL_SECONDS / 4)  # the renewal is not stored yet, or this replica lags
            elif msgspec.json.decode(stored.data, type=Lease) == held.lease:
                revision = stored.sequence
            else:
                return  # already released, without an answer, or taken by another node

    async def _send_heartbeat(self) -> None:
        now = self._clock.monotonic()
        if now - self._heartbeat_sent_at >= NODE_SECONDS:
            self._heartbeat_sent_at = now  # before sending: an announcement made meanwhile asks for another heartbeat
            self.heartbeat = msgspec.structs.replace(self.heartbeat, beat=self.heartbeat.beat + 1)
            await self._put(f"node.{self.heartbeat.node}", self.heartbeat)

    async def set_member(self, node: int, state: str) -> None:
        """Store an operator's decision: active, draining or removed."""
        if state != "active" and node not in self.view.nodes and f"node.{node}" not in self._seen:
            raise NotFound(f"node {node} is not known to the cluster", code="node_not_found")
        await self._put(f"member.{node}", state)
        await self.link.publish(f"millstream.{self.settings.name}.hurry", b"")
        await self._poll()

    async def broker_of(self, node: int) -> str:
        """The broker name of a node, even of a node that is down."""
        seen = self._seen.get(f"node.{node}")
        return seen.value.broker if seen is not None and seen.value is not None else ""

    def announce(self, *, ready: bool) -> None:
        self.heartbeat = msgspec.structs.replace(self.heartbeat, ready=ready)
        self._heartbeat_sent_at = float("-inf")

    @property
    def streams(self) -> list[str]:
        """All streams that the cluster stores at its brokers."""
        logs = [log_names(self.settings.name, shard).stream for shard in range(self.settings.shards)]
        return [self.leases, *logs]

    @property
    def leases(self) -> str:
        """The stream that stores leases and heartbeats."""
        return self._stream

    # -- the bucket --------------------------------------------------------------------------------------------

    def _subject(self, key: str) -> str:
        return f"$KV.{self._bucket}.{key}"

    async def _put(self, key: str, value: object, expected: int | None = None, seconds: float = ANSWER_SECONDS) -> int:
        headers = {} if expected is None else {_EXPECTED: str(expected)}
        return await self.link.store(self._subject(key), msgspec.json.encode(value), headers, seconds)


def _lease_key(shard: int) -> str:
    return f"lease.{shard:04d}"


def _decode(key: str, data: bytes) -> Any:
    kinds: dict[str, Any] = {"lease": Lease, "node": Heartbeat, "member": str, "cluster": Settings}
    return msgspec.json.decode(data, type=kinds[key.partition(".")[0]])
