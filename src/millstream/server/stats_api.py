"""What an operator asks: how much is where, and whether anything is stuck."""

from __future__ import annotations

import msgspec

from millstream.server.messages import Request, Response
from millstream.shard.shard import Shard


class StatsApi:
    def __init__(self, shard: Shard) -> None:
        self._shard = shard

    def hot_and_cold(self, request: Request) -> None:
        fields = b"content-type: application/json\r\ncache-control: no-store\r\n"
        request.reply(Response(200, fields, msgspec.json.encode(self.describe())))

    def describe(self) -> dict[str, object]:
        shard = self._shard
        totals = shard.cold_totals()
        reason = shard.backpressure_reason()
        return {
            "hot_bytes": shard.hot.bytes,
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
            "resident_streams": shard.machine.resident_count(),
            "flushed_position": shard.machine.flushed,
            "last_position": shard.feed.latest,
        }
