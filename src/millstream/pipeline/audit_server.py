"""The part of an audit that asks the server: does it list the segments and streams that the manifests do?

The server goes on while it is asked, so differences count only if they are still there when the manifests are read
once more, and only for what lies before the position both know.
"""

from __future__ import annotations

import asyncio
import time
from typing import Final

from millstream.client import Client, ClientError
from millstream.errors import InvalidRequest
from millstream.pipeline.job_client import JobClient
from millstream.pipeline.view import View, load_views
from millstream.protocol.keys import parse_bucket
from millstream.tiers.objects import ObjectStoreSettings, open_objects

LOOKS: Final = 3
LOOK_AGAIN_SECONDS: Final = 1.0

Difference = tuple[str, str]


def compare_with_server(
    client: JobClient, settings: ObjectStoreSettings, views: list[View], alive: set[str]
) -> list[Difference]:
    """`alive` are the segments in which something counts."""
    found: set[Difference] = set()
    for look in range(LOOKS):
        differences = {one for view in views for one in _differences(client, view, alive)}
        # One that goes away was a flush, a deletion or a compaction in between.
        found = differences if look == 0 else found & differences
        if not found:
            return []
        time.sleep(LOOK_AGAIN_SECONDS)
        views = asyncio.run(_load(settings))
    return sorted(found)


async def _load(settings: ObjectStoreSettings) -> list[View]:
    return await load_views(open_objects(settings))


def _differences(client: JobClient, view: View, alive: set[str]) -> list[Difference]:
    differences: list[Difference] = []
    connection = client.connection
    with Client(connection.url, token=connection.token, ssl_context=connection.trust()) as streams:
        for bucket in sorted({stream.key.bucket for stream in view.streams.values()}):
            try:
                parse_bucket(bucket)
            except InvalidRequest:
                continue  # implicit buckets may have names that only /v1/stream knows
            differences += _segments(client, view, bucket, alive)
            differences += _listing(streams, view, bucket)
    return differences


def _segments(client: JobClient, view: View, bucket: str, alive: set[str]) -> list[Difference]:
    listed = {ref.path: ref for shard in client.cold(bucket).shards for ref in shard.refs()}
    named = view.cold.segments
    expected = {path: ref for path, ref in named.items() if ref.bucket == bucket}
    differences = [
        (path, "the server reads this segment, and no manifest names it")
        for path, ref in listed.items()
        if path not in named and ref.last_position < view.through
    ]
    differences += [
        (path, "the server and the manifests disagree about this segment")
        for path, ref in listed.items()
        if path in named and named[path] != ref
    ]
    differences += [
        (path, "this segment holds live messages, and the server does not read it")
        for path in sorted(alive & expected.keys() - listed.keys())
    ]
    return differences


def _listing(client: Client, view: View, bucket: str) -> list[Difference]:
    """Streams whose tail the server has behind the cold tier's."""
    try:
        tails = {entry.name: entry.tail_offset for entry in client.bucket(bucket).list()}
    except ClientError as error:
        return [(bucket, f"the server does not list it: {error}")]
    differences: list[Difference] = []
    for stream in view.streams.values():
        if stream.key.bucket != bucket or stream.key.stream not in tails:
            continue  # deleted since, or only its forks keep it
        tail = tails[stream.key.stream]
        if tail < stream.tail:
            differences.append((str(stream.key), f"the server ends at offset {tail}, the cold tier at {stream.tail}"))
    return differences
