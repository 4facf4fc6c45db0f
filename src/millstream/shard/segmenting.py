"""From messages to segments, beside requests.

What Python does to a message or a stream here it does on the loop, a slice at a time: on a thread it would take the
interpreter from the loop between any two callbacks, which costs requests more than the work itself. Sorting,
compressing and checksums need no interpreter, and have the thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import Executor

from millstream.shard.freezing import SLICE_STREAMS, Frozen
from millstream.streams.records import SegmentRef
from millstream.tiers.segment_encoder import Arranged, EncodedSegment, Owners, Part, Slab, encoding, slabs


async def segments(frozen: Frozen, shard: int, thread: Executor) -> AsyncIterator[EncodedSegment]:
    """The segments that a flush has to store."""
    loop = asyncio.get_running_loop()
    pieces = slabs(frozen.unflushed, frozen.first_position, frozen.position)
    while (slab := await loop.run_in_executor(thread, next, pieces, None)) is not None:
        arranged = await loop.run_in_executor(thread, Arranged, slab, await _owners(frozen, slab))
        for part in arranged.parts:
            yield await _encode(arranged, part, shard, thread)


async def _owners(frozen: Frozen, slab: Slab) -> Owners:
    """The streams as they were when the flush began; one that had been deleted by then is not among the frozen."""
    earliest = dict(frozen.trimmed)
    owners = Owners()
    for count, incarnation in enumerate(slab.incarnations, 1):
        stream = frozen.streams.get(incarnation)
        if stream is None:
            owners.add_gone(incarnation)
        else:
            owners.add(stream.key, incarnation, stream.content_type, earliest.get(incarnation, 0))
        if count % SLICE_STREAMS == 0:
            await asyncio.sleep(0)
    return owners


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
