"""Which shard a bucket belongs to. Part of the stored format: it must never change for an existing cluster."""

from __future__ import annotations

import zlib


def shard_of(bucket: str, shards: int) -> int:
    """All streams of a bucket are in one shard, so its listing, its feed and forks within it need no other shard."""
    return zlib.crc32(bucket.encode()) % shards
