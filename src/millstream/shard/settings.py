"""What the configuration says to a shard."""

from __future__ import annotations

from dataclasses import dataclass

from millstream.shard.flush.limits import FlushLimits
from millstream.shard.scrub import NO_SCRUBS, ScrubLimits
from millstream.streams.limits import DEFAULT_LIMITS, StreamLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSettings:
    """Times are seconds. Shards of one process share its memory: each has its part of `hot_bytes_max`."""

    hot_bytes_max: int
    flush: FlushLimits
    reclaim_grace: float = 3600.0
    leftover_age: float = 24 * 3600.0
    # Whether a store that another server owns may be taken over.
    may_take_over: bool = False
    scrub: ScrubLimits = NO_SCRUBS
    streams: StreamLimits = DEFAULT_LIMITS
    # How long a batch may be on its way to the log before the server is not ready.
    stuck_after: float = 10.0
