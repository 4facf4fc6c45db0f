"""The batch reader: a bucket, a prefix or one stream as it is when the read is planned."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import cast

import pyarrow as arrow
from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition
from pyspark.sql.types import StructType

from millstream.protocol.content_types import is_json
from millstream.protocol.keys import StreamKey
from millstream.spark import planning
from millstream.spark.cold_reader import ColdReader
from millstream.spark.columns import layout_of
from millstream.spark.errors import SegmentMissing, SourceError
from millstream.spark.filters import Selection, excludes_bucket, is_supported, narrow
from millstream.spark.options import ReadOptions
from millstream.spark.pieces import Partition, RowRules, batches_of, feed_tables, segment_tables
from millstream.spark.source_client import ColdListing, SourceClient
from millstream.spark.worker import exempt_modules_from_collection


class BatchReader(DataSourceReader):
    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema
        self._filters: list[Filter] = []

    def partitions(self) -> list[InputPartition]:
        exempt_modules_from_collection()
        options = self._options
        client = SourceClient(options.connection)
        try:
            client.check_bucket(options.bucket)
            check_stream(client, options, has_fields=bool(layout_of(self._schema, options).typed.fields))
            selection = narrow(planning.selection_of(options), self._filters)
            partitions = [] if excludes_bucket(self._filters, options.bucket) else self._planned(client, selection)
            # Without a partition Spark would call `read` with none; an empty one reads nothing.
            return list(partitions) or [Partition(None, selection)]
        finally:
            client.close()

    def _planned(self, client: SourceClient, selection: Selection) -> list[Partition]:
        options = self._options
        before: ColdListing | None = None
        while True:
            cold = client.cold(options.bucket)
            try:
                partitions: list[Partition] = []
                for shard in cold.shards:
                    bounded = planning.within(selection, shard, options.starting, options.ending)
                    partitions += planning.plan(options, client, cold, bounded, shard)
                return partitions
            except SegmentMissing:
                # Unless what the server lists has changed, a segment is missing that it takes to be there.
                if before is not None and before.segments() == cold.segments():
                    raise
                before = cold

    def read(self, partition: InputPartition) -> Iterator[arrow.RecordBatch]:
        exempt_modules_from_collection()
        part, options = cast("Partition", partition), self._options
        layout = layout_of(self._schema, options)
        rules = RowRules(options.bucket, part.selection, tuple(self._filters))
        if part.segments:
            assert part.cold is not None
            reader = ColdReader(part.cold)
            for table in segment_tables(options.connection, reader, part.segments, layout.stored, rules):
                yield from batches_of(table, layout, options)
        for table in feed_tables(options.connection, part.feed, rules):
            yield from batches_of(table, layout, options)


class FilteringBatchReader(BatchReader):
    """The same with filters pushed down. Spark refuses this class where its setting for that is off.

    Only for those who ask: Spark 4.3.0 keeps the last plan that a filter led to for all that is derived from one
    `load()`, so that without the filter, or with another one in the same query, too few rows would come.
    """

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        for one in filters:
            if is_supported(one):
                self._filters.append(one)
            else:
                yield one


def check_stream(client: SourceClient, options: ReadOptions, *, has_fields: bool) -> None:
    """A single stream must exist, and hold JSON if typed columns are asked for."""
    if options.stream is None:
        return
    content_type = client.content_type(StreamKey(options.bucket, options.stream))
    if content_type is None:
        raise SourceError(
            f"the option 'stream' is {options.stream!r}, and bucket {options.bucket!r} has no such stream",
            hint="correct the name, or read several with the option 'prefix'",
        )
    if has_fields and not is_json(content_type):
        raise SourceError(
            f"the stream {options.stream!r} is of type {content_type!r}, and the schema asks for fields of JSON",
            hint="read it without a schema and take the column 'payload'",
        )
