"""Orphans: what a crash, or a flush that failed, has left in the object store."""

from __future__ import annotations

from collections.abc import Callable

from millstream.shard.flusher import Flusher
from millstream.tiers.catalog import Catalog
from millstream.tiers.cold import ColdTier


async def find_orphans(
    cold: ColdTier,
    catalog: Catalog,
    flusher: Flusher,
    shard: int,
    started_at: int,
    is_blob_known: Callable[[str], bool],
    modified_before_ms: float,
) -> list[str]:
    """The objects that a crash left behind: those nothing refers to and this process has not written.

    `started_at` is the catalog's position at the start: a manifest that reaches further and was not sealed describes
    a flush that never was. They come first, so that no manifest ever names a segment that is gone. Other shards'
    objects are none of ours.
    """
    known = {row.segment.path for _, row in catalog.segments()}
    known |= {flush.notes for _, flush in catalog.flushes()}
    known |= flusher.sealed_paths
    found = []
    async for entry in cold.objects.list(f"manifests/{shard:04d}/"):
        position = int(entry.path.rpartition("/")[2].partition("-")[0])
        if position > started_at and entry.path not in known and entry.path not in flusher.made:
            found.append(entry)
    for prefix in ("segments/", f"notes/{shard:04d}/"):
        async for entry in cold.objects.list(prefix):
            owner = entry.path.rpartition("/")[2].partition("-")[0]
            is_ours = prefix != "segments/" or not owner.isdigit() or int(owner) == shard
            if is_ours and entry.path not in known and entry.path not in flusher.made:
                found.append(entry)
    async for entry in cold.objects.list("snapshots/"):
        if not is_blob_known(entry.path.removeprefix("snapshots/")):
            found.append(entry)
    return [entry.path for entry in found if entry.modified_ms < modified_before_ms]
