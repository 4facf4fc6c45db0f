"""The cluster API of a single server, which answers as a cluster with one node.

The answers have the same form as those of `cluster/admin.py`, so tools for clusters also work with a single server.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final

from millstream import __version__
from millstream.errors import Conflict, InvalidRequest, MillstreamError, NotFound
from millstream.server.api.background import in_background
from millstream.server.api.front import Front, NodeHandlers
from millstream.server.api.handlers import Handlers
from millstream.server.api.health_api import HealthApi
from millstream.server.api.metrics_api import MetricsApi
from millstream.server.api.responses import as_json
from millstream.server.api.routes import Kind
from millstream.server.api.stats_api import StatsApi
from millstream.server.api.url_token_api import UrlTokenApi
from millstream.server.http.bodies import json_object
from millstream.server.http.error_map import problem
from millstream.server.http.messages import Answer, Request
from millstream.server.http.metrics import Metrics
from millstream.shard.shard import Shard

logger = logging.getLogger("millstream.cluster")

NODE: Final = 1
SHARD: Final = 0

Body = dict[str, Any]


def single_node_front(
    shard: Shard, handlers: Handlers, metrics: Metrics, *, url_token_seconds_max: float = 3600
) -> Front:
    """The front of a server with one shard."""
    health = HealthApi(lambda: [shard], shard.supervisor)
    cluster = SingleNodeCluster(shard, health)
    exposition = MetricsApi(metrics, [handlers.readers], [shard], shard.supervisor)
    url_tokens = UrlTokenApi(shard.clock, shard.token_key, url_token_seconds_max)
    node_handlers: NodeHandlers = {
        Kind.HEALTH: {"GET": health.alive},
        Kind.READINESS: {"GET": health.ready},
        Kind.CLUSTER_READINESS: {"GET": health.ready_in_cluster},
        Kind.METRICS: {"GET": exposition.expose},
        Kind.STATS: {"GET": StatsApi(shard).hot_and_cold},
        Kind.CLUSTER_COLD: {"GET": handlers.cold.describe_all},
        Kind.CLUSTER_OPERATION: {"GET": cluster.read, "POST": cluster.act},
        Kind.URL_TOKENS: {"POST": url_tokens.make},
    }
    return Front(handlers, node_handlers, metrics, health)


class SingleNodeCluster:
    def __init__(self, shard: Shard, health: HealthApi) -> None:
        self._shard = shard
        self._health = health
        self._flushing: asyncio.Task[None] | None = None
        self._actions: dict[bytes, Callable[[Request, Body], Answer]] = {
            b"/cluster/transfer-leader": self._transfer,
            b"/cluster/trigger-snapshot": self._trigger_snapshot,
            b"/cluster/purge-log": self._purge_log,
            b"/cluster/members": self._change_member,
        }

    def read(self, request: Request) -> Answer:
        if request.path in self._actions:
            return problem(405, "method_not_allowed", "this is asked for by POST", fields=b"allow: POST, OPTIONS\r\n")
        return self._status(request)

    def act(self, request: Request) -> Answer:
        action = self._actions.get(request.path)
        if action is None:
            fields = b"allow: GET, HEAD, OPTIONS\r\n"
            return problem(405, "method_not_allowed", "POST is not possible here", fields=fields)
        return action(request, json_object(request))

    def _status(self, request: Request) -> Answer:
        shard, missing = self._shard, self._health.problems()
        latest = shard.feed.latest
        leader = {"leader_id": NODE, "leader": request.base_url, "generation": 1}
        positions = {
            "last_position": latest,
            "applied_position": latest,
            "flushed_position": shard.machine.flushed,
            "log_sequence": latest,
            "known_log_sequence": latest,
        }
        member = {"node_id": NODE, "advertise": request.base_url, "broker": None, "state": "active"}
        shard_status = {"shard": SHARD, "role": "leading", **leader, **positions, "caught_up": True, "current": True}
        return as_json(
            {
                "node_id": NODE,
                "version": __version__,
                "cluster": None,
                "advertise": request.base_url,
                "leader_id": NODE,
                "ready": not missing,
                "missing": missing,
                "members": [{**member, "ready": not missing, "leads": [SHARD]}],
                "shards": [shard_status],
            }
        )

    def _transfer(self, request: Request, body: Body) -> Answer:
        _check_shard(body)
        if body.get("node") is not None:
            raise Conflict(
                f"node {body['node']!r} cannot take over: this server is a cluster of one",
                code="invalid_successor",
                hint="see /cluster/status",
            )
        raise Conflict("there is no other node that could take over", code="no_successor")

    def _trigger_snapshot(self, request: Request, body: Body) -> Answer:
        _check_shard(body)
        if self._flushing is None or self._flushing.done():  # a flush that has not begun yet includes this request
            self._flushing = asyncio.get_running_loop().create_task(self._flush())
        return as_json({"queued": [SHARD]}, 202)

    async def _flush(self) -> None:
        try:
            await self._shard.flusher.flush()
        except MillstreamError as error:
            logger.warning("the snapshot failed: %s", error)

    def _purge_log(self, request: Request, body: Body) -> Answer:
        """Every flush trims the log, and no other node needs the older part."""
        _check_shard(body)
        position = self._shard.machine.flushed

        trimmed = in_background(asyncio.to_thread(self._shard.trim_log, position))
        return trimmed.then(lambda _: as_json({"purged_through": {str(SHARD): position}}))

    def _change_member(self, request: Request, body: Body) -> Answer:
        node, state = body.get("node"), body.get("state")
        if not isinstance(node, int) or state not in ("active", "draining", "removed"):
            raise InvalidRequest(
                "the body must be {node: a number, state: active, draining or removed}", code="invalid_member"
            )
        if node != NODE:
            raise NotFound(f"node {node} is not up", code="node_not_found")
        if state != "active":
            raise Conflict(f"node {node} is the last one that can lead", code="last_node")
        return as_json({"node": node, "state": state})


def _check_shard(body: Body) -> None:
    number = body.get("shard")
    if number is not None and (isinstance(number, bool) or number != SHARD):
        raise InvalidRequest(f"shard {number!r} is not one of 0 to {SHARD}", code="invalid_shard")
