"""The parts of a shard that its background work shares, built once by `Shard`.

Flusher, reclaimer, compaction, scrubber, feed and catalog follower each need most of them. They take this one object
and, beside it, only what is their own: their limits, and each other.
"""

from __future__ import annotations

from dataclasses import dataclass

from millstream.clock import Clock, ExpiryClock
from millstream.log.interface import Log
from millstream.measures import ShardMeasures
from millstream.shard.budget import MemoryBudget
from millstream.shard.committer import Committer
from millstream.shard.listeners import Listeners
from millstream.shard.ownership import Ownership
from millstream.streams.machine import StateMachine
from millstream.tasks import Supervisor
from millstream.tiers.blobs import Blobs
from millstream.tiers.catalog import Catalog
from millstream.tiers.cold import ColdTier
from millstream.tiers.hot import HotTier
from millstream.tiers.journal import Journals


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardParts:
    number: int
    # Time, tasks and figures.
    clock: Clock
    expiry_clock: ExpiryClock
    supervisor: Supervisor
    measures: ShardMeasures
    # What is true: the log, and the state that it leads to.
    log: Log
    committer: Committer
    machine: StateMachine
    # Where bytes lie: in memory, in the catalog, in the object store.
    hot: HotTier
    journals: Journals
    catalog: Catalog
    cold: ColdTier
    blobs: Blobs
    # Who waits for streams, how much memory all of it takes, and whose the object store is.
    listeners: Listeners
    budget: MemoryBudget
    ownership: Ownership
