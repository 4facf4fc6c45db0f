"""Start-up: the catalog gives the state up to its position, the log everything from there on.

Records are applied as they were the first time. What the log still holds of earlier positions is passed over: the
cold tier has it.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

from millstream.errors import Corrupt, MillstreamError
from millstream.log.interface import Log
from millstream.shard.publisher import Publisher
from millstream.shard.quarantine import Quarantine, records_in
from millstream.streams.machine import StateMachine
from millstream.tiers.catalog import Catalog
from millstream.units import Position

logger = logging.getLogger("millstream.shard")


class Recovered(NamedTuple):
    next_position: Position
    records_applied: int


def recover(
    log: Log, catalog: Catalog, machine: StateMachine, publisher: Publisher, quarantine: Quarantine
) -> Recovered:
    catalog.restore(machine)
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
        for found in records_in(batch):
            if quarantine.holds(found.position):
                machine.pass_over()
                continue
            if found.record is None:
                raise quarantine.refuse(found, found.error)
            try:
                machine.apply(found.record, found.position)
                publisher.publish(found.record, found.position)
            except Exception as error:
                if not isinstance(error, MillstreamError):  # a defect: where it happened is worth knowing
                    logger.critical("a record of the log cannot be applied", exc_info=True)
                raise quarantine.refuse(found, error) from error
            applied += 1
    quarantine.succeeded()
    if position is not None and position < catalog.position:
        raise _missing(position, catalog.position)
    return Recovered(position or catalog.position, applied)


def _missing(found: Position, needed: Position) -> Corrupt:
    return Corrupt(
        f"the log reaches from or to position {found}, but the catalog needs {needed}",
        hint="the log and the catalog of this data directory do not belong together; restore both from one copy,"
        " or rebuild an empty data directory from the object store with `millstream restore`",
    )
