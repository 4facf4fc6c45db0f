"""From runs of messages to segments: which go together, in which order, and encoding them beside requests.

What Python does to a message here it does on the loop, a slice at a time: on a thread it would take the interpreter
from the loop between any two callbacks, which costs requests more than the work itself. Compressing and checksums need
no interpreter, and have the thread.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import AsyncIterator
from concurrent.futures import Executor
from typing import Final

from msgspec.structs import replace

from millstream.streams.records import SegmentRef
from millstream.tiers.segment_encoder import EncodedSegment, StreamRun, encoding

SEGMENT_BYTES: Final = 64 << 20
SLICE_RUNS: Final = 512
DAY_MS: Final = 86_400_000

_Sortable = tuple[str, int, int, StreamRun]


async def segments_of(runs: list[StreamRun]) -> AsyncIterator[tuple[str, list[StreamRun]]]:
    """The runs by bucket and day, in order, cut so that no segment grows beyond its limit."""
    groups: dict[tuple[str, int], list[_Sortable]] = {}
    for count, run in enumerate(runs, 1):
        is_of_one_day = run.times[0] // DAY_MS == run.times[-1] // DAY_MS
        is_small = run.ends[-1] - run.start <= SEGMENT_BYTES
        for piece in [run] if is_of_one_day and is_small else _pieces(run):
            sortable = (run.key.stream, run.incarnation, piece.start, piece)
            groups.setdefault((run.key.bucket, piece.times[0] // DAY_MS), []).append(sortable)
        if count % SLICE_RUNS == 0:
            await asyncio.sleep(0)
    for (bucket, _), group in sorted(groups.items()):
        await _sort(group)
        chosen: list[StreamRun] = []
        size = 0
        for _, _, _, piece in group:
            length = piece.ends[-1] - piece.start
            if chosen and size + length > SEGMENT_BYTES:
                yield bucket, chosen
                chosen, size = [], 0
            chosen.append(piece)
            size += length
        yield bucket, chosen


async def _sort(pieces: list[_Sortable]) -> None:
    """Sort in slices, then all at once: a sort finds what is in order already and only merges it."""
    for start in range(0, len(pieces), SLICE_RUNS):
        pieces[start : start + SLICE_RUNS] = sorted(pieces[start : start + SLICE_RUNS])
        await asyncio.sleep(0)
    pieces.sort()


def _pieces(run: StreamRun) -> list[StreamRun]:
    """A run cut at midnights and where it would fill a segment: the footer of a larger one takes long to read."""
    pieces: list[StreamRun] = []
    first = 0
    while first < len(run.times):
        midnight = (run.times[first] // DAY_MS + 1) * DAY_MS
        start = run.ends[first - 1] if first else run.start
        stop = min(bisect_right(run.times, midnight - 1, first), bisect_right(run.ends, start + SEGMENT_BYTES, first))
        stop = max(stop, first + 1)
        piece = replace(
            run,
            start=start,
            messages=run.messages[first:stop],
            ends=run.ends[first:stop],
            positions=run.positions[first:stop],
            times=run.times[first:stop],
        )
        pieces.append(piece)
        first = stop
    return pieces


async def encode(bucket: str, shard: int, runs: list[StreamRun], thread: Executor) -> EncodedSegment:
    """One bucket's runs, in order, as a segment."""
    loop = asyncio.get_running_loop()
    steps = encoding(bucket, shard, runs)
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
