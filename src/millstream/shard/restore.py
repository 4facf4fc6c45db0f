"""Restoring: an empty data directory becomes a catalog again, from the object store alone.

The chain of manifests gives the rows, the segments' footers give the index. What was acknowledged but not yet
flushed when the machine was lost is not there; everything up to the last flush is.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Final, NamedTuple

from millstream.errors import Corrupt, NotFound
from millstream.streams.records import SegmentRef
from millstream.tiers.catalog import Catalog
from millstream.tiers.catalog_rows import Checkpoint, SealedFlush, SealedReplacement, SealedSegment
from millstream.tiers.cold import ColdTier
from millstream.tiers.manifests import (
    ColdView,
    Manifest,
    ManifestFlush,
    ManifestHead,
    Replacement,
    decode_manifest,
    encode_rows,
    longest_chain,
)
from millstream.tiers.objects import Objects
from millstream.tiers.segments import encode_extents

FOOTERS_AT_ONCE: Final = 16


class Restored(NamedTuple):
    position: int
    manifests: int
    segments: int
    streams: int


async def restore(
    cold: ColdTier,
    catalog: Catalog,
    now_ms: int,
    on_progress: Callable[[int, int], None],
    *,
    shard: int = 0,
    through: int | None = None,
) -> Restored:
    """Fill an empty catalog, up to a position if one is given. `on_progress` gets how many manifests are done."""
    chain = await chain_of(cold, shard, through)
    if not chain:
        raise NotFound("the object store holds no manifests: there is nothing to restore", code="nothing_to_restore")
    removed: set[str] = set()
    for head in chain:
        manifest = await load_manifest(cold, head.path)
        removed.update(manifest.removed_segments)
        for replacement in manifest.replacements:
            removed.update(replacement.replaced)
    segments = 0
    parts: list[Manifest] = []
    for count, head in enumerate(chain, 1):
        manifest = await load_manifest(cold, head.path)
        parts.append(manifest)
        if manifest.first == 0 and manifest.part < len([one for one in chain if one.first == 0]):
            on_progress(count, len(chain))
            continue  # a full manifest counts when all its parts are there
        flushes = [await sealed_flush(cold, flush, removed) for flush in manifest.flushes]
        replacements = [await sealed_replacement(cold, one, removed) for one in manifest.replacements]
        segments += sum(len(flush.segments) for flush in flushes) + sum(len(one.segments) for one in replacements)
        for part in parts[:-1]:
            catalog.write(checkpoint_of(part, [], [], now_ms, position=1))
        catalog.write(checkpoint_of(manifest, flushes, replacements, now_ms, position=manifest.through))
        parts.clear()
        on_progress(count, len(chain))
    catalog.drop_dead_extents(now_ms)
    return Restored(catalog.position, len(chain), segments, sum(1 for _ in catalog.scan(b"")))


async def chain_of(cold: ColdTier, shard: int = 0, through: int | None = None) -> list[ManifestHead]:
    """The manifests that count, in order; none if `through` is asked for and no chain ends there."""
    heads = [head async for head in _heads(cold, shard) if through is None or head.through <= through]
    chain = longest_chain(heads)
    return chain if through is None or (chain and chain[-1].through == through) else []


async def stored_shards(objects: Objects) -> list[int]:
    """The numbers of the shards that have manifests in the object store, in order."""
    return sorted({int(entry.path.split("/")[1]) async for entry in objects.list("manifests/")})


async def chains_of(cold: ColdTier) -> list[ManifestHead]:
    """The manifests that count, of every shard there is, one shard after the other."""
    return [head for shard in await stored_shards(cold.objects) for head in await chain_of(cold, shard)]


async def live_segments(cold: ColdTier, chain: list[ManifestHead]) -> list[SegmentRef]:
    """The segments that the chain names and has not removed again, in order of position."""
    view = await cold_view(cold, chain)
    return sorted(view.segments.values(), key=lambda segment: segment.first_position)


async def cold_view(cold: ColdTier, chain: list[ManifestHead]) -> ColdView:
    view = ColdView()
    for head in chain:
        view.add(await load_manifest(cold, head.path))
    return view


async def live_objects(cold: ColdTier, chain: list[ManifestHead]) -> set[str]:
    """The other objects the chain needs: notes, and the snapshots of the streams as they are at its end."""
    notes: set[str] = set()
    blobs: dict[tuple[int, int], bytes | None] = {}
    for head in chain:
        manifest = await load_manifest(cold, head.path)
        notes |= {flush.notes for flush in manifest.flushes if flush.notes}
        for incarnation, _ in manifest.removed_streams:
            blobs.pop((manifest.shard, incarnation), None)
        blobs.update({(manifest.shard, row.incarnation): row.blob for row in manifest.streams})
    return notes | {f"snapshots/{blob.decode()}" for blob in blobs.values() if blob is not None}


async def _heads(cold: ColdTier, shard: int) -> AsyncIterator[ManifestHead]:
    async for entry in cold.objects.list(f"manifests/{shard:04d}/"):
        manifest = await load_manifest(cold, entry.path)
        yield ManifestHead(entry.path, manifest.first, manifest.through, manifest.part, manifest.parts)


async def load_manifest(cold: ColdTier, path: str) -> Manifest:
    return decode_manifest(await cold.objects.get(path), path)


async def sealed_flush(cold: ColdTier, flush: ManifestFlush, removed: set[str]) -> SealedFlush:
    return SealedFlush(flush.through, flush.first, flush.notes, await _indexed(cold, flush.segments, removed))


async def sealed_replacement(cold: ColdTier, replacement: Replacement, removed: set[str]) -> SealedReplacement:
    return SealedReplacement(replacement.replaced, await _indexed(cold, replacement.segments, removed))


async def _indexed(cold: ColdTier, segments: list[SegmentRef], removed: set[str]) -> list[SealedSegment]:
    """The segments that still count, each with its index."""
    gate = asyncio.Semaphore(FOOTERS_AT_ONCE)

    async def index(segment: SegmentRef) -> SealedSegment:
        async with gate:
            try:
                return SealedSegment(segment, encode_extents((await cold.footer(segment)).extents))
            except NotFound:
                raise Corrupt(
                    f"segment {segment.path} is named by a manifest but not in the store",
                    hint="restore the object from a backup of the store; without it messages would be missing",
                ) from None

    return await asyncio.gather(*(index(segment) for segment in segments if segment.path not in removed))


def checkpoint_of(
    manifest: Manifest,
    flushes: list[SealedFlush],
    replacements: list[SealedReplacement],
    now_ms: int,
    *,
    position: int,
) -> Checkpoint:
    return Checkpoint(
        position,
        encode_rows(manifest.streams),
        [(incarnation.to_bytes(8, "big"), name) for incarnation, name in manifest.removed_streams],
        [],
        {name.encode(): row for name, row in manifest.singletons.items()},
        manifest.trimmed,
        flushes,
        now_ms,
        replacements,
    )
