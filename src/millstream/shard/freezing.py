"""Freezing: the state at a position, taken without stopping anything.

A stream that is about to change is encoded first (`StateMachine.before_change`), the others in slices between requests.
Until the flush is over the machine keeps apart what is being stored and what has changed since; `thaw` puts both
together again if it fails.
"""

from __future__ import annotations

import asyncio
from typing import Final, NamedTuple

from millstream.streams.machine import StateMachine
from millstream.streams.records import SegmentsReplaced
from millstream.tiers.catalog_rows import encode_key, encode_singletons, encode_stream
from millstream.tiers.hot import HotTier
from millstream.tiers.journal import Journals
from millstream.tiers.manifests import FeedNote, ManifestStream
from millstream.tiers.segment_encoder import StreamRun

SLICE_STREAMS: Final = 256


class Frozen(NamedTuple):
    """The state at a position, and what leads up to it."""

    position: int
    first_position: int
    rows: list[ManifestStream]
    removed: list[tuple[int, bytes]]
    freed_blobs: list[str]
    trimmed: list[tuple[int, int]]
    singletons: dict[bytes, bytes]
    runs: list[StreamRun]
    notes: list[FeedNote]
    incarnations: set[int]
    unflushed_bytes: int
    replaced: list[SegmentsReplaced]
    records_applied: int


def freeze(machine: StateMachine, hot: HotTier, journals: Journals, first_position: int, position: int) -> Frozen:
    """Mark the present, which is `position`, as the state to be stored; nothing is encoded yet."""
    rows: list[ManifestStream] = []
    machine.frozen = dict(machine.dirty)
    machine.freezing, machine.dirty = machine.dirty, {}
    machine.removing, machine.removed = machine.removed, {}
    machine.before_change = lambda stream: rows.append(encode_stream(stream))
    freed_blobs, machine.freed_blobs = machine.freed_blobs, []
    incarnations, hot.unflushed = hot.unflushed, set()
    unflushed_bytes, hot.unflushed_bytes = hot.unflushed_bytes, 0
    replaced, machine.replaced = machine.replaced, []
    return Frozen(
        position=position,
        first_position=first_position,
        rows=rows,
        removed=[(incarnation, encode_key(key)) for incarnation, key in machine.removing.items()],
        freed_blobs=freed_blobs,
        trimmed=[
            (stream.incarnation, stream.earliest)
            for stream in machine.frozen.values()
            if stream.earliest and not stream.forks
        ],
        singletons=encode_singletons(machine),
        runs=[],
        notes=[
            FeedNote(bucket, at + note.after, note.event, note.stream, note.at_ms, note.offset, note.content_type)
            for bucket, at, note in journals.notes_between(first_position, position)
        ],
        incarnations=incarnations,
        unflushed_bytes=unflushed_bytes,
        replaced=replaced,
        records_applied=machine.records_applied,
    )


async def gather(frozen: Frozen, machine: StateMachine, hot: HotTier) -> None:
    """Encode the frozen rows and collect the messages, a slice at a time between requests."""
    freezing = machine.freezing
    while freezing:
        for _ in range(min(SLICE_STREAMS, len(freezing))):
            frozen.rows.append(encode_stream(freezing.popitem()[1]))
        await asyncio.sleep(0)
    for count, incarnation in enumerate(frozen.incarnations, 1):
        run = _run(incarnation, frozen, machine, hot)
        if run is not None:
            frozen.runs.append(run)
        if count % SLICE_STREAMS == 0:
            await asyncio.sleep(0)


def _run(incarnation: int, frozen: Frozen, machine: StateMachine, hot: HotTier) -> StreamRun | None:
    """A stream's messages between the two positions; they may be gone if the stream is."""
    tail = hot.tails.get(incarnation)
    stream = machine.by_incarnation(incarnation)
    if tail is None or stream is None:
        return None
    positions = tail.positions
    if positions[0] >= frozen.first_position and positions[-1] < frozen.position:
        first, stop = 0, len(positions)
    else:
        chosen = tail.between(frozen.first_position, frozen.position)
        if not chosen:
            return None
        first, stop = chosen.start, chosen.stop
    return StreamRun(
        stream.key,
        incarnation,
        stream.content_type,
        tail.message_start(first),
        tail.messages[first:stop],
        tail.ends[first:stop],
        positions[first:stop],
        tail.times[first:stop],
    )


def thaw(frozen: Frozen, machine: StateMachine, hot: HotTier) -> None:
    """The flush failed: all of it is still to be done."""
    machine.freezing = {}
    machine.removed = machine.removing | machine.removed
    machine.freed_blobs = frozen.freed_blobs + machine.freed_blobs
    machine.dirty = {i: s for i, s in machine.frozen.items() if i not in machine.removed} | machine.dirty
    hot.unflushed |= {incarnation for incarnation in frozen.incarnations if incarnation in hot.tails}
    hot.unflushed_bytes += frozen.unflushed_bytes
    machine.replaced = frozen.replaced + machine.replaced
