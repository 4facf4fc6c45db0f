"""The replicas that brokers hold: which broker holds which log, and moving replicas off a broker that leaves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, Final

from millstream.errors import Conflict, MillstreamError
from millstream.log.broker_link import BrokerLink, BrokerRefusal, BrokerSettings

logger = logging.getLogger("millstream.cluster")

MOVE_SECONDS: Final = 60.0
POLL_SECONDS: Final = 0.25
STEP_DOWN_SECONDS: Final = 2.0


class Peers:
    """`system` is how to reach the broker's system account; None if the broker is not our own."""

    def __init__(self, link: BrokerLink, streams: Sequence[str], system: BrokerSettings | None) -> None:
        self._link = link
        self._streams = streams
        self._system = system

    async def step_down(self, broker: str, successors: Sequence[str], streams: Sequence[str] | None = None) -> None:
        """Let other brokers lead the streams that this one leads, before it stops. Otherwise they would wait for a
        timeout.

        The first successor whose replica is current is asked to lead. A broker that has just restarted may report a
        current replica and still miss the request; then there is no leader until the others notice, which takes
        seconds.
        """
        await asyncio.gather(*(self._step_down(stream, broker, successors) for stream in streams or self._streams))

    async def _step_down(self, stream: str, broker: str, successors: Sequence[str]) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + STEP_DOWN_SECONDS
        try:
            info = await self._link.ask(self._link.info(stream, STEP_DOWN_SECONDS))
            if _leader(info) != broker or not _replicas(info):
                return
            current = {replica["name"] for replica in info["cluster"]["replicas"] if replica.get("current")}
            successor = next((name for name in successors if name in current), None)
            placement = {"placement": {"preferred": successor}} if successor is not None else {}
            await self._link.ask(self._link.call(f"STREAM.LEADER.STEPDOWN.{stream}", placement, STEP_DOWN_SECONDS))
            while _leader(info) in ("", broker) and loop.time() < deadline:
                await asyncio.sleep(0.02)
                info = await self._link.ask(self._link.info(stream, STEP_DOWN_SECONDS))
        except MillstreamError as error:
            logger.info("%s goes without a broker that leads for a while: %s", stream, error)

    async def move_away(self, broker: str) -> None:
        """Move every replica off a broker, wait until the new replicas are complete, and remove the broker."""
        for stream in self._streams:
            info = await self._link.ask(self._link.info(stream))
            if broker in (_leader(info), *_replicas(info)):
                await self._move(stream, broker, len(_replicas(info)))
        if self._system is not None:
            await self._forget(self._system, broker)

    async def _move(self, stream: str, broker: str, followers: int) -> None:
        try:
            await self._link.ask(self._link.call(f"STREAM.PEER.REMOVE.{stream}", {"peer": broker}))
        except BrokerRefusal as refusal:
            raise Conflict(
                f"the replica of {stream} at {broker} cannot be moved: {refusal.message}",
                code="no_place_for_replica",
                hint="add another node first, so that there is a broker to take it",
            ) from None
        loop = asyncio.get_running_loop()
        deadline = loop.time() + MOVE_SECONDS
        while loop.time() < deadline:
            await asyncio.sleep(POLL_SECONDS)
            try:
                info = await self._link.ask(self._link.info(stream))
            except MillstreamError:
                continue
            current = [replica for replica in info.get("cluster", {}).get("replicas", []) if replica.get("current")]
            if broker not in (_leader(info), *_replicas(info)) and len(current) >= followers and _leader(info):
                return
        raise Conflict(f"the replicas of {stream} were not whole again within {MOVE_SECONDS:.0f} s", code="timed_out")

    @staticmethod
    async def _forget(system: BrokerSettings, broker: str) -> None:
        """Remove a broker from the brokers' own group. Only the system account may do that."""
        link = BrokerLink(system, "millstream-operator")
        try:
            await link.ask(link.connect())
            await link.ask(link.call("SERVER.REMOVE", {"peer": broker}))
        except MillstreamError as error:
            logger.warning("the brokers still count %s as one of them: %s", broker, error)
        finally:
            await asyncio.to_thread(link.close)


def _leader(info: dict[str, Any]) -> str:
    return str(info.get("cluster", {}).get("leader") or "")


def _replicas(info: dict[str, Any]) -> list[str]:
    return [str(replica.get("name")) for replica in info.get("cluster", {}).get("replicas", []) or []]
