"""Statistics for operators: how much data is where, and whether anything is stuck."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from heapq import nlargest
from itertools import chain
from typing import Any, Final

from millstream import caches
from millstream.server.api.background import in_background
from millstream.server.api.responses import as_json
from millstream.server.http.messages import Answer, Request
from millstream.shard.shard import Shard

LARGEST_COUNT: Final = 20
STREAMS_SLICE: Final = 5_000


async def with_details(totals: dict[str, Any], shards: Sequence[Shard]) -> dict[str, Any]:
    """Totals, with the streams that take the most memory and the state of the caches."""
    found = caches.counts()
    for shard in shards:
        for name, counts in shard.cold.cache_counts().items():
            so_far = found.get(name, {})
            found[name] = {key: so_far.get(key, 0) + value for key, value in counts.items()}
    return {**totals, "largest_streams": await _largest_streams(shards), "caches": found}


async def _largest_streams(shards: Sequence[Shard]) -> list[dict[str, object]]:
    """The streams with the most bytes in memory. There may be very many, so other work runs after every slice."""
    largest: list[tuple[int, str]] = []
    for shard in shards:
        streams = list(shard.namespace.resident())
        for start in range(0, len(streams), STREAMS_SLICE):
            some = streams[start : start + STREAMS_SLICE]
            sizes = ((shard.hot.bytes_of(stream), str(stream.key)) for stream in some if stream.hot is not None)
            largest = nlargest(LARGEST_COUNT, chain(largest, sizes))
            await asyncio.sleep(0)
    return [{"stream": name, "hot_bytes": size} for size, name in largest]


class StatsApi:
    def __init__(self, shard: Shard) -> None:
        self._shard = shard

    def hot_and_cold(self, request: Request) -> Answer:
        return in_background(with_details(self.describe(), [self._shard])).then(as_json)

    def describe(self) -> dict[str, object]:
        shard = self._shard
        totals = shard.cold_totals()
        reason = shard.backpressure_reason()
        return {
            "hot_bytes": shard.hot.bytes,
            "budget_bytes": shard.budget.used,
            "hot_bytes_max": shard.hot_bytes_max,
            "cold_bytes": totals.stored_bytes,
            "cold_payload_bytes": totals.payload_bytes,
            "segment_count": totals.segments,
            "flush_backlog_bytes": shard.hot.backlog_bytes,
            "flush_count": shard.flusher.flush_count,
            "flush_in_progress": shard.flusher.lock.locked(),
            "flush_failure": shard.flusher.failure,
            "backpressure": reason is not None,
            "backpressure_reason": reason,
            "row_group_cache_bytes": shard.cold.cached_bytes,
            "resident_streams": shard.namespace.resident_count(),
            "flushed_position": shard.machine.flushed,
            "last_position": shard.feed.latest,
        }
