"""Start-up: the catalog gives the state as of its checkpoint, the log the rest.

Records behind the checkpoint are applied as they were the first time. Records the checkpoint already reflects only
give back the bytes of streams that still exist.
"""

from __future__ import annotations

from typing import NamedTuple

from millstream.errors import Corrupt
from millstream.log.interface import Log
from millstream.streams.machine import StateMachine
from millstream.streams.records import AnyRecord, Appended, StreamCreated, decode_batch, span
from millstream.tiers.catalog import Catalog
from millstream.tiers.hot import HotTier


class Recovered(NamedTuple):
    next_position: int
    records_applied: int


def recover(log: Log, catalog: Catalog, machine: StateMachine, hot: HotTier) -> Recovered:
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
            publish(record, position, machine, hot)
            for stream in machine.purged:
                hot.drop(stream.incarnation)
            machine.purged.clear()
            position += span(record)
    if position is None:
        position = catalog.trimmed
    if position < catalog.position:
        raise _missing(position, catalog.position)
    return Recovered(position, applied)


def publish(record: AnyRecord, position: int, machine: StateMachine, hot: HotTier) -> None:
    """Put a record's messages where readers find them, if its stream is still there."""
    if isinstance(record, Appended):
        if record.messages and machine.by_incarnation(record.stream) is not None:
            hot.publish(record.stream, record.offset, position, record.at_ms, record.messages)
    elif isinstance(record, StreamCreated) and record.messages and machine.by_incarnation(position) is not None:
        offset = record.fork.offset if record.fork is not None else 0
        hot.publish(position, offset, position, record.at_ms, record.messages)


def _missing(found: int, needed: int) -> Corrupt:
    return Corrupt(
        f"the log reaches from or to position {found}, but the catalog needs {needed}",
        hint="the log and the catalog of this data directory do not belong together; restore both from one copy",
    )
