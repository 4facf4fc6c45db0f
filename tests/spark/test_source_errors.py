"""What a user hears who asked for something that cannot be: the option, its value, and what to do."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pyspark.errors import PySparkException

from millstream.spark.columns import message_schema, typed_schema
from millstream.spark.errors import SourceError
from millstream.spark.options import parse_bound, read_options, write_options
from millstream.spark.source import MillstreamSource
from support.spark_source import Streams, read, reader_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

REQUIRED = {"url": "http://127.0.0.1:4437", "bucket": "runs"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": ""}, "option 'url' is missing"),
        ({"url": "localhost:4437"}, "option 'url' is 'localhost:4437'. Write it as http://"),
        ({"bucket": ""}, "option 'bucket' is missing"),
        ({"stream": "a", "prefix": "b"}, r"'stream' \('a'\) and 'prefix' \('b'\) exclude each other"),
        ({"startingOffset": "latest"}, "no option 'startingoffset'. Did you mean 'startingOffsets'?"),
        ({"startingOffsets": "first"}, "'startingOffsets' is 'first'. It takes earliest, latest"),
        ({"startingOffsets": "{}"}, "'startingOffsets' is '{}'"),
        ({"startingOffsets": "latest", "startingTimestamp": "5"}, "exclude each other"),
        ({"maxRecordsPerTrigger": "0"}, "'maxRecordsPerTrigger' is '0'. It takes a whole number, 1 or more"),
        ({"maxBytesPerTrigger": "lots"}, "'maxBytesPerTrigger' is 'lots'. It takes a size"),
        ({"failOnDataLoss": "maybe"}, "'failOnDataLoss' is 'maybe'. It takes true or false"),
        ({"mode": "LENIENT"}, "'mode' is 'LENIENT'. It takes PERMISSIVE"),
        ({"cold": "ftp://x/y"}, "'cold' is 'ftp://x/y'. It takes a folder"),
        ({"serverTimeout": "soon"}, "'serverTimeout' is 'soon'"),
        ({"maxOffsetsPerTrigger": "5"}, "no option 'maxoffsetspertrigger'. Limit a .* 'maxRecordsPerTrigger'"),
        ({"subscribe": "runs"}, "no option 'subscribe'. Name what to read with 'bucket'"),
        ({"startingOffsets": "9", "endingOffsets": "8"}, "starts at position 9 and ends before 8"),
        ({"startingOffsets": "2026-02-01", "endingOffsets": "2026-01-31"}, "Swap them"),
        ({"startingTimestamp": "1769860800"}, "in milliseconds is in 1970. .*1769860800000 if these are seconds"),
        ({"startingTimestamp": "1769860800000000"}, "beyond the year 9999. .*1769860800000 if these are microseconds"),
        ({"somethingElse": "1"}, "no option 'somethingelse'. There are url, token"),
        ({"minPartitions": "0"}, "'minPartitions' is '0'. It takes a whole number, 1 or more"),
        ({"partitionBy": "bucket"}, "'partitionBy' is 'bucket'. It takes stream or position"),
    ],
)
def test_bad_read_option_names_value_and_remedy(options: dict[str, str], message: str) -> None:
    with pytest.raises(SourceError, match=message):
        read_options({**REQUIRED, **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"txnVersion": "3"}, "'txnAppId' is missing"),
        ({"txnAppId": "a"}, "'txnVersion' is missing"),
        ({"txnAppId": "a", "txnVersion": "-1"}, "'txnVersion' is '-1'"),
        ({"maxAppendBytes": "0"}, "'maxAppendBytes' is '0'"),
        ({"createStreams": "yes"}, "'createStreams' is 'yes'"),
    ],
)
def test_bad_write_option_names_value_and_remedy(options: dict[str, str], message: str) -> None:
    with pytest.raises(SourceError, match=message):
        write_options({**REQUIRED, **options})


def test_bounds_are_understood() -> None:
    assert parse_bound("EARLIEST").kind == "earliest"
    assert parse_bound("1042").positions == {0: 1042}
    assert parse_bound('{"0": 7, "3": 9}').positions == {0: 7, 3: 9}
    assert parse_bound("1970-01-01T00:00:01Z").at_ms == 1000
    assert parse_bound("1970-01-01T01:00:01+01:00").at_ms == 1000


def test_options_of_spark_are_left_alone() -> None:
    options = read_options({**REQUIRED, "path": "x", "checkpointLocation": "y"})
    assert options.bucket == "runs"


def test_wrong_url_is_refused_when_loading(spark: SparkSession) -> None:
    frame = spark.read.format("millstream").option("url", "http://127.0.0.1:9").option("bucket", "runs")
    with pytest.raises(PySparkException, match=r"no server answers at http://127.0.0.1:9 .*Check the option 'url'"):
        frame.load()


def test_unknown_bucket_is_refused_when_loading(spark: SparkSession, streams: Streams) -> None:
    frame = spark.read.format("millstream").options(**streams.options(bucket="nowhere"))
    with pytest.raises(PySparkException, match=r"'bucket' is 'nowhere', and .* has no such bucket\. Create it"):
        frame.load()


def test_what_is_no_millstream_server_is_said_to_be_none(streams: Streams) -> None:
    elsewhere = streams.options() | {"url": f"{streams.url}/v1/stream"}
    with pytest.raises(SourceError, match=r"option|no millstream server"):
        MillstreamSource(elsewhere).schema()


def test_missing_stream_is_refused_when_planning(streams: Streams) -> None:
    with pytest.raises(SourceError, match=r"option 'stream' is 'none', and bucket .* has no such stream"):
        reader_of(streams.options(stream="none")).partitions()


def test_unknown_column_is_refused_when_loading(streams: Streams) -> None:
    with pytest.raises(SourceError, match=r"'columns' names 'key', which is no column. There are bucket, stream"):
        MillstreamSource(streams.options(columns="stream,key")).schema()


def test_message_column_of_another_type_is_refused(spark: SparkSession, streams: Streams) -> None:
    schema = typed_schema("position STRING", ("stream",))
    with pytest.raises(SourceError, match="'position' as string, and the column of that name is bigint"):
        MillstreamSource(streams.options()).reader(schema)


def test_cold_tier_in_another_place_is_named(streams: Streams, tmp_path: Path) -> None:
    streams.append("run", {"n": 1})
    streams.flush()
    with pytest.raises(SourceError, match=r"segment .* is not in the cold tier at .*option 'cold'"):
        read(streams.options(cold=str(tmp_path)))
    folder = streams.cold()["store"]["path"]
    assert len(read(streams.options(cold=folder))) == 1


def test_overwriting_and_unfit_frames_are_refused_before_the_first_row(spark: SparkSession, streams: Streams) -> None:
    source = MillstreamSource(streams.options())
    with pytest.raises(SourceError, match=r'cannot be overwritten.*mode\("append"\)'):
        source.writer(message_schema(), overwrite=True)
    with pytest.raises(SourceError, match="no column 'stream', and the option 'stream' is missing"):
        source.writer(message_schema(("payload",)), overwrite=False)
    with pytest.raises(SourceError, match="nothing to write"):
        source.writer(message_schema(("stream",)), overwrite=False)
    with pytest.raises(SourceError, match="column 'payload' is of type int"):
        source.writer(typed_schema("payload INT", ("stream",)), overwrite=False)
    with pytest.raises(SourceError, match="'orderBy' names 'n', and the DataFrame has stream, payload"):
        MillstreamSource(streams.options(orderBy="n")).writer(message_schema(("stream", "payload")), overwrite=False)
    with pytest.raises(SourceError, match="'contentType' is 'json'"):
        MillstreamSource(streams.options(contentType="json")).writer(message_schema(), overwrite=False)
    with pytest.raises(SourceError, match="'bucket' is 'nowhere'"):
        MillstreamSource(streams.options(bucket="nowhere")).writer(message_schema(), overwrite=False)


def test_bounds_that_leave_nothing_to_read_are_refused(streams: Streams) -> None:
    for options, message in (
        ({"startingOffsets": "latest"}, "'startingOffsets' is 'latest': a batch read .* no rows"),
        ({"endingOffsets": "earliest"}, "'endingOffsets' is 'earliest': a batch read .* no rows"),
    ):
        with pytest.raises(SourceError, match=message):
            MillstreamSource(streams.options(**options)).reader(message_schema())
    with pytest.raises(SourceError, match="for batch reads; a streaming query does not end"):
        MillstreamSource(streams.options(endingOffsets="5")).streamReader(message_schema())


def test_create_table_says_at_once_that_it_does_not_work_and_a_view_does(spark: SparkSession, streams: Streams) -> None:
    streams.append("a", {"n": 1})
    options = f"OPTIONS (url '{streams.url}', bucket '{streams.bucket}')"
    with pytest.raises(PySparkException, match=r"Spark does not keep the options .*CREATE TEMPORARY VIEW"):
        spark.sql(f"CREATE TABLE messages USING millstream {options}")
    spark.sql(f"CREATE TEMPORARY VIEW messages_view USING millstream {options}")
    assert spark.sql("SELECT stream FROM messages_view").collect()[0]["stream"] == "a"
    spark.sql("DROP VIEW messages_view")


def test_server_that_never_answers_is_given_up_after_the_server_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        begun = time.monotonic()
        with pytest.raises(SourceError, match=f"no server answers at {url}"):
            reader_of({"url": url, "bucket": "runs", "serverTimeout": "1s"}).partitions()
        assert time.monotonic() - begun < 10
