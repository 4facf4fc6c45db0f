"""From messages to segments, beside requests.

What Python does to a message or a stream here it does on the loop, a slice at a time: on a thread it would take the
interpreter from the loop between any two callbacks, which costs requests more than the work itself. Sorting,
compressing and checksums need no interpreter, and have the thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import Executor

from millstream.shard.freezing import Frozen
from millstream.streams.records import SegmentRef
from millstream.tiers.segment_encoder import Arranged, EncodedSegment, OwnerColumns, Part, encoding, slabs


async def segments(frozen: Frozen, shard: int, thread: Executor) -> AsyncIterator[EncodedSegment]:
    """The segments that a flush has to store."""
    loop = asyncio.get_running_loop()
    pieces = slabs(frozen.unflushed, frozen.first_position, frozen.position)
    owners: OwnerColumns | None = None
    while (slab := await loop.run_in_executor(thread, next, pieces, None)) is not None:
        if owners is None:
            owners = await loop.run_in_executor(thread, OwnerColumns, frozen.owners, frozen.trimmed)
        arranged = await loop.run_in_executor(thread, Arranged, slab, owners)
        for part in arranged.parts:
            yield await _encode(arranged, part, shard, thread)


async def _encode(arranged: Arranged, part: Part, shard: int, thread: Executor) -> EncodedSegment:
    loop = asyncio.get_running_loop()
    steps = encoding(arranged, part, shard)
    while True:
        try:
            step = next(steps)
        except StopIteration as finished:
            encoded: EncodedSegment = finished.value
            return encoded
        if step is None:
            await asyncio.sleep(0)
        else:
            await loop.run_in_executor(thread, step)


def reference(path: str, encoded: EncodedSegment) -> SegmentRef:
    info = encoded.info
    return SegmentRef(
        path,
        info.bucket,
        len(encoded.data),
        encoded.checksum,
        info.rows,
        info.payload_bytes,
        info.first_position,
        info.last_position,
        info.first_at_ms,
        info.last_at_ms,
        encoded.footer_bytes,
        encoded.footer_checksum,
    )
