"""compact: merge small segments into large ones and leave out what is dead, while the server goes on.

The driver plans from the manifests; each task writes one new segment; the server checks the whole group and swaps it in
with one record. Until then the new segments are nothing but files: a job that dies leaves the old state, and the server
removes what it wrote. A group that was changed by somebody else meanwhile is refused and left for the next run.
"""

from __future__ import annotations

import asyncio
import resource
import secrets
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from millstream.clock import monotonic_seconds
from millstream.errors import Conflict, MillstreamError
from millstream.pipeline.job_client import JobClient, job_client, store_of
from millstream.pipeline.planning import Group, Limits, Share, groups_of, plan_group, weigh
from millstream.pipeline.rewriting import Part, rewrite
from millstream.pipeline.tasks import run_tasks
from millstream.pipeline.view import load_views
from millstream.spark.options import ColdRoot, Connection
from millstream.streams.records import SegmentRef
from millstream.tiers.cold import compacted_path
from millstream.tiers.objects import ObjectStoreSettings, open_objects
from millstream.tiers.segment_reader import SegmentReader

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PASSES_MAX: Final = 8
GROUPS_AT_ONCE: Final = 4


@dataclass(frozen=True)
class CompactOptions:
    connection: Connection
    cold: ColdRoot
    buckets: tuple[str, ...] = ()
    """None named: all of them."""
    target_bytes: int = 128 << 20
    """Payload of a new segment. A task takes about four times that in memory, and 150 MiB."""
    segments_min: int = 2
    """How many small segments of a bucket and day make it worth while."""
    dead_share: float = 0.3
    """A segment of which this much is dead is written anew."""


class CompactSummary(NamedTuple):
    segments_before: int
    segments_after: int
    messages: int
    payload_bytes: int
    dead_bytes: int
    groups: int
    refused: int
    task_memory_bytes: int
    """The most that a worker process has used."""
    seconds: float


Progress = Callable[[int, int], None]


def compact(
    spark: SparkSession, options: CompactOptions, progress: Progress = lambda done, total: None
) -> CompactSummary:
    """Merge until there is nothing left worth merging; `progress` gets how many groups of how many are done."""
    started = monotonic_seconds()
    limits = Limits(options.target_bytes, options.segments_min, options.dead_share)
    results: list[_GroupResult] = []
    refused = 0
    with job_client(options.connection) as client:
        settings = store_of(client, options.cold)
        for _ in range(PASSES_MAX):
            groups = asyncio.run(_plan(settings, set(options.buckets) or None, limits))
            if not groups:
                break
            done, conflicts = _run(spark, client, settings, groups, progress)
            results += done
            refused += conflicts
            if not done:
                break
    return CompactSummary(
        sum(result.replaced for result in results),
        sum(len(result.segments) for result in results),
        sum(segment.rows for result in results for segment in result.segments),
        sum(segment.payload_bytes for result in results for segment in result.segments),
        sum(result.dead_bytes for result in results),
        len(results),
        refused,
        max((result.memory_bytes for result in results), default=0),
        monotonic_seconds() - started,
    )


class _GroupResult(NamedTuple):
    replaced: int
    segments: list[SegmentRef]
    dead_bytes: int
    memory_bytes: int


async def _plan(settings: ObjectStoreSettings, buckets: set[str] | None, limits: Limits) -> list[Group]:
    objects = open_objects(settings)
    groups: list[Group] = []
    reader = SegmentReader(objects)
    for view in await load_views(objects):
        weights = weigh(reader, view, buckets)
        groups += [plan_group(reader, view, group, limits) for group in groups_of(weights, limits)]
    return groups


def _run(
    spark: SparkSession, client: JobClient, settings: ObjectStoreSettings, groups: list[Group], progress: Progress
) -> tuple[list[_GroupResult], int]:
    """Several groups at a time, so that small ones use every core too; commits go one after the other."""
    committing = threading.Lock()
    results: list[_GroupResult] = []
    refused = 0
    with ThreadPoolExecutor(GROUPS_AT_ONCE, thread_name_prefix="millstream-compact") as threads:
        futures = [threads.submit(_compact_group, spark, client, settings, group, committing) for group in groups]
        try:
            for count, future in enumerate(as_completed(futures), 1):
                result = future.result()
                if result is None:
                    refused += 1
                else:
                    results.append(result)
                progress(count, len(groups))
        except BaseException:
            for future in futures:
                future.cancel()
            raise
    return results, refused


def _compact_group(
    spark: SparkSession, client: JobClient, settings: ObjectStoreSettings, group: Group, committing: threading.Lock
) -> _GroupResult | None:
    parts = [_part(settings, group, share, *edges) for share in group.shares() for edges in share.ranges()]
    try:
        answers = run_tasks(spark, parts, _rewrite)
        written = [msgspec.json.decode(answer, type=_Written) for answer in answers]
        segments = [one.segment for one in written]
        with committing:
            client.commit_compaction([source.path for source in group.sources], segments)
    except Conflict:
        _discard(settings, parts)
        return None
    except MillstreamError:
        _discard(settings, parts)
        raise
    before = sum(source.payload_bytes for source in group.sources)
    dead_bytes = before - sum(segment.payload_bytes for segment in segments)
    return _GroupResult(len(group.sources), segments, dead_bytes, max(one.memory_bytes for one in written))


class _Written(msgspec.Struct):
    segment: SegmentRef
    memory_bytes: int


def _rewrite(part: Part) -> bytes:
    segment = rewrite(part)
    return msgspec.json.encode(_Written(segment, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10))


def _part(settings: ObjectStoreSettings, group: Group, share: Share, first: Any, last: Any) -> Part:
    source = min(group.sources, key=lambda segment: segment.first_position)
    path = compacted_path(share.bucket, source.first_at_ms, group.shard, source.first_position, secrets.token_bytes(8))
    return Part(settings, path, share.bucket, group.shard, group.sources, first, last, share.kept_from)


def _discard(settings: ObjectStoreSettings, parts: list[Part]) -> None:
    """Remove what was written and is not wanted. What stays behind, the server removes later."""

    async def delete() -> None:
        objects = open_objects(settings)
        for part in parts:
            await objects.delete(part.path)

    try:
        asyncio.run(delete())
    except MillstreamError:
        return
