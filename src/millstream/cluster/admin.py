"""Cluster administration: status and readiness of nodes, and the actions transfer, flush, trim, drain and remove.

`GET /healthz`, `/readyz/local`, `/readyz/cluster`, `/metrics`, `/cluster/status`, `/cluster/hot-cold-stats`,
`/cluster/cold`; `POST /cluster/transfer-leader`,
`/cluster/trigger-snapshot`, `/cluster/purge-log`, `/cluster/members`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, Protocol

from millstream import __version__
from millstream.clock import Clock
from millstream.cluster.local_shard import LocalShard
from millstream.cluster.membership import Membership
from millstream.errors import Conflict, InvalidRequest, MillstreamError, NotFound, NotLeader
from millstream.server.api.background import in_background
from millstream.server.api.front import NodeHandlers
from millstream.server.api.health_api import HealthApi
from millstream.server.api.metrics_api import MetricsApi
from millstream.server.api.responses import as_json
from millstream.server.api.routes import Kind
from millstream.server.api.stats_api import StatsApi, with_details
from millstream.server.api.url_token_api import UrlTokenApi
from millstream.server.http.bodies import json_object
from millstream.server.http.error_map import problem
from millstream.server.http.messages import Answer, Request, Response
from millstream.server.http.metrics import Metrics
from millstream.tasks import Supervisor

logger = logging.getLogger("millstream.cluster")

TRANSFER_SECONDS: Final = 8.0
TRANSFER_ATTEMPTS: Final = 20
READY_SECONDS: Final = 5.0
MEMBER_SECONDS: Final = 30.0

Body = dict[str, Any]


class BrokerPeers(Protocol):
    """Moves the replicas that brokers hold."""

    async def move_away(self, broker: str) -> None: ...


class ClusterAdmin:
    def __init__(
        self,
        shards: Sequence[LocalShard],
        membership: Membership,
        peers: BrokerPeers,
        metrics: Metrics,
        supervisor: Supervisor,
        clock: Clock,
        url_token_seconds_max: float,
    ) -> None:
        self._shards = shards
        self._membership = membership
        self._peers = peers
        self._metrics = metrics
        self._supervisor = supervisor
        self.health = HealthApi(
            lambda: [local.replica.shard for local in shards], supervisor, self.missing_locally, self._missing_elsewhere
        )
        # The first shard's key signs for all shards. Every node has that key, so signing needs no leader.
        self._url_tokens = UrlTokenApi(clock, lambda: shards[0].replica.shard.token_key(), url_token_seconds_max)
        self._running: set[asyncio.Task[None]] = set()
        self._actions: dict[bytes, Callable[[Request, Body], Coroutine[Any, Any, Response]]] = {
            b"/cluster/transfer-leader": self._transfer,
            b"/cluster/trigger-snapshot": self._trigger_snapshot,
            b"/cluster/purge-log": self._purge_log,
            b"/cluster/members": self._change_member,
        }

    @property
    def handlers(self) -> NodeHandlers:
        """The requests that every node answers itself, whichever node leads a shard."""
        return {
            Kind.HEALTH: {"GET": self.health.alive},
            Kind.READINESS: {"GET": self.health.ready},
            Kind.CLUSTER_READINESS: {"GET": self.health.ready_in_cluster},
            Kind.METRICS: {"GET": self._expose},
            Kind.STATS: {"GET": self._stats},
            Kind.CLUSTER_COLD: {"GET": self._cold},
            Kind.CLUSTER_OPERATION: {"GET": self._read, "POST": self._act},
            # Any node can sign, so the request is not forwarded.
            Kind.URL_TOKENS: {"POST": self._url_tokens.make},
        }

    def _read(self, request: Request) -> Answer:
        if request.path in self._actions:
            return problem(405, "method_not_allowed", "this is asked for by POST", fields=b"allow: POST, OPTIONS\r\n")
        return self._status()

    def _act(self, request: Request) -> Answer:
        action = self._actions.get(request.path)
        if action is None:
            fields = b"allow: GET, HEAD, OPTIONS\r\n"
            return problem(405, "method_not_allowed", "POST is not possible here", fields=fields)
        return in_background(action(request, json_object(request)))

    # -- asking ------------------------------------------------------------------------------------------------

    def missing_locally(self) -> list[str]:
        replicas = [local.replica for local in self._shards]
        return [f"shard {replica.number} has not caught up yet" for replica in replicas if not replica.is_caught_up]

    def missing(self) -> list[str]:
        return self.missing_locally() + self._missing_elsewhere()

    def _missing_elsewhere(self) -> list[str]:
        reasons = []
        leases, nodes = self._membership.view.leases, self._membership.view.nodes
        for local in self._shards:
            number = local.replica.number
            lease = leases.get(number)
            if lease is None or lease.released or lease.node not in nodes:
                reasons.append(f"shard {number} has no leader")
            elif not local.replica.is_current():
                reasons.append(f"shard {number} is not known to be up to date here")
        return reasons

    def _expose(self, request: Request) -> Answer:
        readers = [local.handlers.readers for local in self._shards]
        shards = [local.replica.shard for local in self._shards]
        return MetricsApi(self._metrics, readers, shards, self._supervisor).expose(request)

    def _cold(self, request: Request) -> Answer:
        """The object store, with positions over all shards: the lowest flushed one and the highest latest one."""
        total, *others = (local.handlers.cold.overview() for local in self._shards)
        for overview in others:
            total["flushed"] = min(total["flushed"], overview["flushed"])
            total["latest"] = max(total["latest"], overview["latest"])
            total["buckets"] = sorted({*total["buckets"], *overview["buckets"]})
        return as_json(total)

    def _status(self) -> Response:
        view, own = self._membership.view, self._membership.heartbeat
        missing = self.missing()
        body = {
            "node_id": own.node,
            "version": __version__,
            "cluster": self._membership.settings.name,
            "advertise": own.advertise,
            "leader_id": view.leases[0].node if 0 in view.leases and not view.leases[0].released else None,
            "ready": not missing,
            "missing": missing,
            "members": [
                {
                    "node_id": heartbeat.node,
                    "advertise": heartbeat.advertise,
                    "broker": heartbeat.broker,
                    "state": view.members.get(number, "active"),
                    "up": number in view.nodes,
                    "ready": heartbeat.ready and number in view.nodes,
                    "leads": view.led_by(number),
                }
                for number, heartbeat in sorted({**view.down, **view.nodes}.items())
            ],
            "shards": [self._describe(local) for local in self._shards],
        }
        return as_json(body)

    def _describe(self, local: LocalShard) -> dict[str, object]:
        replica = local.replica
        lease = self._membership.view.leases.get(replica.number)
        has_leader = lease is not None and not lease.released
        return {
            "shard": replica.number,
            "role": "leading" if replica.is_leading else "following" if replica.role == "leading" else replica.role,
            "leader_id": lease.node if lease is not None and has_leader else None,
            "leader": lease.advertise if lease is not None and has_leader else None,
            "generation": lease.generation if lease is not None else 0,
            "last_position": replica.last_known_position,
            "applied_position": replica.applied_position,
            "flushed_position": replica.shard.machine.flushed,
            "log_sequence": replica.log.sequence,
            "known_log_sequence": max(replica.log.sequence, replica.known_sequence),
            "caught_up": replica.is_caught_up,
            "current": replica.is_current(),
        }

    def _stats(self, request: Request) -> Answer:
        """The sum over this node's shards. A value that is no number is the first that is not None."""
        total: dict[str, Any] = {}
        for local in self._shards:
            for name, value in StatsApi(local.replica.shard).describe().items():
                if name not in total or total[name] is None:
                    total[name] = value
                elif isinstance(value, bool):
                    total[name] = total[name] or value
                elif isinstance(value, int):
                    total[name] += value
        return in_background(with_details(total, [local.replica.shard for local in self._shards])).then(as_json)

    # -- acting ------------------------------------------------------------------------------------------------

    def _led(self, body: Body) -> list[LocalShard]:
        """The shards that an action applies to: those the body names, or all that this node leads."""
        number = body.get("shard")
        if number is not None and (not isinstance(number, int) or not 0 <= number < len(self._shards)):
            raise InvalidRequest(f"shard {number!r} is not one of 0 to {len(self._shards) - 1}", code="invalid_shard")
        chosen = self._shards if number is None else [self._shards[number]]
        led = [local for local in chosen if local.replica.is_leading]
        if not led:
            raise NotLeader("this node leads none of these shards", hint="see /cluster/status for who does")
        return led

    async def _transfer(self, request: Request, body: Body) -> Response:
        me, target = self._membership.heartbeat.node, body.get("node")
        if target is not None and (target == me or not await self._can_soon_lead(target)):
            able = [str(node) for node in self._membership.view.active if node != me]
            raise Conflict(
                f"node {target!r} cannot take over: it is not another node that is up, ready and not draining",
                code="invalid_successor",
                hint=f"those that can: {', '.join(able) or 'none at the moment'}",
            )
        led = self._led(body)
        moved = []
        for local in led:
            successor = target if target is not None else self.least_loaded(exclude=me)
            if successor is None:
                raise Conflict("there is no other node that could take over", code="no_successor")
            await local.replica.hand_over(successor)
            moved.append({"shard": local.replica.number, "node": successor})
        await self._wait_for(lambda: all(self._leader(move["shard"]) == move["node"] for move in moved))
        for local in led:
            for _ in range(TRANSFER_ATTEMPTS):  # the successor has the lease, and leads once it has caught up
                if await local.replica.is_led():
                    break
                await asyncio.sleep(0.02)
        return as_json({"transferred": moved})

    async def _can_soon_lead(self, node: object) -> bool:
        """Whether a node may lead. A node that is up and has just caught up needs a moment to announce it, so wait
        briefly."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + READY_SECONDS
        while node not in (view := self._membership.view).active:
            if node not in view.nodes or node in view.members or loop.time() > deadline:
                return False
            await asyncio.sleep(0.02)
        return True

    def _leader(self, shard: int) -> int | None:
        lease = self._membership.view.leases.get(shard)
        return lease.node if lease is not None and not lease.released else None

    def least_loaded(self, exclude: int) -> int | None:
        view = self._membership.view
        others = [node for node in view.active if node != exclude]
        return min(others, key=lambda node: (len(view.led_by(node)), node)) if others else None

    @staticmethod
    async def _wait_for(condition: Callable[[], bool], seconds: float = TRANSFER_SECONDS) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while not condition():
            if loop.time() > deadline:
                raise Conflict(
                    f"it was asked for, and has not happened after {seconds:.0f} s",
                    code="timed_out",
                    hint="millstream cluster status (GET /cluster/status) shows how far it is; ask again to wait on",
                )
            await asyncio.sleep(0.02)

    async def _trigger_snapshot(self, request: Request, body: Body) -> Response:
        led = self._led(body)
        for local in led:
            task = asyncio.get_running_loop().create_task(self._flush(local))
            self._running.add(task)
            task.add_done_callback(self._running.discard)
        return as_json({"queued": [local.replica.number for local in led]}, 202)

    @staticmethod
    async def _flush(local: LocalShard) -> None:
        try:
            await local.replica.shard.flusher.flush()
        except MillstreamError as error:
            logger.warning("the snapshot of shard %d failed: %s", local.replica.number, error)

    async def _purge_log(self, request: Request, body: Body) -> Response:
        """Trim the log to the last flush, keeping nothing for nodes that are down."""
        purged = {}
        for local in self._led(body):
            position = local.replica.shard.machine.flushed
            await asyncio.to_thread(local.replica.log.purge, position)
            purged[str(local.replica.number)] = position
        return as_json({"purged_through": purged})

    async def _change_member(self, request: Request, body: Body) -> Response:
        node, state = body.get("node"), body.get("state")
        if not isinstance(node, int) or state not in ("active", "draining", "removed"):
            raise InvalidRequest(
                "the body must be {node: a number, state: active, draining or removed}", code="invalid_member"
            )
        await self._check_known(node)
        change = {"active": self._activate, "draining": self._drain, "removed": self._remove}[state]
        is_up = await change(node)
        return as_json({"node": node, "state": state, "up": is_up})

    async def _check_known(self, node: int) -> None:
        """Refuse a node number that the cluster has never seen. Waits briefly, because a new node announces itself
        late."""
        deadline = asyncio.get_running_loop().time() + READY_SECONDS
        while not self._is_known(node):
            if asyncio.get_running_loop().time() > deadline:
                view = self._membership.view
                raise NotFound(
                    f"there is no node {node} in this cluster",
                    code="node_not_found",
                    hint=f"its nodes are {', '.join(map(str, sorted({**view.nodes, **view.down})))}; a new one is"
                    " started with its server.node_id first",
                )
            await asyncio.sleep(0.1)

    def _is_known(self, node: int) -> bool:
        view = self._membership.view
        return node in view.nodes or node in view.down or node in view.members

    async def _activate(self, node: int) -> bool:
        """Allow a node to lead, and wait until it is ready. A node that is down becomes ready when it is started."""
        membership = self._membership
        await membership.link.ask(membership.set_member(node, "active"))
        if node not in membership.view.nodes:
            return False
        await self._wait_for(lambda: node in membership.view.active, MEMBER_SECONDS)
        return True

    async def _drain(self, node: int) -> bool:
        """Stop a node from leading, and wait until other nodes lead all of its shards."""
        membership = self._membership
        if node not in membership.view.nodes:
            raise Conflict(
                f"node {node} is down: it leads nothing",
                code="node_down",
                hint=f"start it again, or take it out of the cluster: millstream cluster remove {node}",
            )
        if all(active == node for active in membership.view.active):
            raise Conflict(
                f"node {node} is the last one that can lead",
                code="last_node",
                hint="start another node, or let one lead again: millstream cluster add NODE",
            )
        await membership.link.ask(membership.set_member(node, "draining"))
        # A released lease still names its former holder until another node takes it.
        await self._wait_for(
            lambda: all(lease.node != node for lease in membership.view.leases.values()), MEMBER_SECONDS
        )
        return True

    async def _remove(self, node: int) -> bool:
        """Drain a node, move its broker's replicas to other brokers, and remove it. If they cannot move, it may lead
        again."""
        membership, link = self._membership, self._membership.link
        before = membership.view.members.get(node, "active")
        is_up = node in membership.view.nodes
        if is_up:
            await self._drain(node)
        broker = await link.ask(membership.broker_of(node))
        try:
            if broker:
                await self._peers.move_away(broker)
        except Conflict as refusal:
            if refusal.code == "no_place_for_replica":
                await link.ask(membership.set_member(node, before))
            raise
        await link.ask(membership.set_member(node, "removed"))
        return is_up
