"""What the manifests in the object store say: the segments that count, and the streams as of the last flush."""

from __future__ import annotations

import asyncio
from typing import Final, NamedTuple

import msgspec

from millstream.protocol.keys import StreamKey
from millstream.tiers.catalog_rows import StreamRow, decode_key
from millstream.tiers.manifests import ColdView, Manifest, ManifestHead, decode_manifest, longest_chain
from millstream.tiers.objects import Objects

MANIFESTS_AT_ONCE: Final = 16
_ROW: Final = msgspec.msgpack.Decoder(StreamRow)


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


async def shards_of(objects: Objects) -> list[int]:
    """The shards that have manifests."""
    return sorted({int(entry.path.split("/")[1]) async for entry in objects.list("manifests/")})


async def load_views(objects: Objects) -> list[View]:
    """A view of each shard: they count positions and incarnations by themselves."""
    return [await load_view(objects, shard) for shard in await shards_of(objects)]


async def load_view(objects: Objects, shard: int) -> View:
    """Follow a shard's chain of manifests. Their rows are decoded one manifest at a time."""
    gate = asyncio.Semaphore(MANIFESTS_AT_ONCE)

    async def load(path: str) -> Manifest:
        async with gate:
            return decode_manifest(await objects.get(path), path)

    paths = [entry.path async for entry in objects.list(f"manifests/{shard:04d}/")]
    loaded = dict(zip(paths, await asyncio.gather(*map(load, paths)), strict=True))
    chain = longest_chain(
        [ManifestHead(path, one.first, one.through, one.part, one.parts) for path, one in loaded.items()]
    )
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
            streams[row.incarnation] = _state(row.name, row.row)
        through = manifest.through
    return View(shard, cold, streams, notes, through)


def _state(name: bytes, data: bytes) -> StreamState:
    row = _ROW.decode(data)
    return StreamState(
        decode_key(name),
        row.incarnation,
        row.content_type,
        row.tail,
        0 if row.forks else row.earliest,
        (row.fork.source, row.fork.offset) if row.fork is not None else None,
        row.closed,
        row.snapshot.blob if row.snapshot is not None else None,
    )
