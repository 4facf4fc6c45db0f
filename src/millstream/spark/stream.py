"""The streaming reader: positions as offsets, micro-batches between two of them.

An offset says for each shard the first position that was not read yet: `{"0": 1043}`. What a micro-batch reads and how
it is split depends on its two offsets alone, never on what was flushed meanwhile: where the split lies is decided
once, with the end offset, and written into it (`names` or `cuts`), so that a replayed micro-batch has the same
partitions with the same rows in the same order. Exactly-once sinks rest on that.

A large micro-batch is split by the streams' names, so that all messages of a stream are in one partition and whoever
writes them on keeps their order; or, where order does not matter, by position.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final, cast

import pyarrow as arrow
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from millstream.protocol.keys import StreamKey
from millstream.spark import planning
from millstream.spark.admission import Admission, cuts_of, name_cuts_of
from millstream.spark.cold_reader import ColdReader, store_settings
from millstream.spark.columns import layout_of
from millstream.spark.errors import SourceError
from millstream.spark.filters import NameRange, Span
from millstream.spark.options import BY_STREAM, LATEST, Bound, ReadOptions
from millstream.spark.pieces import FeedPiece, RowRules, batches_of, feed_tables, segment_tables
from millstream.spark.source_client import ColdListing, ShardListing, SourceClient
from millstream.spark.times import position_at
from millstream.spark.worker import exempt_modules_from_collection

logger = logging.getLogger("millstream.spark")

CUTS: Final = "cuts"
NAMES: Final = "names"
# A stream is read by one task, in whose memory its part of a micro-batch must fit.
BYTES_PER_TRIGGER: Final = 1 << 30

Offset = dict[str, Any]


@dataclass
class PositionRange(InputPartition):
    """The messages of one shard from position `start` up to, and without, `end`, of streams with these names."""

    shard: int
    start: int
    end: int
    names: NameRange = NameRange()


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema
        self._target: dict[int, int] | None = None
        self._admission = Admission(options)
        self._client: SourceClient | None = None
        self._known_state: str | None = None

    # -- offsets, on the driver --------------------------------------------------------------------------------

    def initialOffset(self) -> Offset:
        client = self._connected()
        client.check_bucket(self._options.bucket)
        cold = client.cold(self._options.bucket)
        bound = self._options.starting or LATEST
        return {str(shard.shard): self._start(client, cold, shard, bound) for shard in cold.shards}

    def _start(self, client: SourceClient, cold: ColdListing, shard: ShardListing, bound: Bound) -> int:
        if bound.kind == "earliest":
            return shard.earliest + 1
        if bound.kind == "positions":
            start = bound.positions.get(shard.shard, shard.earliest + 1)
            return self._kept(shard, start, "the option 'startingOffsets'")
        if bound.kind == "time":
            return position_at(self._options, client, cold, shard, bound.at_ms)
        return shard.latest + 1

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:
        client = self._connected()
        # Before the listing: what the stream has by now lies before the listing's latest position.
        state = self._stream_state(client)
        first = min((position for _, position in _positions(start)), default=0)
        cold = client.cold(self._options.bucket, first - 1)
        ends: dict[int, int] = {}
        cuts: dict[str, str] = {}
        names: dict[str, list[str]] = {}
        for shard in cold.shards:
            begin = start.get(str(shard.shard), shard.earliest + 1)
            begin = self._kept(shard, begin, "the checkpoint")
            end = shard.latest + 1
            if self._target is not None:
                end = max(min(end, self._target.get(shard.shard, end)), begin)
            if end > begin and (self._is_known(state) or not self._has_news(client, shard, begin)):
                end = begin
            if end > begin:
                end = self._admission.limit(client, cold, shard, begin, end, limit)
                if self._options.partition_by == BY_STREAM:
                    if found := self._name_cuts(cold, shard, begin, end):
                        names[str(shard.shard)] = found
                elif places := cuts_of(shard, begin, end, self._partition_bytes(shard, begin, end)):
                    cuts[str(shard.shard)] = ",".join(map(str, places))
            ends[shard.shard] = end
        if all(start.get(str(shard)) == end for shard, end in ends.items()):
            if self._target is None:
                self._known_state = state
                self._await_news(client, cold, ends)
            return start
        is_everything = all(ends[shard.shard] > shard.latest for shard in cold.shards)
        self._known_state = state if is_everything else None
        latest: Offset = {str(shard): end for shard, end in ends.items()}
        return latest | ({CUTS: cuts} if cuts else {}) | ({NAMES: names} if names else {})

    def _stream_state(self, client: SourceClient) -> str | None:
        """Of a query over one stream, what changes whenever the stream does."""
        if self._options.stream is None:
            return None
        return client.state_of(StreamKey(self._options.bucket, self._options.stream))

    def _is_known(self, state: str | None) -> bool:
        """Whether the one stream is as it was when everything of it was taken into a micro-batch."""
        return state is not None and state == self._known_state

    def _name_cuts(self, cold: ColdListing, shard: ShardListing, begin: int, end: int) -> list[str]:
        """Names that split what the segments have between two positions; the feed's share goes along with them."""
        options = self._options
        settings = store_settings(cold.store, options.cold)
        segments = [one for one in shard.refs() if one.last_position >= begin and one.first_position < end]
        partition_bytes = self._partition_bytes(shard, begin, end)
        if settings is None or sum(one.payload_bytes for one in segments) <= partition_bytes:
            return []
        selection = planning.selection_of(options)
        footers = ColdReader(settings).footers(segments)
        extents = [
            one for _, footer in footers for one in footer.of(options.bucket).extents if selection.has_extent(one)
        ]
        return name_cuts_of(extents, partition_bytes)

    def _partition_bytes(self, shard: ShardListing, begin: int, end: int) -> int:
        """How large a partition of a micro-batch may be, so that there are as many as `minPartitions` asks for."""
        segments = [one for one in shard.refs() if one.last_position >= begin and one.first_position < end]
        total = sum(one.payload_bytes for one in segments) + shard.unflushed_bytes
        return max(min(self._options.partition_bytes, -(-total // self._options.partitions_min)), 1)

    def _kept(self, shard: ShardListing, start: int, whose: str) -> int:
        """A position the server still has everything from; what is missing is an error, or a warning."""
        if shard.earliest < start <= shard.latest + 1:
            return start
        if start > shard.latest + 1:
            now = shard.latest + 1
            problem = (
                f"{whose} says that positions before {start} of shard {shard.shard} were read, and the server has none"
                f" from {now} on: it was restored to an earlier state, or is another server"
            )
        else:
            now = shard.earliest + 1
            problem = (
                f"{whose} starts at position {start} of shard {shard.shard}, and the server keeps bucket"
                f" {self._options.bucket!r} from position {now} on: what lies between was removed"
            )
        if self._options.fail_on_data_loss:
            raise SourceError(
                problem,
                hint=f"with the option failOnDataLoss=false the query goes on from {now}; or start it with a new"
                " checkpoint",
            )
        logger.warning("data loss: %s; going on from position %d, as failOnDataLoss=false says", problem, now)
        return now

    def _has_news(self, client: SourceClient, shard: ShardListing, begin: int) -> bool:
        """Whether the bucket has anything from a position on: the shard's positions move with other buckets too."""
        if any(segment.last_position >= begin for segment in shard.refs()):
            return True
        after = max(begin - 1, shard.flushed)
        page = client.feed(self._options.bucket, shard.shard, after, self._feed_prefix, bytes_max=1)
        return bool(page.table.num_rows)

    def _await_news(self, client: SourceClient, cold: ColdListing, ends: dict[int, int]) -> None:
        """Nothing to read: wait a little for something, so that Spark does not ask seventy times a second."""
        if len(cold.shards) == 1:
            shard = cold.shards[0]
            after = max(ends[shard.shard] - 1, shard.flushed)
            client.await_news(self._options.bucket, shard.shard, after, self._feed_prefix)
        else:
            client.pause()

    @property
    def _feed_prefix(self) -> str:
        return self._options.stream or self._options.prefix

    def getDefaultReadLimit(self) -> ReadLimit:
        if self._options.records_per_trigger is not None:
            return ReadMaxRows(self._options.records_per_trigger)
        if self._options.bytes_per_trigger is not None:
            return ReadMaxBytes(self._options.bytes_per_trigger)
        if self._options.partition_by == BY_STREAM:
            return ReadMaxBytes(BYTES_PER_TRIGGER)
        return ReadAllAvailable()

    def reportLatestOffset(self) -> Offset | None:
        cold = self._connected().cold(self._options.bucket, 2**52)
        return {str(shard.shard): shard.latest + 1 for shard in cold.shards}

    def prepareForTriggerAvailableNow(self) -> None:
        cold = self._connected().cold(self._options.bucket, 2**52)
        self._target = {shard.shard: shard.latest + 1 for shard in cold.shards}

    def partitions(self, start: Offset, end: Offset) -> list[InputPartition]:
        ranges: list[InputPartition] = []
        for shard, position in _positions(end):
            begin = start.get(str(shard), position)
            places = [int(one) for one in end.get(CUTS, {}).get(str(shard), "").split(",") if one]
            edges = [begin, *(one for one in places if begin < one < position), position]
            names = ["", *end.get(NAMES, {}).get(str(shard), []), None]
            ranges += [
                PositionRange(shard, low, high, NameRange(first or "", last))
                for low, high in pairwise(edges)
                if low < high
                for first, last in pairwise(names)
            ]
        return ranges

    def stop(self) -> None:
        if self._client is not None:
            self._client.close()

    def _connected(self) -> SourceClient:
        if self._client is None:
            self._client = SourceClient(self._options.connection)
        return self._client

    # -- rows, on an executor ----------------------------------------------------------------------------------

    def read(self, partition: InputPartition) -> Iterator[arrow.RecordBatch]:
        exempt_modules_from_collection()
        part = cast("PositionRange", partition)
        options = self._options
        layout = layout_of(self._schema, options)
        tables = [
            table.select(sorted(layout.stored | {"position"}))
            for table in self._tables(part, layout.stored | {"position"})
        ]
        if tables:
            whole = arrow.concat_tables(tables)
            yield from batches_of(whole.sort_by("position"), layout, options)

    def _tables(self, part: PositionRange, columns: set[str]) -> Iterator[arrow.Table]:
        """What lies between two positions, wherever it lies by now."""
        options = self._options
        selection = planning.selection_of(options)
        client = SourceClient(options.connection)
        try:
            cold = client.cold(options.bucket, part.start - 1)
            shard = next(one for one in cold.shards if one.shard == part.shard)
            selection = replace(planning.positioned(selection, Span(part.start, part.end - 1)), names=part.names)
            rules = RowRules(options.bucket, selection, ())
            settings = store_settings(cold.store, options.cold)
            flushed = shard.earliest if settings is None else shard.flushed
            if settings is not None and part.start <= shard.flushed:
                reader = ColdReader(settings)
                pieces = planning.segment_pieces(reader, client, shard, selection, options)
                missed: list[int] = []
                yield from segment_tables(options.connection, reader, pieces, columns, rules, missed.append)
                if missed:
                    logger.warning(
                        "bucket %r, positions %d to %d: %d messages were deleted, trimmed or expired before this"
                        " query came to them",
                        options.bucket,
                        part.start,
                        part.end - 1,
                        sum(missed),
                    )
        finally:
            client.close()
        if part.end - 1 > flushed:
            feed = FeedPiece(part.shard, max(part.start, flushed + 1), part.end)
            yield from feed_tables(options.connection, [feed], rules)


def _positions(offset: Offset) -> list[tuple[int, int]]:
    return sorted((int(shard), position) for shard, position in offset.items() if shard not in (CUTS, NAMES))
