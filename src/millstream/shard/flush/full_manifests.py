"""Full manifests: once in a while the whole catalog goes into the object store, and the manifests before it go.

So a restore reads no more than one full manifest and the flushes since, and a lost manifest can be made good while the
catalog still has everything.
"""

from __future__ import annotations

import logging
from typing import Final

import msgspec

from millstream.errors import Corrupt, NotFound
from millstream.shard.flush.workers import FlushWorkers
from millstream.shard.parts import ShardParts
from millstream.tiers.cold import manifest_path
from millstream.tiers.manifests import encode_manifest, read_manifest
from millstream.tiers.stored_names import list_ours
from millstream.units import Position

logger = logging.getLogger("millstream.flush")

MANIFESTS_PER_FULL: Final = 256
FULL_PART_STREAMS: Final = 50_000


class FullManifests:
    def __init__(self, parts: ShardParts, workers: FlushWorkers) -> None:
        self._shard = parts.number
        self._clock = parts.clock
        self._catalog = parts.catalog
        self._cold = parts.cold
        self._ownership = parts.ownership
        self._workers = workers
        self._manifests_since = 0

    async def after_flush(self) -> None:
        """Count a manifest, and write a full one if there are many since the last."""
        self._manifests_since += 1
        if self._manifests_since >= MANIFESTS_PER_FULL:
            await self.write()

    async def write(self) -> None:
        """Write the whole catalog, and remove what that stands for: the manifests that led to it, of this owner's own
        history."""
        self._manifests_since = MANIFESTS_PER_FULL  # if this fails, the next flush tries again
        random = self._clock.random_bytes(8)
        epoch, state = self._ownership.epoch, self._catalog.manifest_digest
        parts = self._catalog.dump(FULL_PART_STREAMS, self._shard)
        through = Position(0)
        while (part := await self._workers.in_thread(next, parts, None)) is not None:
            through = part.through
            path = manifest_path(self._shard, through, random + part.part.to_bytes(4, "big"))
            signed = msgspec.structs.replace(part, epoch=epoch, previous=state)
            await self._cold.objects.put(path, encode_manifest(signed))
        self._manifests_since = 0
        await self._ownership.check()
        await self._remove_older(through, epoch, f"-{random.hex()}")

    async def _remove_older(self, through: Position, epoch: int, ours: str) -> None:
        folder = f"manifests/{self._shard:04d}/"
        older = [(entry.path, position) async for entry, _, position in list_ours(self._cold.objects, folder)]
        for path, position in older:
            if position > through or ours in path:
                continue
            try:
                _, head = read_manifest(await self._cold.objects.get(path), path)
            except (NotFound, Corrupt) as error:
                logger.warning("a manifest from before the full one stays: %s", error)
                continue
            if self._ownership.since <= head.epoch <= epoch:
                await self._cold.objects.delete(path)
