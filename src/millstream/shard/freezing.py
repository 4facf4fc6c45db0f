"""Freezing: the state at a position, taken without stopping anything.

A stream that is about to change is encoded first (`StateMachine.before_change`), the others in slices between requests.
Streams that only grew are not encoded at all: their messages, which are taken at the same moment, tell the rest.
Until the flush is over the machine keeps apart what is being stored and what has changed since; `thaw` puts both
together again if it fails.
"""

from __future__ import annotations

import asyncio
from typing import Final, NamedTuple

from millstream.streams.machine import StateMachine
from millstream.streams.producers import Taken
from millstream.streams.records import SegmentsReplaced
from millstream.streams.state import Stream
from millstream.tiers.catalog_rows import encode_key, encode_singletons, freeze_stream
from millstream.tiers.hot import HotTier, Unflushed
from millstream.tiers.journal import Journals
from millstream.tiers.manifests import FeedNote

SLICE_STREAMS: Final = 256


class Frozen(NamedTuple):
    """The state at a position, and what leads up to it."""

    position: int
    first_position: int
    streams: list[bytes]  # as `freeze_stream` wrote each
    removed: list[tuple[int, bytes]]
    freed_blobs: list[str]
    singletons: dict[bytes, bytes]
    unflushed: Unflushed
    notes: list[FeedNote]
    replaced: list[SegmentsReplaced]
    producers: Taken
    records_applied: int


def freeze(machine: StateMachine, hot: HotTier, journals: Journals, first_position: int, position: int) -> Frozen:
    """Mark the present, which is `position`, as the state to be stored; nothing is encoded yet."""
    streams: list[bytes] = []

    def encode(stream: Stream) -> None:
        streams.append(freeze_stream(stream))

    machine.frozen = dict(machine.dirty)
    machine.freezing, machine.dirty = machine.dirty, {}
    machine.removing, machine.removed = machine.removed, {}
    machine.before_change = encode
    freed_blobs, machine.freed_blobs = machine.freed_blobs, []
    replaced, machine.replaced = machine.replaced, []
    return Frozen(
        position=position,
        first_position=first_position,
        streams=streams,
        removed=[(incarnation, encode_key(key)) for incarnation, key in machine.removing.items()],
        freed_blobs=freed_blobs,
        singletons=encode_singletons(machine),
        unflushed=hot.take_unflushed(),
        notes=[
            FeedNote(bucket, at + note.after, note.event, note.stream, note.at_ms, note.offset, note.content_type)
            for bucket, at, note in journals.notes_between(first_position, position)
        ],
        replaced=replaced,
        producers=machine.producers.take(),
        records_applied=machine.records_applied,
    )


async def encode_rows(machine: StateMachine) -> None:
    """Encode the frozen rows, a slice at a time between requests."""
    freezing, encode = machine.freezing, machine.before_change
    while freezing:
        for _ in range(min(SLICE_STREAMS, len(freezing))):
            encode(freezing.popitem()[1])
        await asyncio.sleep(0)


def thaw(frozen: Frozen, machine: StateMachine, hot: HotTier) -> None:
    """The flush failed: all of it is still to be done."""
    machine.freezing = {}
    machine.producers.put_back(frozen.producers)
    machine.removed = machine.removing | machine.removed
    machine.freed_blobs = frozen.freed_blobs + machine.freed_blobs
    machine.dirty = {i: s for i, s in machine.frozen.items() if i not in machine.removed} | machine.dirty
    hot.put_back(frozen.unflushed)
    machine.replaced = frozen.replaced + machine.replaced
