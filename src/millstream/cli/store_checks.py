"""The checks of `millstream doctor` on the object store's owner: whether a server may start on this data directory.

The catalog and the log are only read; nothing is opened for writing, truncated or claimed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from millstream.cli.findings import Finding, Level
from millstream.cli.locks import holder_of
from millstream.clock import Clock
from millstream.config import Config
from millstream.errors import MillstreamError
from millstream.log.file_log import stored_batches
from millstream.server.node.read_only import is_read_only
from millstream.server.node.settings import object_store_settings
from millstream.shard.ownership import RESTORE_HINT, described, why_refused
from millstream.shard.quarantine import records_in
from millstream.streams.records import StoreClaimed
from millstream.tiers.catalog import stored_claim
from millstream.tiers.objects import Objects, open_objects
from millstream.tiers.owners import newest_owner
from millstream.units import Position

_NAME: Final = "store owner"


def store_owner(config: Config, clock: Clock) -> Iterator[Finding]:
    settings = object_store_settings(config)
    if settings.backend == "memory" or (settings.backend == "fs" and not settings.path.exists()):
        return  # nothing is stored yet
    try:
        objects = open_objects(settings, read_only=True)
        if config.cluster.name:
            yield asyncio.run(_cluster(objects, config.cluster.shards))
        else:
            yield asyncio.run(_single(objects, config))
    except MillstreamError as error:
        yield Finding(_NAME, "problem", f"it cannot be told who owns the store: {error.message}", error.hint)


async def _cluster(objects: Objects, shards: int) -> Finding:
    """Only the brokers have a cluster's logs, so each node compares the owner when it begins to lead."""
    owners = {number: await newest_owner(objects, number) for number in range(shards)}
    said = "; ".join(f"shard {number}: {described(one)}" for number, one in owners.items() if one is not None)
    return Finding(_NAME, "ok", said or "nobody owns the object store yet")


async def _single(objects: Objects, config: Config) -> Finding:
    data_dir = config.server.data_dir
    newest = await newest_owner(objects, 0)
    owner = f"it belongs to {described(newest)}" if newest is not None else "nobody owns it yet"
    if holder_of(data_dir / "lock") is not None:
        return Finding(_NAME, "ok", f"{owner}; a server is running on this data directory")
    if config.server.read_only or is_read_only(data_dir):
        return Finding(_NAME, "ok", f"{owner}; this data directory is for reading only")
    end, known = _last_claim(data_dir)
    reason = await why_refused(objects, 0, newest, known, end)
    if reason is None:
        return Finding(_NAME, "ok", f"{owner}; a server may start on this data directory")
    level: Level = "warning" if config.cold.take_over else "problem"
    return Finding(_NAME, level, f"a server cannot start on this data directory: {reason}", RESTORE_HINT)


def _last_claim(data_dir: Path) -> tuple[Position, StoreClaimed | None]:
    """The last position in this data directory, and the last claim of the store in its catalog or log."""
    position, known = stored_claim(data_dir / "catalog")
    end, unasked_at = position, None
    for batch in stored_batches(data_dir / "log"):
        if batch.next <= position:
            continue  # the catalog includes it
        end = batch.next
        for found in records_in(batch):
            if isinstance(found.record, StoreClaimed):
                is_repeated = known is not None and known.claim == found.record.claim
                unasked_at = (unasked_at or found.position) if is_repeated else None
                known = found.record
    return end if unasked_at is None else unasked_at, known
