"""Which shard a bucket belongs to. Part of the stored format: it can never change for a cluster that exists."""

from __future__ import annotations

import zlib


def shard_of(bucket: str, shards: int) -> int:
    """All of a bucket's streams live in one shard, so its listing, its feed and forks within it need no other."""
    return zlib.crc32(bucket.encode()) % shards
