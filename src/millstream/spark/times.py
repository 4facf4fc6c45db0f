"""From a time to a position: the first message that was appended at it or later."""

from __future__ import annotations

import pyarrow as arrow
import pyarrow.compute as compute

from millstream.spark.cold_reader import ColdReader, store_settings
from millstream.spark.options import ReadOptions
from millstream.spark.source_client import ColdListing, ShardListing, SourceClient


def position_at(options: ReadOptions, client: SourceClient, cold: ColdListing, shard: ShardListing, at_ms: int) -> int:
    """The first position of the bucket at or after a time; the position after the last if there is none yet."""
    settings = store_settings(cold.store, options.cold)
    best: int | None = None
    if settings is not None:
        reader = ColdReader(settings)
        # From the front: once something is found, only segments that begin before it can hold something earlier.
        for segment in sorted(shard.refs(), key=lambda one: one.first_position):
            if segment.last_at_ms < at_ms or (best is not None and segment.first_position >= best):
                continue
            if segment.first_at_ms >= at_ms:
                found: int | None = segment.first_position
            else:
                footer = reader.footer(segment)
                groups = range(footer.metadata.num_row_groups)
                tables = reader.tables(segment, footer, groups, ["appended_at", "position"])
                found = min(
                    (one for one in (_first(table, at_ms) for _, table in tables) if one is not None), default=None
                )
            if found is not None and (best is None or found < best):
                best = found
    if best is not None:
        return best
    after = shard.earliest if settings is None else shard.flushed
    while after < shard.latest:
        page = client.feed(options.bucket, shard.shard, after, "")
        found = _first(page.table.filter(compute.field("event") == "message"), at_ms)
        if found is not None:
            return found
        if page.position <= after:
            break
        after = page.position
    return shard.latest + 1


def _first(table: arrow.Table, at_ms: int) -> int | None:
    moment = arrow.scalar(at_ms, arrow.timestamp("ms", tz="UTC"))
    positions = table.filter(compute.field("appended_at") >= moment).column("position")
    first: int | None = compute.min(positions).as_py()
    return first
