"""Start-up: the catalog gives the state as of its checkpoint, the log the rest.

Records behind the checkpoint are applied as they were the first time. Records the checkpoint already reflects only
give back the bytes of streams that still exist.
"""

from __future__ import annotations

from typing import NamedTuple

from millstream.errors import Corrupt
from millstream.log.interface import Log
from millstream.shard.publisher import Publisher
from millstream.streams.machine import StateMachine
from millstream.streams.records import decode_batch, span
from millstream.tiers.blobs import FileBlobs
from millstream.tiers.catalog import Catalog


class Recovered(NamedTuple):
    next_position: int
    records_applied: int


def recover(log: Log, catalog: Catalog, machine: StateMachine, publisher: Publisher) -> Recovered:
    catalog.restore(machine)
    position = None
    applied = 0
    for batch in log.read():
        if position is None and batch.first > catalog.trimmed:
            raise _missing(batch.first, catalog.trimmed)
        position = batch.first
        for record in decode_batch(batch.payload):
            if position >= catalog.position:
                machine.apply(record, position)
                applied += 1
            publisher.publish(record, position)
            position += span(record)
    if position is None:
        position = catalog.trimmed
    if position < catalog.position:
        raise _missing(position, catalog.position)
    for stream in machine.resident():
        publisher.trim(stream)
    return Recovered(position, applied)


def remove_orphans(blobs: FileBlobs, catalog: Catalog, machine: StateMachine) -> int:
    """Delete the blobs that a crash left without a stream that refers to them."""
    unsaved = {stream.snapshot.blob for stream in machine.unsaved() if stream.snapshot is not None}
    orphans = [name for name in blobs.names() if name not in unsaved and not catalog.refers_to_blob(name)]
    for name in orphans:
        blobs.delete(name)
    return len(orphans)


def _missing(found: int, needed: int) -> Corrupt:
    return Corrupt(
        f"the log reaches from or to position {found}, but the catalog needs {needed}",
        hint="the log and the catalog of this data directory do not belong together; restore both from one copy",
    )
