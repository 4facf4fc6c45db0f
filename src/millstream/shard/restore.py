"""Restoring: an empty data directory becomes a catalog again, from the object store alone.

The chain of manifests gives the rows, the segments' footers give the index. What was acknowledged but not yet
flushed when the machine was lost is not there; everything up to the last flush is.

A chain with a hole is refused, and what lies behind the hole is named; `accept_loss` goes on with what comes before it.
So are notes and snapshots that are missing or damaged; then `accept_loss` goes on without the notes, and with streams
whose snapshot cannot be read.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final, NamedTuple

import msgspec

from millstream.errors import Corrupt, NotFound, OtherFormat
from millstream.streams.records import SegmentRef, SnapshotRef
from millstream.tiers.catalog import Catalog
from millstream.tiers.catalog_rows import (
    MANIFEST_DIGEST,
    Checkpoint,
    SealedFlush,
    SealedReplacement,
    SealedSegment,
)
from millstream.tiers.cold import ColdTier
from millstream.tiers.manifests import (
    Chain,
    ColdView,
    Manifest,
    ManifestFlush,
    ManifestHead,
    Replacement,
    decode_notes,
    encode_manifest_streams,
    find_chain,
    read_manifest,
)
from millstream.tiers.segments import encode_extents
from millstream.tiers.stored_names import list_ours, stored_shards
from millstream.tiers.stream_rows import decode_manifest_stream
from millstream.units import Milliseconds, Position

logger = logging.getLogger("millstream.restore")

FOOTERS_AT_ONCE: Final = 16
LOST_NAMED_MAX: Final = 20


class Restored(NamedTuple):
    position: Position
    manifests: int
    segments: int
    streams: int
    # Notes and snapshots that are missing or damaged, and what is wrong with each; only if that was accepted.
    lost: dict[str, str]


class Hole(NamedTuple):
    """Positions for which the manifest is missing, and what lies behind it and cannot be restored."""

    first: Position
    until: Position
    manifests: list[str]
    segments: int
    messages: int
    streams: int

    def describe(self) -> str:
        return (
            f"a manifest is missing or damaged: the chain ends at position {self.first:,}, and goes on only at"
            f" {self.until:,}; behind that lie {self.messages:,} messages of {self.segments:,} segments and changes to"
            f" {self.streams:,} streams in {len(self.manifests):,} manifests, beginning with {self.manifests[0]}"
        )


async def restore(
    cold: ColdTier,
    catalog: Catalog,
    now_ms: Milliseconds,
    on_progress: Callable[[int, int], None],
    *,
    shard: int = 0,
    through: Position | None = None,
    accept_loss: bool = False,
) -> Restored:
    """Fill an empty catalog, up to a position if one is given. `on_progress` gets how many manifests are done."""
    found = await find_manifests(cold, shard, through)
    hole = await find_hole(cold, found) if through is None else None
    if hole is not None and not accept_loss:
        raise Corrupt(
            hole.describe(),
            code="manifest_missing",
            hint="put the missing object back, from a backup or an older version of it; if it is lost for good,"
            " --accept-loss restores what comes before it, and deletes nothing",
        )
    chain = found.chain.heads
    if not chain:
        raise NotFound("the object store holds no manifests: there is nothing to restore", code="nothing_to_restore")
    lost = await find_lost(cold, chain) if through is None else {}
    if lost and (await find_manifests(cold, shard)).chain.through != found.chain.through:
        # The store's owner has flushed meanwhile, and deleted the snapshots that this flush replaced.
        return await restore(cold, catalog, now_ms, on_progress, shard=shard, accept_loss=accept_loss)
    if lost and not accept_loss:
        raise _lost_objects(lost)
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
        flushes = [await sealed_flush(cold, _without(lost, flush), removed) for flush in manifest.flushes]
        replacements = [await sealed_replacement(cold, one, removed) for one in manifest.replacements]
        segments += sum(len(flush.segments) for flush in flushes) + sum(len(one.segments) for one in replacements)
        for part in parts[:-1]:
            catalog.write(checkpoint_of(part, head, [], [], now_ms, position=Position(1)))
        catalog.write(checkpoint_of(manifest, head, flushes, replacements, now_ms, position=manifest.through))
        parts.clear()
        on_progress(count, len(chain))
    catalog.drop_dead_extents(now_ms)
    return Restored(catalog.position, len(chain), segments, sum(1 for _ in catalog.scan(b"")), lost)


def _lost_objects(lost: dict[str, str]) -> Corrupt:
    named = [f"{path}: {reason}" for path, reason in sorted(lost.items())[:LOST_NAMED_MAX]]
    more = f", and {len(lost) - LOST_NAMED_MAX:,} more" if len(lost) > LOST_NAMED_MAX else ""
    return Corrupt(
        f"{len(lost):,} objects that the manifests name are missing or damaged: {'; '.join(named)}{more}",
        code="object_damaged",
        hint="put them back, from a backup or an older version of them; if they are lost for good, --accept-loss"
        " restores the rest: without notes the feed lacks the events of those flushes, and a snapshot that is lost"
        " cannot be read until a new one is published",
    )


def _without(lost: dict[str, str], flush: ManifestFlush) -> ManifestFlush:
    """A flush whose notes are lost has none: the feed goes on behind them."""
    return msgspec.structs.replace(flush, notes="") if flush.notes in lost else flush


class Manifests(NamedTuple):
    """What the store has of a shard's manifests: those that can be read, in their chain, and those that cannot."""

    chain: Chain
    damaged: dict[str, Position]  # paths, and up to where each reached


async def find_manifests(cold: ColdTier, shard: int = 0, through: Position | None = None) -> Manifests:
    """The shard's manifests; no chain if `through` is asked for and none ends there."""
    heads: list[ManifestHead] = []
    damaged: dict[str, Position] = {}
    async for entry, _, position in list_ours(cold.objects, f"manifests/{shard:04d}/"):
        try:
            head = (await read_stored(cold, entry.path))[1]
        except OtherFormat:
            raise
        except Corrupt as error:
            logger.warning("%s", error.message)
            damaged[entry.path] = position
            continue
        except NotFound:
            continue  # tidied up since it was listed
        if through is None or head.through <= through:
            heads.append(head)
    chain = find_chain(heads)
    if through is not None and chain.through != through:
        chain = Chain([], [], [])
    return Manifests(chain, damaged)


async def find_hole(cold: ColdTier, found: Manifests) -> Hole | None:
    """What the chain does not reach, if there is anything."""
    chain = found.chain
    lost = {path: position for path, position in found.damaged.items() if position > chain.through}
    if not chain.beyond and not lost:
        return None
    segments: dict[str, int] = {}
    streams: set[int] = set()
    for head in chain.beyond:
        manifest = await load_manifest(cold, head.path)
        listed = [one for flush in manifest.flushes for one in flush.segments]
        segments.update({one.path: one.rows for one in listed if one.last_position >= chain.through})
        streams.update(row.incarnation for row in manifest.streams)
    paths = sorted([*(head.path for head in chain.beyond), *lost])
    until = min((max(head.first, chain.through) for head in chain.beyond), default=Position(0))
    until = until or min(lost.values())
    return Hole(chain.through, until, paths, len(segments), sum(segments.values()), len(streams))


async def chain_of(cold: ColdTier, shard: int = 0, through: Position | None = None) -> list[ManifestHead]:
    """The manifests that count, in order; none if `through` is asked for and no chain ends there."""
    found = await find_manifests(cold, shard, through)
    hole = await find_hole(cold, found) if through is None else None
    if hole is not None:
        raise Corrupt(hole.describe(), code="manifest_missing", hint="see `millstream cold verify`")
    return found.chain.heads


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


async def live_objects(cold: ColdTier, chain: list[ManifestHead]) -> tuple[set[str], list[SnapshotRef]]:
    """The other objects the chain needs: notes, and the snapshots of the streams as they are at its end."""
    notes: set[str] = set()
    snapshots: dict[tuple[int, int], SnapshotRef | None] = {}
    for head in chain:
        manifest = await load_manifest(cold, head.path)
        notes |= {flush.notes for flush in manifest.flushes if flush.notes}
        for incarnation, _ in manifest.removed_streams:
            snapshots.pop((manifest.shard, incarnation), None)
        for row in manifest.streams:
            found = decode_manifest_stream(row).snapshot if row.blob is not None else None
            snapshots[manifest.shard, row.incarnation] = found
    return notes, sorted((one for one in snapshots.values() if one is not None), key=lambda one: one.blob)


async def find_lost(cold: ColdTier, chain: list[ManifestHead]) -> dict[str, str]:
    """The notes and snapshots that the chain needs and that are missing or damaged, with what is wrong.

    Notes are read; snapshots, which may be large, are looked up by name and size.
    """
    lost: dict[str, str] = {}
    notes, snapshots = await live_objects(cold, chain)
    gate = asyncio.Semaphore(FOOTERS_AT_ONCE)

    async def read_notes(path: str) -> None:
        async with gate:
            try:
                decode_notes(await cold.objects.get(path), path)
            except NotFound:
                lost[path] = "it is not in the object store"
            except Corrupt as error:
                lost[path] = error.message

    await asyncio.gather(*map(read_notes, sorted(notes)))
    sizes = {entry.path: entry.size async for entry in cold.objects.list("snapshots/")} if snapshots else {}
    for snapshot in snapshots:
        path = f"snapshots/{snapshot.blob}"
        if path not in sizes:
            lost[path] = "it is not in the object store"
        elif sizes[path] != snapshot.size:
            lost[path] = f"it has {sizes[path]:,} bytes, not {snapshot.size:,}"
    return lost


async def load_manifest(cold: ColdTier, path: str) -> Manifest:
    return (await read_stored(cold, path))[0]


async def read_stored(cold: ColdTier, path: str) -> tuple[Manifest, ManifestHead]:
    return read_manifest(await cold.objects.get(path), path)


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
                footer = await cold.footer(segment)
                return SealedSegment(segment, encode_extents(footer.extents), [one for one, _ in footer.info.shared_by])
            except NotFound:
                raise Corrupt(
                    f"segment {segment.path} is named by a manifest but not in the store",
                    hint="restore the object from a backup of the store; without it messages would be missing",
                ) from None

    return await asyncio.gather(*(index(segment) for segment in segments if segment.path not in removed))


def checkpoint_of(
    manifest: Manifest,
    head: ManifestHead,
    flushes: list[SealedFlush],
    replacements: list[SealedReplacement],
    now_ms: Milliseconds,
    *,
    position: Position,
) -> Checkpoint:
    return Checkpoint(
        position,
        encode_manifest_streams(manifest.streams),
        [(incarnation.to_bytes(8, "big"), name) for incarnation, name in manifest.removed_streams],
        [],
        {**{name.encode(): row for name, row in manifest.singletons.items()}, MANIFEST_DIGEST: head.state},
        manifest.trimmed,
        flushes,
        now_ms,
        replacements,
        manifest.producers,
    )
