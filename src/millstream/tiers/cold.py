"""The cold tier: messages in Parquet segments on an object store, found through the catalog's extents.

Decoded row groups and footers are cached up to a limit; whoever needs one that is on its way waits for it with
the others. Decoding runs on threads and releases the interpreter, so live readers do not notice.

Layout under the root, for people and for engines that prune by path:

    segments/bucket=<bucket>/date=<UTC day>/<shard>-<first position>-<random>.parquet
    segments/shared/date=<UTC day>/<shard>-<first position>-<random>.parquet  of buckets that had little to store
    manifests/<shard>/<position>-<random>.msgpack
    notes/<shard>/<position>-<random>.msgpack
    snapshots/<stream>-<offset>-<random>
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple, TypeVar
from urllib.parse import quote, unquote

import pyarrow as arrow
import pyarrow.parquet as parquet

from millstream.errors import Corrupt
from millstream.streams.records import SegmentRef
from millstream.tiers.cache import ByteLimitedCache
from millstream.tiers.catalog import Catalog
from millstream.tiers.catalog_rows import FoundExtent
from millstream.tiers.hot import Run, select
from millstream.tiers.objects import Objects
from millstream.tiers.segment_reader import SegmentReader
from millstream.tiers.segments import (
    BYTES_COLUMNS,
    ORDER_COLUMNS,
    SHARED,
    Footer,
    RowGroup,
)
from millstream.units import Incarnation, Milliseconds, Offset, Position

T = TypeVar("T")

READING_THREADS: Final = 4
GROUPS_AHEAD: Final = 3
COMPACTED: Final = "-compacted.parquet"  # how the names of segments end that a compaction wrote
GIVE_BACK_SECONDS: Final = 5.0
FOOTER_COST: Final = 4  # a decoded footer takes about this many times its bytes


def segment_path(bucket: str, at_ms: Milliseconds, shard: int, position: Position, random: bytes) -> str:
    day = datetime.fromtimestamp(at_ms / 1000, UTC).date().isoformat()
    folder = "shared" if bucket == SHARED else f"bucket={quote(bucket, safe='')}"
    return f"segments/{folder}/date={day}/{shard:04d}-{position:020d}-{random.hex()}.parquet"


def bucket_of_path(path: str) -> str | None:
    """The bucket whose segment lies at a path; None if it is no segment's."""
    _, marker, rest = path.partition("segments/bucket=")
    return unquote(rest.partition("/")[0]) if marker else None


def compacted_path(bucket: str, at_ms: Milliseconds, shard: int, position: Position, random: bytes) -> str:
    return segment_path(bucket, at_ms, shard, position, random).removesuffix(".parquet") + COMPACTED


def manifest_path(shard: int, position: Position, random: bytes) -> str:
    return f"manifests/{shard:04d}/{position:020d}-{random.hex()}.msgpack"


def notes_path(shard: int, position: Position, random: bytes) -> str:
    return f"notes/{shard:04d}/{position:020d}-{random.hex()}.msgpack"


class ExtentRows(NamedTuple):
    """An extent and the decoded row group it lies in."""

    extent: FoundExtent
    group: RowGroup

    @property
    def first(self) -> int:
        return self.extent.row.row_start

    @property
    def stop(self) -> int:
        return self.extent.row.row_start + self.extent.row.rows


class ColdTier:
    def __init__(self, objects: Objects, catalog: Catalog, cache_bytes: int) -> None:
        self.objects = objects
        self._reader = SegmentReader(objects)
        self._catalog = catalog
        self._groups: ByteLimitedCache[RowGroup] = ByteLimitedCache(cache_bytes)
        self._footers: ByteLimitedCache[Footer] = ByteLimitedCache(max(cache_bytes // 4, 1 << 20))
        self._loading: dict[Hashable, asyncio.Task[RowGroup]] = {}
        self._threads = ThreadPoolExecutor(READING_THREADS, thread_name_prefix="millstream-cold")
        self._giving_back: asyncio.TimerHandle | None = None

    @property
    def cached_bytes(self) -> int:
        return self._groups.bytes + self._footers.bytes

    def cache_counts(self) -> dict[str, dict[str, int]]:
        return {"row_groups": self._groups.counts(), "footers": self._footers.counts()}

    def close(self) -> None:
        if self._giving_back is not None:
            self._giving_back.cancel()
        for task in self._loading.values():
            task.cancel()
        self._threads.shutdown(cancel_futures=True)

    def memory_was_used(self) -> None:
        """Arrow's allocator keeps what was freed until somebody asks; soon after every burst of work we do."""
        if self._giving_back is None:
            self._giving_back = asyncio.get_running_loop().call_later(GIVE_BACK_SECONDS, self._give_back)

    def _give_back(self) -> None:
        self._giving_back = None
        self._threads.submit(arrow.default_memory_pool().release_unused)

    # -- reading -------------------------------------------------------------------------------------------

    async def read(
        self,
        incarnation: Incarnation,
        offset: Offset,
        limit: Offset,
        bytes_max: int,
        *,
        at_least_one: bool,
        separator: bytes | None,
    ) -> Run:
        """Messages beyond an offset, from one extent; with a separator, which may be empty, joined into one piece."""
        extent = self.extent_at(incarnation, offset)
        was_expected = self._is_expected(extent)
        rows = ExtentRows(extent, await self.row_group(extent.row.segment, extent.row.row_group))
        group = rows.group
        first, stop = select(
            group.ends, rows.extent.offset_start, rows.first, rows.stop, offset, limit, bytes_max, at_least_one
        )
        start = Offset(group.ends[first - 1]) if first > rows.first else rows.extent.offset_start
        if stop == first:
            return Run(start, start, [])
        end = Offset(group.ends[stop - 1])
        if stop == rows.stop and end < limit:
            # Whoever comes to what was read ahead reads on and on; anybody else may have wanted just this.
            self._read_ahead(incarnation, end, GROUPS_AHEAD if was_expected else 1)
        if separator is None:
            return Run(start, end, group.messages(first, stop))
        return Run(start, end, [group.joined(first, stop, separator)])

    def holds(self, incarnation: Incarnation, offset: Offset) -> bool:
        """Whether there is anything beyond an offset."""
        return self._catalog.extent_at(incarnation, offset) is not None

    def extent_at(self, incarnation: Incarnation, offset: Offset) -> FoundExtent:
        extent = self._catalog.extent_at(incarnation, offset)
        if extent is None:
            raise Corrupt(f"incarnation {incarnation} lacks its messages from offset {offset}")
        return extent

    def last_at_ms(self, extent: FoundExtent) -> Milliseconds:
        """When the last message of an extent's segment was appended."""
        return self._segment(extent.row.segment).last_at_ms

    async def messages(self, extent: FoundExtent, offset: Offset, bound: Offset) -> list[bytes]:
        """The messages of an extent that lie beyond an offset and end by a bound."""
        rows = ExtentRows(extent, await self.row_group(extent.row.segment, extent.row.row_group))
        first = bisect_right(rows.group.ends, offset, rows.first, rows.stop)
        return rows.group.messages(first, bisect_right(rows.group.ends, bound, first, rows.stop))

    async def rows_at(self, incarnation: Incarnation, offset: Offset, *, with_order: bool = False) -> ExtentRows:
        extent = self.extent_at(incarnation, offset)
        group = await self.row_group(extent.row.segment, extent.row.row_group, with_order=with_order)
        return ExtentRows(extent, group)

    def _is_expected(self, extent: FoundExtent) -> bool:
        """Whether an extent's row group is in the cache, where it then stays for a while, or on its way there."""
        key = (self._segment(extent.row.segment).path, extent.row.row_group, False)
        return self._groups.keep(key) or key in self._loading

    def _read_ahead(self, incarnation: Incarnation, offset: Offset, groups: int) -> None:
        """Load the row groups that follow, before anybody asks for them."""
        for _ in range(groups):
            extent = self._catalog.extent_at(incarnation, offset)
            if extent is None:
                return
            if not self._is_expected(extent):
                self._load(extent.row.segment, extent.row.row_group, False)
            offset = extent.row.offset_end

    def _segment(self, number: int) -> SegmentRef:
        segment = self._catalog.segment(number)
        if segment is None:
            raise Corrupt(f"the catalog refers to segment {number}, which it does not have")
        return segment

    async def row_group(self, number: int, group: int, *, with_order: bool = False) -> RowGroup:
        """A row group; `with_order` has positions and times too, which a plain read has no use for."""
        found = self._groups.get((self._segment(number).path, group, with_order))
        return found if found is not None else await asyncio.shield(self._load(number, group, with_order))

    def _load(self, number: int, group: int, with_order: bool) -> asyncio.Task[RowGroup]:
        segment = self._segment(number)
        key = (segment.path, group, with_order)
        task = self._loading.get(key)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._fetch(segment, group, with_order))
            self._loading[key] = task
            task.add_done_callback(lambda finished: self._loaded(key, finished))
        return task

    def _loaded(self, key: Hashable, task: asyncio.Task[RowGroup]) -> None:
        self._loading.pop(key, None)
        self.memory_was_used()
        if not task.cancelled() and task.exception() is None:
            self._groups.put(key, task.result(), task.result().size)

    async def _fetch(self, segment: SegmentRef, group: int, with_order: bool) -> RowGroup:
        columns = [*BYTES_COLUMNS, *ORDER_COLUMNS] if with_order else BYTES_COLUMNS
        with self.objects.damage.noticed(segment.path):
            metadata = (await self.footer(segment)).metadata
            return RowGroup(await self.in_thread(self.read_columns, segment, metadata, group, columns))

    def read_columns(
        self, segment: SegmentRef, metadata: parquet.FileMetaData, group: int, columns: list[str]
    ) -> arrow.Table:
        """Some columns of a row group, for a thread: it waits for the store."""
        return self._reader.row_group(segment, metadata, group, columns)

    async def in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)

    async def footer(self, segment: SegmentRef) -> Footer:
        path = segment.path
        found = self._footers.get(path)
        if found is not None:
            return found
        footer = await self.in_thread(self._reader.footer, segment)
        self._footers.put(path, footer, segment.footer_bytes * FOOTER_COST)
        return footer
