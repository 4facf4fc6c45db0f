"""Watching the manifests: whether the object store alone could bring back what the catalog has.

At the start, and from then on after flushes and now and then, the store's manifests are compared with the catalog:
their chain must lead to the catalog's position and digest. Manifests never change, so each is read once; later rounds
cost a listing and the manifests that are new.

If one is missing or damaged nothing is lost yet: the catalog has everything. The server says so, is not ready, and
writes a full manifest, which stands for all before it; with that it is well again.

Only the node that leads a shard, and owns its part of the store, does this.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from millstream.errors import Corrupt, MillstreamError, NotFound
from millstream.shard.flush.flusher import Flusher
from millstream.shard.parts import ShardParts
from millstream.tiers.manifests import ManifestHead, find_chain, read_head
from millstream.tiers.stored_names import list_ours

logger = logging.getLogger("millstream.manifests")

POLL_SECONDS: Final = 5.0
# Between two comparisons if there was a flush, and if there was none.
FLUSHED_SECONDS: Final = 60.0
IDLE_SECONDS: Final = 600.0


class ManifestWatch:
    def __init__(self, parts: ShardParts, flusher: Flusher) -> None:
        self._folder = f"manifests/{parts.number:04d}/"
        self._catalog = parts.catalog
        self._objects = parts.cold.objects
        self._committer = parts.committer
        self._ownership = parts.ownership
        self._clock = parts.clock
        self._flusher = flusher
        self._heads: dict[str, ManifestHead] = {}
        self._compared_at = float("-inf")
        self._compared_position = 0

    async def run_forever(self) -> None:
        while True:
            if self._is_due():
                try:
                    await self.compare()
                except MillstreamError as error:
                    logger.warning("the manifests cannot be compared now: %s", error)
            await asyncio.sleep(POLL_SECONDS)

    def _is_due(self) -> bool:
        if self._committer.failure is not None or self._ownership.owner is None:
            return False
        pause = FLUSHED_SECONDS if self._catalog.position != self._compared_position else IDLE_SECONDS
        return self._clock.monotonic() - self._compared_at >= pause

    async def compare(self) -> bool:
        """Compare the manifests with the catalog; returns whether they were whole. If not, they are by then."""
        self._compared_at, self._compared_position = self._clock.monotonic(), self._catalog.position
        problem = await self._problem()
        if problem is not None:
            async with self._flusher.lock:  # a flush may have replaced manifests while they were listed
                problem = await self._problem()
        if problem is None:
            self._objects.damage.objects.pop(self._folder, None)
            return True
        self._objects.damage.found(self._folder, problem)
        await self._flusher.write_full_manifest()
        async with self._flusher.lock:
            remaining = await self._problem()
        if remaining is None:
            self._objects.damage.objects.pop(self._folder, None)
            logger.warning("a full manifest was written to %s: the store is whole again", self._folder)
        return False

    async def _problem(self) -> str | None:
        """Why the manifests do not lead to where the catalog is."""
        position, state = self._catalog.position, self._catalog.manifest_digest
        if not state:
            return None  # nothing was flushed yet
        known, damaged = set(self._heads), await self._read_new()
        chain = find_chain([head for head in self._heads.values() if head.through <= position])
        if (chain.through, chain.state) == (position, state):
            return None
        gone = sorted(known - self._heads.keys())
        named = f" ({', '.join(damaged or gone)})" if damaged or gone else ""
        return (
            f"a manifest is missing or damaged{named}: the chain ends at position {chain.through:,}, and the catalog is"
            f" at {position:,}"
        )

    async def _read_new(self) -> list[str]:
        """Bring the heads up to date with the store; returns the manifests that cannot be read."""
        found: dict[str, ManifestHead] = {}
        damaged: list[str] = []
        async for entry, _, _ in list_ours(self._objects, self._folder):
            head = self._heads.get(entry.path)
            try:
                found[entry.path] = head or await self._head(entry.path)
            except Corrupt:
                damaged.append(entry.path)
            except NotFound:
                continue  # tidied up since it was listed
        self._heads = found
        return damaged

    async def _head(self, path: str) -> ManifestHead:
        return await asyncio.to_thread(read_head, await self._objects.get(path), path)
