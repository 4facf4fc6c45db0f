"""Writes: what rows become, and that every one of them is there once whatever is repeated, retried or replayed."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import msgspec
import pyarrow as arrow
import pyarrow.compute as compute
import pytest
from pyspark.errors import PySparkException
from pyspark.sql.pandas.types import from_arrow_schema

from millstream.spark.appends import Group, Sender, Totals, groups_of
from millstream.spark.errors import SourceError
from millstream.spark.ledger import Ledger
from millstream.spark.options import write_options
from millstream.spark.source_client import SourceClient
from millstream.spark.spool import Spool
from support.server import ServerProcess
from support.spark_source import JSON, TEXT, Streams, read

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def written(table: arrow.Table, options: dict[str, str], epoch: int = 0, producer: str = "spark:test:0") -> Totals:
    """What a task does with its rows."""
    parsed = write_options(options)
    totals = Totals()
    server = SourceClient(parsed.connection)
    sender = Sender(server, parsed, producer, epoch, totals)
    try:
        for group in groups_of(table, from_arrow_schema(table.schema), parsed):
            sender.send(group)
    finally:
        server.close()
    return totals


def table_of(rows: int, streams: int = 3) -> arrow.Table:
    return arrow.table(
        {
            "stream": [f"out-{number % streams}" for number in range(rows)],
            "payload": [json.dumps({"n": number}).encode() for number in range(rows)],
        }
    )


def shuffled(table: arrow.Table, seed: int) -> arrow.Table:
    order = list(range(table.num_rows))
    random.Random(seed).shuffle(order)
    return table.take(order)


def numbers(streams: Streams, count: int = 3) -> dict[str, list[int]]:
    return {f"out-{number}": [message["n"] for message in streams.messages(f"out-{number}")] for number in range(count)}


def test_rows_keep_their_order_and_many_make_one_append(streams: Streams) -> None:
    totals = written(table_of(30), streams.options())
    assert (totals.messages, totals.appends, totals.repeated) == (30, 3, 0)
    assert numbers(streams) == {f"out-{one}": list(range(one, 30, 3)) for one in range(3)}


def test_repeated_task_with_its_rows_in_another_order_writes_nothing_twice(streams: Streams) -> None:
    table = table_of(300)
    written(table, streams.options())
    totals = written(shuffled(table, 1), streams.options())
    assert totals.repeated == totals.appends == 3
    assert numbers(streams) == {f"out-{one}": list(range(one, 300, 3)) for one in range(3)}


def test_half_written_task_is_completed_in_another_order(streams: Streams) -> None:
    """The trap: the first attempt died behind its first stream; the second sees other rows first."""
    table = table_of(300)
    options = write_options(streams.options())
    server = SourceClient(options.connection)
    sender = Sender(server, options, "spark:test:0", 0, Totals())
    first = next(groups_of(table, from_arrow_schema(table.schema), options))
    sender.send(first)
    server.close()
    totals = written(shuffled(table, 2), streams.options())
    assert totals.repeated == 1
    assert {name: sorted(found) for name, found in numbers(streams).items()} == {
        f"out-{one}": list(range(one, 300, 3)) for one in range(3)
    }


def test_zombie_of_an_earlier_micro_batch_is_fenced(streams: Streams) -> None:
    written(table_of(3), streams.options(), epoch=7)
    with pytest.raises(SourceError, match=r"takes no messages of this write: .*stale.*txnAppId"):
        written(table_of(6), streams.options(), epoch=6)
    assert numbers(streams) == {"out-0": [0], "out-1": [1], "out-2": [2]}


@pytest.mark.parametrize("order", ["n", "arrival"])
def test_more_than_an_append_holds_is_exact_with_an_order(streams: Streams, order: str) -> None:
    table = table_of(200, streams=1).append_column("n", arrow.array(range(200)))
    options = streams.options(maxAppendBytes="100", orderBy=order)
    parsed = write_options(options)
    server = SourceClient(parsed.connection)
    sender = Sender(server, parsed, "spark:test:0", 0, Totals())
    appends = list(sender._appends(next(groups_of(table, from_arrow_schema(table.schema), parsed))))
    assert len(appends) > 10 and all(len(body) <= 100 for body, _ in appends)
    # The first attempt stops in the middle.
    group = next(groups_of(table, from_arrow_schema(table.schema), parsed))
    for seq, (body, _) in enumerate(appends[:7]):
        sender._append(group, body, seq)
    server.close()
    totals = written(shuffled(table, 3) if order == "n" else table, options)
    assert totals.repeated == 7
    assert numbers(streams, 1) == {"out-0": list(range(200))}


def test_half_written_rows_without_an_order_are_an_error_and_never_guessed(streams: Streams) -> None:
    table = table_of(200, streams=1)
    options = streams.options(maxAppendBytes="100")
    parsed = write_options(options)
    group = next(groups_of(table, from_arrow_schema(table.schema), parsed))
    server = SourceClient(parsed.connection)
    sender = Sender(server, parsed, "spark:test:0", 0, Totals())
    body, _ = next(sender._appends(group))
    sender._append(group, body, 0)
    server.close()
    before = streams.messages("out-0")
    with pytest.raises(SourceError, match=r"stream '.*/out-0' gets 200 messages .* option orderBy="):
        written(shuffled(table, 4), options)
    assert streams.messages("out-0") == before
    # A first attempt is no problem: nobody was there before it.
    written(table, options, epoch=1)
    assert [message["n"] for message in streams.messages("out-0")][len(before) :] == list(range(200))


def test_streams_of_bytes_get_a_message_a_row(streams: Streams) -> None:
    table = arrow.table({"stream": ["log"] * 3, "payload": [b"a\x00", b"b", b"c\xff"]})
    options = streams.options(contentType="application/octet-stream", orderBy="arrival")
    assert written(table, options).appends == 3
    assert written(table, options).repeated == 3
    rows = sorted(read(streams.options(stream="log")), key=lambda row: int(row["offset_start"]))
    assert [row["payload"] for row in rows] == [b"a\x00", b"b", b"c\xff"]


def test_refusals_name_the_stream_and_the_remedy(streams: Streams) -> None:
    streams.create("out-0", TEXT)
    with pytest.raises(SourceError, match=r"stream '.*/out-0' takes no messages.*option 'contentType'"):
        written(table_of(1), streams.options())
    with pytest.raises(SourceError, match=r"out-1' .*does not exist.*createStreams=true"):
        written(table_of(2).slice(1), streams.options(createStreams="false"))
    bad = arrow.table({"stream": ["out-2"], "payload": [b"{not json"]})
    with pytest.raises(SourceError, match=r"out-2' is not one JSON value"):
        written(bad, streams.options())
    streams.append("done", {"n": 1})
    streams.client.post(f"/{streams.bucket}/done", headers={**JSON, "stream-closed": "true"})
    with pytest.raises(SourceError, match=r"done' takes no messages of this write: it is closed"):
        written(arrow.table({"stream": ["done"], "payload": [b"1"]}), streams.options())
    with pytest.raises(SourceError, match="column 'stream' is null in some rows"):
        written(arrow.table({"stream": ["a", None], "payload": [b"1", b"2"]}), streams.options())


def test_spool_holds_in_a_file_what_memory_does_not(tmp_path: Path) -> None:
    batches = [arrow.record_batch({"n": list(range(at, at + 100))}) for at in range(0, 1000, 100)]
    with Spool(memory_bytes=2000) as spool:
        for batch in batches:
            spool.add(batch)
        table = spool.table()
        assert table is not None and table.column("n").to_pylist() == list(range(1000))
        path = spool._path
        assert path is not None and path.exists()
        del table
    assert not path.exists()
    with Spool() as spool:
        assert spool.table() is None


def test_groups_come_in_one_order_whatever_the_rows_come_in() -> None:
    options = write_options({"url": "http://x", "bucket": "b", "orderBy": "n"})
    table = table_of(50).append_column("n", arrow.array(range(50)))
    schema = from_arrow_schema(table.schema)

    def of(rows: arrow.Table) -> list[Group]:
        return list(groups_of(rows, schema, options))

    assert of(shuffled(table, 5)) == of(shuffled(table, 6)) == of(table)


# -- with Spark ------------------------------------------------------------------------------------------------------


def write(frame: DataFrame, streams: Streams, **more: str) -> None:
    frame.write.format("millstream").options(**streams.options(**more)).mode("append").save()


def test_columns_become_json_as_spark_would_write_it(spark: SparkSession, streams: Streams) -> None:
    moment = datetime(2026, 1, 31, 12, 0, 0, 250_000, tzinfo=UTC)
    rows = [("out", 1, Decimal("1.50"), moment, None, {"k": 1}, [1, 2], bytearray(b"hi"), (True, None))]
    schema = (
        "stream STRING, n INT, price DECIMAL(10,2), at TIMESTAMP, gone STRING, labels MAP<STRING, INT>,"
        " tags ARRAY<INT>, raw BINARY, inner STRUCT<yes: BOOLEAN, no: INT>"
    )
    write(spark.createDataFrame(rows, schema), streams)
    assert streams.messages("out") == [
        {
            "n": 1,
            "price": 1.5,
            "at": "2026-01-31T12:00:00.250000Z",
            "labels": {"k": 1},
            "tags": [1, 2],
            "raw": "aGk=",
            "inner": {"yes": True},
        }
    ]


def test_write_with_the_same_transaction_is_done_once(spark: SparkSession, streams: Streams) -> None:
    frame = spark.range(0, 200, 1, 3).selectExpr("concat('out-', id % 3) AS stream", "id AS n")
    once = {"txnAppId": "loader", "txnVersion": "4"}
    write(frame, streams, **once)
    write(frame, streams, **once)
    write(frame.repartition(5), streams, **once)
    found = {name: sorted(values) for name, values in numbers(streams).items()}
    assert found == {f"out-{one}": list(range(one, 200, 3)) for one in range(3)}
    with pytest.raises(PySparkException, match="higher txnVersion"):
        write(frame, streams, txnAppId="loader", txnVersion="3")
    write(frame, streams)
    assert sum(map(len, numbers(streams).values())) == 400


@pytest.fixture
def client(streams: Streams) -> Iterator[SourceClient]:
    opened = SourceClient(write_options(streams.options()).connection)
    yield opened
    opened.close()


def test_ledger_tells_committed_versions_and_adds_no_rows(streams: Streams, client: SourceClient) -> None:
    ledger, another = Ledger(client, streams.bucket, "loader"), Ledger(client, streams.bucket, "other")
    assert ledger.committed() is None and not ledger.is_committed(4)
    assert ledger.begin(4, "a1", may_resume=False)
    assert not ledger.is_committed(4), "begun is not committed"
    ledger.commit(4, "a1")
    assert ledger.is_committed(4) and not another.is_committed(4)
    with pytest.raises(SourceError, match=r"has committed 4\. Give a higher txnVersion"):
        ledger.is_committed(3)
    assert ledger.begin(3, "a2", may_resume=False) is False
    ledger.commit(3, "a2")
    assert ledger.committed() == 4, "a late commit of an earlier version takes nothing back"
    for version in range(5, 30):
        ledger.commit(version, "a3")
    assert ledger.committed() == 29 and ledger.is_committed(29) and ledger.is_committed(20)
    with pytest.raises(SourceError, match="has committed 29"):
        ledger.is_committed(6)
    listed = streams.client.get(f"/{streams.bucket}/streams").json()["streams"]
    assert len(listed) < 25, "versions of long ago are forgotten"
    assert client.feed(streams.bucket, 0, 0, "").table.filter(compute.field("event") == "message").num_rows == 0


def test_one_of_many_attempts_at_a_version_gets_it(streams: Streams, client: SourceClient) -> None:
    ledger = Ledger(client, streams.bucket, "loader")

    def attempt(number: int) -> bool:
        try:
            return ledger.begin(7, f"attempt{number}", may_resume=False)
        except SourceError as error:
            assert "begun by another run" in str(error)
            return False

    with ThreadPoolExecutor(8) as threads:
        outcomes = list(threads.map(attempt, range(24)))
    assert outcomes.count(True) == 1
    winner = f"attempt{outcomes.index(True)}"
    assert ledger.begin(7, winner, may_resume=False), "its other tasks go on"
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: ledger.commit(7, winner), range(4)))
    assert ledger.is_committed(7)
    assert ledger.begin(7, "late", may_resume=False) is False
    assert ledger.begin(7, "late", may_resume=True) is False


def test_ledger_that_was_overtaken_still_knows_the_later_version(streams: Streams, client: SourceClient) -> None:
    """Two drivers commit at once, and the older one writes the page last."""
    ledger = Ledger(client, streams.bucket, "loader")
    ledger.commit(5, "a")
    ledger.commit(6, "b")
    page = msgspec.json.encode({"txn_app_id": "loader", "txn_version": 5, "recent": [5]})
    client.publish_snapshot(ledger.key, page, "application/json")
    assert ledger.is_committed(6)
    assert ledger.begin(6, "c", may_resume=False) is False


def test_version_that_failed_halfway_is_not_written_in_other_partitions(spark: SparkSession, streams: Streams) -> None:
    once = {"txnAppId": "loader", "txnVersion": "4"}
    good = spark.range(0, 200, 1, 4).selectExpr("concat('out-', id % 3) AS stream", "id AS n")
    # One partition fails, behind whatever the others have written.
    bad = good.selectExpr("stream", "if(n = 199, raise_error('broken row'), n) AS n")
    with pytest.raises(PySparkException, match="broken row"):
        write(bad, streams, **once)
    before = {name: sorted(values) for name, values in numbers(streams).items()}
    assert sum(map(len, before.values())) == 150, "three of four partitions were written"
    with pytest.raises(PySparkException, match=r"version 4 of 'loader' was begun by another run .*txnResume=true"):
        write(good.repartition(5), streams, **once)
    assert {name: sorted(values) for name, values in numbers(streams).items()} == before
    write(good, streams, **once, txnResume="true")
    write(good.repartition(5), streams, **once)
    found = {name: sorted(values) for name, values in numbers(streams).items()}
    assert found == {f"out-{one}": list(range(one, 200, 3)) for one in range(3)}


@pytest.mark.parametrize("payload", ['{"a":1},{"b":2}', "1,2", "", "{", '{"a":1}]  [', "[" * 100_000])
def test_row_that_is_not_one_json_value_is_an_error_and_nothing_is_written(streams: Streams, payload: str) -> None:
    table = arrow.table({"stream": ["out-0"] * 2, "payload": ['{"n":0}', payload]})
    with pytest.raises(SourceError, match=r"a row for stream '.*/out-0' is not one JSON value"):
        written(table, streams.options())
    assert streams.client.head(f"/{streams.bucket}/out-0").status_code == 404


def test_array_in_a_row_is_one_message(streams: Streams) -> None:
    written(arrow.table({"stream": ["out-0"] * 2, "payload": ["[1,2]", " [] "]}), streams.options())
    assert streams.messages("out-0") == [[1, 2], []]


@pytest.fixture
def copied(spark: SparkSession, streams: Streams, tmp_path: Path) -> Any:
    """A query from a bucket's streams into copies of them, started as often as a test likes."""

    def run() -> Any:
        source = spark.readStream.format("millstream").options(
            **streams.options(prefix="in-", startingOffsets="earliest")
        )
        frame = source.load().selectExpr("replace(stream, 'in-', 'out-') AS stream", "payload")
        sink = frame.writeStream.format("millstream").options(**streams.options())
        sink = sink.option("checkpointLocation", str(tmp_path / "checkpoint"))
        query = sink.trigger(availableNow=True).start()
        assert query.awaitTermination(300)
        return query

    return run


def test_replayed_micro_batch_is_deduplicated(copied: Any, streams: Streams, tmp_path: Path) -> None:
    for number in range(30):
        streams.append(f"in-{number % 3}", {"n": number})
    copied()
    for number in range(30, 60):
        streams.append(f"in-{number % 3}", {"n": number})
    copied()
    # The driver died after the last micro-batch was written and before it was committed; its data was flushed since.
    commits = sorted(
        (path for path in (tmp_path / "checkpoint" / "commits").iterdir() if path.name.isdigit()),
        key=lambda path: int(path.name),
    )
    assert len(commits) == 2
    for path in commits[-1].parent.glob(f"*{commits[-1].name}*"):
        path.unlink()
    streams.flush()
    copied()
    assert numbers(streams) == {f"out-{one}": list(range(one, 60, 3)) for one in range(3)}


def test_bucket_may_be_a_column(spark: SparkSession, streams: Streams, source_server: ServerProcess) -> None:
    with Streams(source_server, f"{streams.bucket}-b") as other:
        rows = [(streams.bucket, "x", "1"), (other.bucket, "x", "2"), (other.bucket, "y", "3")]
        frame = spark.createDataFrame(rows, "bucket STRING, stream STRING, payload STRING").coalesce(1)
        frame.write.format("millstream").option("url", streams.url).mode("append").save()
        assert (streams.messages("x"), other.messages("x"), other.messages("y")) == ([1], [2], [3])
        lost = spark.createDataFrame([("nowhere-at-all", "x", "1")], "bucket STRING, stream STRING, payload STRING")
        with pytest.raises(PySparkException, match=r"'bucket' is 'nowhere-at-all', and .* has no such bucket"):
            lost.write.format("millstream").option("url", streams.url).mode("append").save()
        assert httpx.get(f"{streams.url}/nowhere-at-all").status_code == 404


# -- copies ----------------------------------------------------------------------------------------------------------


def copy_of(positions: list[int], streams: int = 1) -> arrow.Table:
    return arrow.table(
        {
            "stream": [f"out-{number % streams}" for number in positions],
            "payload": [json.dumps({"n": number}).encode() for number in positions],
            "position": arrow.array(positions, arrow.int64()),
            "offset_start": arrow.array(positions, arrow.int64()),
        }
    )


def test_copy_is_written_in_the_order_of_positions(streams: Streams) -> None:
    order = list(range(100))
    random.Random(5).shuffle(order)
    written(copy_of(order), streams.options(maxAppendBytes="100"))
    assert numbers(streams, 1) == {"out-0": list(range(100))}
    totals = written(copy_of(order[::-1]), streams.options(maxAppendBytes="100"))
    assert totals.repeated == totals.appends, "a repeated task is recognised, with its rows in any order"


def test_partition_that_comes_behind_later_messages_of_a_copy_is_refused(streams: Streams) -> None:
    written(copy_of(list(range(10, 20))), streams.options(), producer="spark:test:1")
    with pytest.raises(SourceError, match=r"out-0' takes no messages .* another partition wrote\. Let one partition"):
        written(copy_of(list(range(10))), streams.options(), producer="spark:test:0")
    assert numbers(streams, 1) == {"out-0": list(range(10, 20))}
    written(copy_of(list(range(20, 30))), streams.options(), producer="spark:test:2")
    written(copy_of(list(range(10))), streams.options(orderBy="none"), producer="spark:test:0")
    assert numbers(streams, 1) == {"out-0": [*range(10, 30), *range(10)]}


def test_copy_said_to_arrive_in_order_and_does_not_is_refused(streams: Streams) -> None:
    with pytest.raises(SourceError, match=r"not in the order of their positions \(3, 2\)"):
        written(copy_of([1, 3, 2]), streams.options(orderBy="arrival"))
    assert streams.client.head(f"/{streams.bucket}/out-0").status_code == 404
    written(copy_of([1, 2, 3]), streams.options(orderBy="arrival"))
    assert numbers(streams, 1) == {"out-0": [1, 2, 3]}


def test_batch_copy_by_several_partitions_is_in_order_or_refused(spark: SparkSession, streams: Streams) -> None:
    for number in range(400):
        streams.append(f"in-{number % 2}", {"n": number, "pad": "x" * 3000})
    streams.flush()
    source = spark.read.format("millstream").options(**streams.options(prefix="in-", minPartitions="4")).load()
    copy = source.selectExpr("replace(stream, 'in-', 'out-') AS stream", "payload", "position", "offset_start")
    with pytest.raises(PySparkException, match="another partition wrote"):
        # The last eighth of each stream first; there are fewer cores than partitions.
        write(copy.repartitionByRange(8, (-copy["position"]).alias("later")).sortWithinPartitions("position"), streams)
    clean = copy.selectExpr("replace(stream, 'out-', 'new-') AS stream", "payload", "position", "offset_start")
    write(clean.repartition("stream"), streams)
    assert [one["n"] for one in streams.messages("new-1")] == list(range(1, 400, 2))
