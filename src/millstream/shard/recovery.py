"""Start-up: the catalog gives the state up to its position, the log everything from there on.

Records are applied as they were the first time. What the log still holds of earlier positions is passed over: the
cold tier has it.
"""

from __future__ import annotations

from typing import NamedTuple

from millstream.errors import Corrupt
from millstream.log.interface import Log
from millstream.shard.publisher import Publisher
from millstream.streams.machine import StateMachine
from millstream.streams.records import decode_batch, span
from millstream.tiers.catalog import Catalog


class Recovered(NamedTuple):
    next_position: int
    records_applied: int


def recover(log: Log, catalog: Catalog, machine: StateMachine, publisher: Publisher) -> Recovered:
    catalog.restore(machine)
    machine.flushed = catalog.position
    if catalog.position > 1 and not log.exists:
        raise Corrupt(
            f"the log is missing: the catalog stands at position {catalog.position} and needs what comes after it",
            hint="restore the log directory from a copy, or rebuild an empty data directory from the object store with"
            " `millstream restore`",
        )
    position = None
    applied = 0
    for batch in log.read():
        if position is None and batch.first > catalog.position:
            raise _missing(batch.first, catalog.position)
        position = batch.next
        if batch.next <= catalog.position:
            continue
        at = batch.first
        for record in decode_batch(batch.payload):
            machine.apply(record, at)
            publisher.publish(record, at)
            applied += 1
            at += span(record)
    if position is not None and position < catalog.position:
        raise _missing(position, catalog.position)
    return Recovered(position or catalog.position, applied)


def _missing(found: int, needed: int) -> Corrupt:
    return Corrupt(
        f"the log reaches from or to position {found}, but the catalog needs {needed}",
        hint="the log and the catalog of this data directory do not belong together; restore both from one copy,"
        " or rebuild an empty data directory from the object store with `millstream restore`",
    )
