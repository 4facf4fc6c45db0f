"""Which objects of the store are ours, by their names. Others may share the store: theirs are ignored, and said once.

The names themselves are made in `cold.py`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncIterator
from typing import Final

from millstream.tiers.objects import ObjectInfo, Objects
from millstream.units import Position

logger = logging.getLogger("millstream.store")

_MANIFEST: Final = re.compile(r"manifests/(\d{4,})/(\d{20})-[0-9a-f]+\.msgpack")
_NOTES: Final = re.compile(r"notes/(\d{4,})/(\d{20})-[0-9a-f]+\.msgpack")
_SEGMENT: Final = re.compile(
    r"segments/(?:bucket=[^/]+|shared)/date=[^/]+/(\d{4,})-(\d{20})-[0-9a-f]+(?:-compacted)?\.parquet"
)
# By the folder they lie in; everything of ours lies in one of them, or among the snapshots.
_PATTERNS: Final = {"manifests": _MANIFEST, "notes": _NOTES, "segments": _SEGMENT}


def shard_and_position(path: str) -> tuple[int, Position] | None:
    """What a path of ours says; None if it is not one."""
    pattern = _PATTERNS.get(path.partition("/")[0])
    found = pattern.fullmatch(path) if pattern is not None else None
    return (int(found[1]), Position(found[2])) if found is not None else None


async def list_ours(objects: Objects, prefix: str) -> AsyncIterator[tuple[ObjectInfo, int, Position]]:
    """The manifests, notes or segments under a prefix, each with its shard and position; whatever else lies there is
    left alone."""
    foreign, example = 0, ""
    async for entry in objects.list(prefix):
        place = shard_and_position(entry.path)
        if place is not None:
            yield entry, *place
        else:
            foreign, example = foreign + 1, example or entry.path
    if foreign and objects.foreign.get(prefix) != foreign:
        logger.warning("%d objects under %s are not ours and are ignored, the first is %s", foreign, prefix, example)
    objects.foreign[prefix] = foreign


async def stored_shards(objects: Objects) -> list[int]:
    """The numbers of the shards that have manifests in the object store, in order."""
    return sorted({shard async for _, shard, _ in list_ours(objects, "manifests/")})
