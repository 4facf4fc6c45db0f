"""A node of a cluster: its broker, its membership, a replica of every shard, and the handlers over them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import signal
import ssl
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from millstream.clock import Clock, ExpiryClock, SystemClock
from millstream.cluster.admin import ClusterAdmin
from millstream.cluster.broker import SYSTEM_USER, USER, Broker, BrokerPlan
from millstream.cluster.dispatch import ClusterDispatch, with_role
from millstream.cluster.forwarding import Forwarder
from millstream.cluster.local_shard import AllSubscriptions, LocalShard
from millstream.cluster.membership import Heartbeat, Membership, Settings
from millstream.cluster.origins import Origins, forget_origins, read_origins
from millstream.cluster.peers import Peers
from millstream.cluster.replica import Replica
from millstream.config import Config
from millstream.errors import ConfigurationError, Corrupt, MillstreamError, NotFound, Unavailable
from millstream.log.broker_link import BrokerLink, BrokerRefusal, BrokerSettings
from millstream.log.jetstream_log import HEADER_BYTES, JetStreamLog, LogTrimmed, log_names
from millstream.server.api.console_pages import open_console
from millstream.server.api.front import Front
from millstream.server.api.gate import Gate
from millstream.server.api.handlers import Handlers
from millstream.server.http.messages import Request
from millstream.server.http.metrics import Metrics
from millstream.server.node.cluster_checks import check_cluster, claim_directory
from millstream.server.node.data_directory import DataDirectory
from millstream.server.node.run import FORCE_SECONDS, end_by_force
from millstream.server.node.settings import api_settings, object_store_settings, open_gate, shard_settings
from millstream.shard.quarantine import Quarantine
from millstream.shard.restore import restore
from millstream.shard.shard import Shard
from millstream.streams.records import SegmentSealed, decode_batch
from millstream.tasks import Supervisor, end
from millstream.tiers.blobs import Blobs
from millstream.tiers.catalog import Catalog
from millstream.tiers.cold import ColdTier
from millstream.tiers.objects import Objects, open_objects
from millstream.units import Position

logger = logging.getLogger("millstream.cluster")

WAITING_SECONDS: Final = 5.0
ANSWER_SECONDS: Final = 1.0
BALANCE_SECONDS: Final = 1.0
BALANCE_STABLE_ROUNDS: Final = 5
OPENED_AT_ONCE: Final = 8
RESTORE_ATTEMPTS: Final = 5
MEMBERSHIP_STOP_SECONDS: Final = 1.0
RECORD_MARGIN_BYTES: Final = 64 << 10
# What a start creates in an empty data directory before the node has joined its cluster.
MADE_AT_START: Final = ("node.json", "broker")


class ClusterNode:
    def __init__(self, config: Config, *, clock: Clock | None = None) -> None:
        check_cluster(config)
        self.config = config
        self._clock = clock or SystemClock()
        self._directory = DataDirectory(config.server.data_dir)
        self._is_new = not any((config.server.data_dir / name).exists() for name in MADE_AT_START)
        try:
            claim_directory(config)
        except ConfigurationError:
            self._directory.release()
            raise
        self.notices: list[str] = []
        self._broker: Broker | None = None
        self._link: BrokerLink | None = None
        self._membership: Membership | None = None
        self._peers: Peers | None = None
        self._shards: list[LocalShard] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._reopening: set[int] = set()
        self._front: Front | None = None
        self._dispatch: ClusterDispatch | None = None
        self._metrics = Metrics()
        self._supervisor = Supervisor()
        self._expiry_clock = ExpiryClock(self._clock)
        self.on_removed: Callable[[], None] = lambda: None

    # -- starting ----------------------------------------------------------------------------------------------

    async def start(self) -> Front:
        """Start everything; waits for a majority of the brokers. If it fails or is cancelled, nothing is left
        running."""
        loop = asyncio.get_running_loop()
        starting = loop.create_task(self._start())

        def give_up() -> None:
            end_by_force(self.config.server.stop_timeout + FORCE_SECONDS)
            starting.cancel()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, give_up)
        try:
            return await starting
        except asyncio.CancelledError:
            await self.stop()
            raise ConfigurationError("stopped before the cluster was there") from None
        except BaseException:
            await self.stop()
            if self._is_new and not self._shards:
                # The node never joined. `millstream restore`, which the refusal may suggest, needs an empty directory.
                for name in MADE_AT_START:
                    _remove(self.config.server.data_dir / name)
            raise

    async def _start(self) -> Front:
        config = self.config
        cluster = config.cluster
        broker_settings, system = await self._start_broker()
        self._link = link = BrokerLink(
            broker_settings, f"millstream-{cluster.name}-{config.server.node_id}", self._supervisor
        )
        await self._connect(link)
        self._check_payload(link)
        heartbeat = Heartbeat(
            config.server.node_id, self._advertised(), self._broker_name() if system is not None else ""
        )
        origins = self._origins()
        settings = Settings(cluster.name, cluster.shards, cluster.replicas, origins.positions, origins.claims)
        self._membership = membership = Membership(link, self._clock, settings, heartbeat, cluster.lease)
        may_bootstrap = cluster.bootstrap_node_id == config.server.node_id
        obstacle = await self._bootstrap_obstacle() if may_bootstrap else None
        await link.ask(membership.join(may_bootstrap=may_bootstrap, waiting=_Waiting(self._clock), obstacle=obstacle))
        forget_origins(config.server.data_dir)
        loop = asyncio.get_running_loop()
        membership.on_change = partial(_call_soon, loop, self._membership_changed)
        await self._open_all()
        self._peers = Peers(link, membership.streams, system)
        admin = ClusterAdmin(
            self._shards,
            membership,
            self._peers,
            self._metrics,
            self._supervisor,
            self._clock,
            config.auth.url_token_max,
        )
        forwarder = Forwarder(self._trust()) if cluster.forward else None
        self._dispatch = ClusterDispatch(self._shards, membership, forwarder, self._address_of)
        self._front = front = Front(self._dispatch, admin.handlers, self._metrics, admin.health, (with_role,))
        front.logs_access = config.logging.access
        front.console = open_console(config)
        front.gate = self.open_gate(config)
        for local in self._shards:
            await local.replica.start()
        start = self._supervisor.start
        self._tasks = [start("tending", partial(self._maintain_forever, admin), is_vital=True)]
        if front.gate is not None:
            self._tasks.append(start("token files", partial(front.gate.watch, config.auth.reload_interval)))
        return front

    def _address_of(self, request: Request) -> str:
        """A client's address, as far as this node can determine it."""
        gate = self._front.gate if self._front is not None else None
        return gate.client_address(request) if gate is not None else request.address

    def open_gate(self, config: Config) -> Gate | None:
        """One gate for all shards, with this node's own token files."""
        # The first shard's key signs for all shards. Every node has that key, so signing needs no leader.
        shards = self._shards
        return open_gate(
            config, self._metrics, self._clock, AllSubscriptions(shards), lambda: shards[0].replica.shard.token_key()
        )

    @property
    def runs_scheduled_jobs(self) -> bool:
        """Scheduled jobs run once for the whole cluster: the leader of the first shard starts them."""
        return bool(self._shards) and self._shards[0].replica.is_leading

    def _trust(self) -> ssl.SSLContext:
        """The TLS context for other nodes: trusts the system's certificate authorities and the cluster's own."""
        context = ssl.create_default_context()
        if self.config.cluster.tls_authority:
            context.load_verify_locations(self.config.cluster.tls_authority)
        return context

    def _origins(self) -> Origins:
        """The first positions of the logs, if this node was restored in order to create the cluster again."""
        found = read_origins(self.config.server.data_dir)
        ours = (self.config.cluster.name, self.config.cluster.shards)
        if found is not None and (found.cluster, len(found.positions)) != ours:
            raise ConfigurationError(
                f"the data directory was restored for cluster {found.cluster!r} with {len(found.positions)} shards,"
                f" not for {ours[0]!r} with {ours[1]}",
                hint="correct cluster.name or cluster.shards, or restore again into an empty data directory",
            )
        return found if found is not None else Origins(ours[0], [])

    async def _bootstrap_obstacle(self) -> ConfigurationError | None:
        """A new cluster counts positions from 1, so it must not use a store that another cluster has written to."""
        if read_origins(self.config.server.data_dir) is not None:
            return None  # a restored cluster continues after the stored positions
        objects = open_objects(object_store_settings(self.config))
        try:
            async for entry in objects.list("manifests/"):
                return ConfigurationError(
                    f"a new cluster cannot begin here: the object store holds another's data ({entry.path})",
                    hint="set cold.path to a prefix of its own; if the cluster exists, see that its brokers are up;"
                    " if all of them are lost, run `millstream restore` with this configuration first",
                )
        except MillstreamError as error:
            return ConfigurationError(f"a new cluster cannot begin: the object store does not answer: {error.message}")
        return None

    async def _start_broker(self) -> tuple[BrokerSettings, BrokerSettings | None]:
        cluster = self.config.cluster
        if cluster.nats_url:
            urls = [url.strip() for url in cluster.nats_url.split(",")]
            tls = self._broker_tls() if any(url.startswith("tls:") for url in urls) else None
            return BrokerSettings(urls, cluster.nats_user, cluster.nats_password, tls), None
        plan = BrokerPlan(
            cluster.name,
            self._broker_name(),
            cluster.listen,
            cluster.routes,
            cluster.secret,
            self.config.http.body_bytes_max + self._record_margin_bytes(),
            cluster.advertise,
            cluster.tls_certificate,
            cluster.tls_key,
            cluster.tls_authority,
        )
        self._broker = Broker(plan, self.config.server.data_dir / "broker", self._supervisor)
        await self._broker.start()
        urls = [self._broker.url]
        return BrokerSettings(urls, USER, cluster.secret), BrokerSettings(urls, SYSTEM_USER, cluster.secret)

    def _record_margin_bytes(self) -> int:
        """By how much the record of an append may be larger than the request's body: the record's own fields, and two
        bytes per message in addition to the comma in the body."""
        return RECORD_MARGIN_BYTES + 2 * self.config.streams.append_messages_max

    def _broker_tls(self) -> ssl.SSLContext:
        """The TLS context for external brokers: which authorities to trust, and the client certificate."""
        cluster = self.config.cluster
        context = self._trust()
        if cluster.tls_certificate:
            context.load_cert_chain(cluster.tls_certificate, cluster.tls_key)
        return context

    def _broker_name(self) -> str:
        return f"{self.config.cluster.name}-{self.config.server.node_id}"

    async def _connect(self, link: BrokerLink) -> None:
        waiting = _Waiting(self._clock)
        while True:
            try:
                await link.ask(link.connect())
                return
            except BrokerRefusal as refusal:
                raise ConfigurationError(
                    refusal.message,
                    hint="see cluster.nats_user, cluster.nats_password and, for tls://, cluster.tls_authority",
                ) from None
            except MillstreamError as error:
                waiting(error.message)
                await asyncio.sleep(0.2)

    def _check_payload(self, link: BrokerLink) -> None:
        needed = self.config.http.body_bytes_max + RECORD_MARGIN_BYTES + HEADER_BYTES
        if link.payload_bytes_max < needed:
            raise ConfigurationError(
                f"the broker takes messages of {link.payload_bytes_max} bytes, and http.body_bytes_max needs {needed}",
                hint="raise max_payload in the broker's configuration, or lower http.body_bytes_max",
            )

    def _advertised(self) -> str:
        server = self.config.server
        scheme = "https" if self.config.tls.cert is not None else "http"
        if server.advertise:
            return server.advertise if "://" in server.advertise else f"{scheme}://{server.advertise}"
        host, port = server.listen
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"

    # -- shards ------------------------------------------------------------------------------------------------

    async def _open(self, number: int) -> LocalShard:
        """Open a replica of a shard. Its catalog is restored if the log no longer holds what comes after it."""
        attempt = 1
        while True:
            try:
                return await self._try_to_open(number)
            except LogTrimmed as error:
                # The leader flushed and trimmed while we were reading: the missing part is in the object store now.
                if attempt == RESTORE_ATTEMPTS:
                    raise
                attempt += 1
                logger.info("shard %d: the log was trimmed while it was read: %s", number, error.message)

    async def _try_to_open(self, number: int) -> LocalShard:
        assert self._link is not None and self._membership is not None
        config = self.config
        link = self._link
        directory = config.server.data_dir / "shards" / f"{number:04d}"
        directory.mkdir(parents=True, exist_ok=True)
        objects = open_objects(object_store_settings(config))
        log = JetStreamLog(
            link,
            log_names(config.cluster.name, number),
            self._clock,
            window=config.cluster.window,
            keep_trims=config.cluster.keep_flushes,
        )
        origin = self._membership.settings.origin(number)
        first_position = max(origin, await self._first_position(log))
        catalog = Catalog(directory / "catalog")
        if catalog.position < first_position:
            catalog.close()
            await self._restore(number, directory, log, objects)
            catalog = Catalog(directory / "catalog")
        log.read_from = catalog.position
        blobs = Blobs(objects, directory / "uploads", f"{number:04d}/" if config.cluster.shards > 1 else "")
        cold = ColdTier(objects, catalog, config.cold.cache_bytes // config.cluster.shards)
        try:
            shard = await asyncio.to_thread(
                Shard,
                log,
                catalog,
                cold,
                blobs,
                self._clock,
                shard_settings(config, config.cluster.shards),
                number=number,
                supervisor=self._supervisor,
                expiry_clock=self._expiry_clock,
                quarantine=Quarantine(config.server.data_dir / "quarantine", number),
            )
        except BaseException:
            cold.close()
            catalog.close()
            raise
        shard.ownership.granted = self._membership.settings.claim(number)
        self.notices += [f"shard {number}: {notice}" for notice in shard.notices]
        handlers = Handlers(shard, api_settings(config), self._metrics)
        if self._dispatch is not None and self._dispatch.read_limits is not None:
            handlers.set_read_limits(self._dispatch.read_limits)  # they were changed by a reload
        handlers.subscriptions.wakes.pause()
        leader_tasks, on_outdated = handlers.subscriptions.wakes, partial(self._reopen, number)
        replica = Replica(shard, log, link, self._membership, self._clock, leader_tasks, on_outdated)
        return LocalShard(replica, handlers)

    async def _open_all(self) -> None:
        """Open all shards, several at a time: each waits for the broker and the disk most of the time."""
        gate = asyncio.Semaphore(OPENED_AT_ONCE)

        async def open_one(number: int) -> LocalShard:
            async with gate:
                return await self._open(number)

        shards = range(self.config.cluster.shards)
        opened = await asyncio.gather(*(open_one(number) for number in shards), return_exceptions=True)
        self._shards += [outcome for outcome in opened if isinstance(outcome, LocalShard)]  # a failed start closes them
        for outcome in opened:
            if isinstance(outcome, BaseException):
                raise outcome

    async def _first_position(self, log: JetStreamLog) -> int:
        """The log's first position. Waits until the brokers can answer: after a restart they elect a leader first."""
        assert self._link is not None
        waiting = _Waiting(self._clock)
        while True:
            try:
                await self._link.ask(log.bounds(ANSWER_SECONDS))
                return await self._link.ask(log.first_position())
            except Unavailable as error:
                waiting(error.message)
                await asyncio.sleep(0.1)

    async def _restore(self, number: int, directory: Path, log: JetStreamLog, objects: Objects) -> None:
        """Rebuild a catalog from the manifests, up to the last flush that is sealed in the log."""
        assert self._membership is not None
        for attempt in range(1, RESTORE_ATTEMPTS + 1):
            through = await asyncio.to_thread(_last_sealed, log)
            if through is None and self._membership.settings.origin(number) > 1:
                through = self._membership.settings.origin(number)
            unfinished, finished = directory / "catalog.restoring", directory / "catalog"
            shutil.rmtree(unfinished, ignore_errors=True)
            catalog = Catalog(unfinished)
            cold = ColdTier(objects, catalog, self.config.cold.cache_bytes)
            try:
                restored = await restore(
                    cold, catalog, self._clock.now_ms(), lambda done, total: None, shard=number, through=through
                )
            except (NotFound, Corrupt):
                # The leader deletes old manifests while we read them; by then a later flush is stored.
                if attempt == RESTORE_ATTEMPTS:
                    raise
                await asyncio.sleep(1.0)
                continue
            finally:
                cold.close()
                catalog.close()
            shutil.rmtree(finished, ignore_errors=True)
            unfinished.rename(finished)
            logger.info("shard %d: restored %d streams up to %d", number, restored.streams, restored.position)
            return

    def _reopen(self, number: int) -> None:
        if number not in self._reopening:
            self._reopening.add(number)
            reopen = partial(self._reopen_later, number)
            self._tasks.append(self._supervisor.start("restoring", reopen, of=f"shard {number}", is_vital=True))

    async def _reopen_later(self, number: int) -> None:
        local = self._shards[number]
        if local.is_open:  # once, because this may be retried
            local.is_open = False
            local.handlers.readers.end_all()
            await local.handlers.stop()
            await local.replica.abandon()
        while True:
            try:
                fresh = await self._open(number)
                local.replica, local.handlers = fresh.replica, fresh.handlers
                await local.replica.start()
                local.is_open = True
                self._reopening.discard(number)
                return
            except MillstreamError as error:
                logger.warning("shard %d cannot be restored yet: %s", number, error)
                await asyncio.sleep(2.0)

    # -- maintenance -------------------------------------------------------------------------------------------

    def _membership_changed(self) -> None:
        for local in self._shards:
            local.replica.membership_changed()

    async def _maintain_forever(self, admin: ClusterAdmin) -> None:
        """Announce whether this node is ready, hand over shards that it should not lead, and stop when it was
        removed."""
        assert self._membership is not None
        membership, stable = self._membership, 0
        me = membership.heartbeat.node
        while True:
            await asyncio.sleep(BALANCE_SECONDS)
            is_ready = not admin.missing_locally()
            if membership.heartbeat.ready != is_ready:
                membership.announce(ready=is_ready)
            if membership.view.members.get(me) == "removed":
                logger.critical("this node was removed from the cluster; it stops")
                self.on_removed()
                return
            led = [local.replica for local in self._shards if local.replica.is_leading]
            successor = admin.least_loaded(exclude=me)
            is_unfair = successor is not None and len(led) > len(membership.view.led_by(successor)) + 1
            stable = stable + 1 if is_unfair else 0
            if me in membership.view.members:
                await asyncio.gather(*(replica.hand_over(successor) for replica in led))
            elif stable >= BALANCE_STABLE_ROUNDS:
                stable = 0
                logger.info("handing shard %d to node %s, which leads fewer", led[-1].number, successor)
                await led[-1].hand_over(successor)

    # -- stopping ----------------------------------------------------------------------------------------------

    async def retire(self) -> None:
        """Hand over the shards that this node leads, while clients are still connected and can be redirected."""
        for task in self._tasks:
            task.cancel()
        for local in self._shards:
            local.replica.is_retired = True
        assert self._membership is not None
        successors = [node for node in self._membership.view.active if node != self._membership.heartbeat.node]
        await self._step_down([self._membership.leases])
        await asyncio.gather(
            *(
                # The broker's leader must change between two leaders of the shard: messages in flight would be lost
                # otherwise.
                local.replica.hand_over(
                    successors[local.replica.number % len(successors)] if successors else None,
                    before_release=partial(self._step_down, [local.replica.log.names.stream]),
                )
                for local in self._shards
            )
        )
        await self._step_down()

    async def _step_down(self, streams: list[str] | None = None) -> None:
        if self._broker is not None and self._peers is not None and self._membership is not None:
            heartbeats = sorted(
                self._membership.view.nodes.values(), key=lambda heartbeat: heartbeat.beat, reverse=True
            )
            longest_up_first = [
                heartbeat.broker for heartbeat in heartbeats if heartbeat.node != self._membership.heartbeat.node
            ]
            await self._peers.step_down(self._broker_name(), longest_up_first, streams)

    async def stop(self, timeout_seconds: float | None = None) -> None:
        """Stop following, and stop the broker last, when the other brokers no longer need it."""
        await end(*self._tasks)
        await asyncio.gather(*(self._stop_shard(local, timeout_seconds) for local in self._shards))
        if self._dispatch is not None:
            self._dispatch.close()
        if self._link is not None:
            if self._membership is not None:
                with contextlib.suppress(Unavailable):
                    await self._link.ask(self._membership.stop(), MEMBERSHIP_STOP_SECONDS)
            await asyncio.to_thread(self._link.close)
        if self._broker is not None:
            await self._broker.stop()
        self._directory.release()

    @staticmethod
    async def _stop_shard(local: LocalShard, timeout_seconds: float | None) -> None:
        await local.handlers.stop()
        await local.replica.abandon(timeout_seconds)


class _Waiting:
    """Logs from time to time what a start is waiting for."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._said_at = clock.monotonic() - WAITING_SECONDS + 1.0

    def __call__(self, reason: str) -> None:
        if self._clock.monotonic() - self._said_at >= WAITING_SECONDS:
            self._said_at = self._clock.monotonic()
            logger.info("waiting: %s", reason)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    loop.call_soon_threadsafe(callback)


def _last_sealed(log: JetStreamLog) -> Position | None:
    """The position through which the log says that everything is in the object store."""
    log.read_from = 1
    through = None
    for batch in log.read():
        for record in decode_batch(batch.payload):
            if isinstance(record, SegmentSealed):
                through = record.through
    return through
