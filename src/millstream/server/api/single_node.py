"""A single server as a cluster of one: what operators ask of any node, answered by the only one there is.

The shapes are those of `cluster_admin.py`, so that what watches and runs a cluster does the same with a single server.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final

import msgspec

from millstream import __version__
from millstream.errors import Conflict, InvalidRequest, MillstreamError, NotFound
from millstream.server.api.health_api import HealthApi
from millstream.server.api.later import reply_later
from millstream.server.http.bodies import json_object
from millstream.server.http.error_map import problem
from millstream.server.http.messages import Request, Response
from millstream.shard.shard import Shard

logger = logging.getLogger("millstream.cluster")

NODE: Final = 1
SHARD: Final = 0
_JSON: Final = b"content-type: application/json\r\ncache-control: no-store\r\n"

Body = dict[str, Any]


class ClusterOfOne:
    def __init__(self, shard: Shard, health: HealthApi) -> None:
        self._shard = shard
        self._health = health
        self._flushing: asyncio.Task[None] | None = None
        self._actions: dict[bytes, Callable[[Request, Body], None]] = {
            b"/cluster/transfer-leader": self._transfer,
            b"/cluster/trigger-snapshot": self._trigger_snapshot,
            b"/cluster/purge-log": self._purge_log,
            b"/cluster/members": self._change_member,
        }

    def handle(self, request: Request) -> None:
        action = self._actions.get(request.path)
        if action is None and request.method in ("GET", "HEAD"):
            self._status(request)
        elif action is not None and request.method == "POST":
            action(request, json_object(request))
        else:
            fields = b"allow: %b, OPTIONS\r\n" % (b"GET, HEAD" if action is None else b"POST")
            request.reply(problem(405, "method_not_allowed", f"{request.method} is not possible here", fields=fields))

    def _status(self, request: Request) -> None:
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
        _answer(
            request,
            {
                "node_id": NODE,
                "version": __version__,
                "cluster": None,
                "advertise": request.base_url,
                "leader_id": NODE,
                "ready": not missing,
                "missing": missing,
                "members": [{**member, "ready": not missing, "leads": [SHARD]}],
                "shards": [
                    {"shard": SHARD, "role": "leading", **leader, **positions, "caught_up": True, "current": True}
                ],
            },
        )

    def _transfer(self, request: Request, body: Body) -> None:
        _check_shard(body)
        if body.get("node") is not None:
            raise Conflict(
                f"node {body['node']!r} cannot take over: this server is a cluster of one",
                code="invalid_successor",
                hint="see /cluster/status",
            )
        raise Conflict("there is no other node that could take over", code="no_successor")

    def _trigger_snapshot(self, request: Request, body: Body) -> None:
        _check_shard(body)
        if self._flushing is None or self._flushing.done():  # one that has not begun yet flushes this, too
            self._flushing = asyncio.get_running_loop().create_task(self._flush())
        _answer(request, {"queued": [SHARD]}, 202)

    async def _flush(self) -> None:
        try:
            await self._shard.flusher.flush()
        except MillstreamError as error:
            logger.warning("the snapshot failed: %s", error)

    def _purge_log(self, request: Request, body: Body) -> None:
        """Every flush trims the log by itself; nobody else needs what is before it."""
        _check_shard(body)
        position = self._shard.machine.flushed

        async def purge() -> Response:
            await asyncio.to_thread(self._shard.trim_log, position)
            return Response(200, _JSON, msgspec.json.encode({"purged_through": {str(SHARD): position}}))

        reply_later(request, purge(), lambda response: response)

    def _change_member(self, request: Request, body: Body) -> None:
        node, state = body.get("node"), body.get("state")
        if not isinstance(node, int) or state not in ("active", "draining", "removed"):
            raise InvalidRequest(
                "the body must be {node: a number, state: active, draining or removed}", code="invalid_member"
            )
        if node != NODE:
            raise NotFound(f"node {node} is not up", code="node_not_found")
        if state != "active":
            raise Conflict(f"node {node} is the last one that can lead", code="last_node")
        _answer(request, {"node": node, "state": state})


def _answer(request: Request, body: Body, status: int = 200) -> None:
    request.reply(Response(status, _JSON, msgspec.json.encode(body)))


def _check_shard(body: Body) -> None:
    number = body.get("shard")
    if number is not None and (isinstance(number, bool) or number != SHARD):
        raise InvalidRequest(f"shard {number!r} is not one of 0 to {SHARD}", code="invalid_shard")
