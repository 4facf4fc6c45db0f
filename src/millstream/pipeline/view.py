"""What the manifests in the object store say: the segments that count, and the streams as of the last flush."""

from __future__ import annotations

import asyncio
from typing import Final, NamedTuple

from millstream.errors import Corrupt
from millstream.protocol.keys import StreamKey
from millstream.tiers.manifests import ColdView, Manifest, ManifestHead, ManifestStream, find_chain, read_manifest
from millstream.tiers.objects import Objects
from millstream.tiers.stored_names import list_ours, stored_shards
from millstream.tiers.stream_rows import decode_manifest_stream

MANIFESTS_AT_ONCE: Final = 16


class StreamState(NamedTuple):
    """A stream as of the last flush; before `kept_from` its messages no longer count."""

    key: StreamKey
    incarnation: int
    content_type: str
    tail: int
    kept_from: int
    fork: tuple[int, int] | None  # its source's incarnation, and the offset it left it at
    is_closed: bool
    snapshot: str | None


class View(NamedTuple):
    """One shard's part of the store. A bucket is in one shard; incarnations are numbered by each shard for itself."""

    shard: int
    cold: ColdView
    streams: dict[int, StreamState]
    notes: set[str]
    through: int
    """Everything before this position is in the segments."""

    def kept_from(self, incarnation: int) -> int | None:
        """The offset from which messages of an incarnation count; None if none of them does."""
        stream = self.streams.get(incarnation)
        return stream.kept_from if stream is not None else None


async def load_views(objects: Objects) -> list[View]:
    """A view of each shard: they count positions and incarnations by themselves."""
    return [await load_view(objects, shard) for shard in await stored_shards(objects)]


async def load_view(objects: Objects, shard: int) -> View:
    """Follow a shard's chain of manifests. Their rows are decoded one manifest at a time."""
    gate = asyncio.Semaphore(MANIFESTS_AT_ONCE)

    async def load(path: str) -> tuple[Manifest, ManifestHead]:
        async with gate:
            return read_manifest(await objects.get(path), path)

    paths = [entry.path async for entry, _, _ in list_ours(objects, f"manifests/{shard:04d}/")]
    found = await asyncio.gather(*map(load, paths))
    loaded = {head.path: manifest for manifest, head in found}
    everything = find_chain([head for _, head in found])
    if everything.beyond:
        raise Corrupt(
            f"a manifest is missing before {everything.beyond[0].path}",
            code="manifest_missing",
            hint="see `millstream cold verify`",
        )
    chain = everything.heads
    cold = ColdView()
    streams: dict[int, StreamState] = {}
    notes: set[str] = set()
    through = 1
    for head in chain:
        manifest = loaded[head.path]
        cold.add(manifest)
        notes.update(flush.notes for flush in manifest.flushes if flush.notes)
        for incarnation, _ in manifest.removed_streams:
            streams.pop(incarnation, None)
        for row in manifest.streams:
            streams[row.incarnation] = _state(row)
        through = manifest.through
    return View(shard, cold, streams, notes, through)


def _state(row: ManifestStream) -> StreamState:
    stream = decode_manifest_stream(row)
    return StreamState(
        stream.key,
        stream.incarnation,
        stream.content_type,
        stream.tail,
        0 if stream.forks else stream.earliest,
        (stream.fork.source, stream.fork.offset) if stream.fork is not None else None,
        stream.closed,
        stream.snapshot.blob if stream.snapshot is not None else None,
    )
