"""`format("millstream")`: what Spark calls to read and write streams."""

from __future__ import annotations

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

from millstream.spark.batch import BatchReader, FilteringBatchReader
from millstream.spark.columns import layout_of, message_schema
from millstream.spark.options import check_batch_bounds, check_streaming_bounds, read_options, write_options
from millstream.spark.source_client import SourceClient
from millstream.spark.stream import StreamReader
from millstream.spark.writer import BatchWriter, StreamWriter, check_target


class MillstreamSource(DataSource):
    @classmethod
    def name(cls) -> str:
        return "millstream"

    def schema(self) -> StructType:
        options = read_options(self.options)
        schema = message_schema(options.columns)
        client = SourceClient(options.connection)
        try:
            client.check_bucket(options.bucket)
        finally:
            client.close()
        return schema

    def reader(self, schema: StructType) -> DataSourceReader:
        options = read_options(self.options)
        check_batch_bounds(options)
        layout_of(schema, options)
        return FilteringBatchReader(options, schema) if options.push_filters else BatchReader(options, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        options = read_options(self.options)
        check_streaming_bounds(options)
        layout_of(schema, options)
        return StreamReader(options, schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        options = write_options(self.options)
        check_target(options, schema, overwrite=overwrite)
        return BatchWriter(options, schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        options = write_options(self.options, is_streaming=True)
        check_target(options, schema, overwrite=overwrite)
        return StreamWriter(options, schema)
