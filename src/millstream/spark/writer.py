"""The writers: rows become messages of streams, exactly once.

A task's rows are one producer's: its id is made of the sink and the partition, its epoch is the micro-batch, and on
each stream its sequence counts the appends of this task. So a replayed task repeats what the server already has, and a
zombie of an earlier micro-batch is fenced.

After a shuffle a retried task gets its rows in another order, so the appends of two attempts must not depend on that
order. All rows of a stream therefore go out as one append, which is there as a whole or not at all. What does not fit
into one append needs an order: the option `orderBy`. Without it the first attempt goes ahead, and one that finds the
work of another half done stops with an error, rather than guess which rows are missing.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final, TypeVar

import pyarrow as arrow
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import BinaryType, StringType, StructType

from millstream.clock import SystemClock
from millstream.protocol.content_types import checked_content_type
from millstream.protocol.keys import StreamKey
from millstream.protocol.producers import PRODUCER_ID_BYTES_MAX
from millstream.spark.appends import Group, Sender, Totals, groups_of
from millstream.spark.errors import SourceError
from millstream.spark.ledger import Ledger, ledger_of
from millstream.spark.options import ARRIVAL, UNORDERED, WriteOptions
from millstream.spark.source_client import SourceClient
from millstream.spark.spool import Spool
from millstream.spark.worker import exempt_modules_from_collection

T = TypeVar("T")

SENDERS: Final = 8
GROUPS_WAITING: Final = 64

# What Spark tells its tasks of the query they run for.
_QUERY_ID: Final = "sql.streaming.queryId"
_BATCH_ID: Final = "streaming.sql.batchId"


@dataclass
class Written(WriterCommitMessage):
    """What one task wrote."""

    messages: int
    appends: int
    repeated: int


def check_target(options: WriteOptions, schema: StructType, *, overwrite: bool) -> None:
    """Everything about a write that can be wrong before the first row."""
    if overwrite:
        raise SourceError("streams only grow: they cannot be overwritten", hint='write with mode("append")')
    checked_type(options.content_type)
    names = set(schema.fieldNames())
    _check_column(schema, "stream", (StringType,), "STRING", is_needed=options.stream is None)
    _check_column(schema, "bucket", (StringType,), "STRING", is_needed=options.bucket is None)
    _check_column(schema, "payload", (BinaryType, StringType), "BINARY or STRING", is_needed=False)
    if "payload" not in names and not names - {"stream", "bucket", "content_type"}:
        raise SourceError(
            "the DataFrame has nothing to write",
            hint="it needs a column 'payload', or other columns, which are written as one JSON object",
        )
    for name in options.order_columns:
        if name not in names:
            raise SourceError(
                f"the option 'orderBy' names {name!r}, and the DataFrame has {', '.join(schema.fieldNames())}",
                hint=f"name some of these columns, or {ARRIVAL!r} or {UNORDERED!r}",
            )
    if options.bucket is not None:
        client = SourceClient(options.connection)
        try:
            client.check_bucket(options.bucket)
            if options.stream is not None:
                client.check_writing(StreamKey(options.bucket, options.stream))
        finally:
            client.close()


def checked_type(content_type: str) -> None:
    from millstream.errors import InvalidRequest

    try:
        checked_content_type(content_type)
    except InvalidRequest as error:
        raise SourceError(f"the option 'contentType' is {content_type!r}", hint=error.hint) from None


def _check_column(schema: StructType, name: str, kinds: tuple[type, ...], expects: str, *, is_needed: bool) -> None:
    if name not in schema.fieldNames():
        if is_needed:
            raise SourceError(
                f"the DataFrame has no column {name!r}, and the option {name!r} is missing", hint="give one of them"
            )
        return
    kind = schema[name].dataType
    if not isinstance(kind, kinds):
        raise SourceError(
            f"the column {name!r} is of type {kind.simpleString()}", hint=f"cast it: it must be {expects}"
        )


class _Writer:
    """What both writers do with the rows of a task."""

    def __init__(self, options: WriteOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema

    def _write(self, batches: Iterable[arrow.RecordBatch], sink: str, epoch: int) -> Written:
        exempt_modules_from_collection()
        context = TaskContext.get()
        assert context is not None, "Spark runs writers in tasks"
        producer = producer_id(sink, context.partitionId())
        with Spool() as spool:
            for batch in batches:
                spool.add(batch)
            table = spool.table()
            if table is None or not self._may_write():
                return Written(0, 0, 0)
            return _send_all(groups_of(table, self._schema, self._options), self._options, producer, epoch)

    def _may_write(self) -> bool:
        """Asked by each task that has rows, before its first append."""
        return True


def producer_id(sink: str, partition: int) -> str:
    name = f"spark:{sink}:{partition}"
    if len(name.encode()) > PRODUCER_ID_BYTES_MAX:
        raise SourceError(
            f"the option 'txnAppId' is {len(sink)} characters long", hint=f"{PRODUCER_ID_BYTES_MAX - 20} are possible"
        )
    return name


def _send_all(groups: Iterator[Group], options: WriteOptions, producer: str, epoch: int) -> Written:
    """Send the groups over several connections; a stream's appends go over one, in order."""
    waiting: queue.Queue[Group | None] = queue.Queue(GROUPS_WAITING)
    totals = Totals()
    failures: list[BaseException] = []
    has_failed = threading.Event()
    client = SourceClient(options.connection)

    def work() -> None:
        sender = Sender(client, options, producer, epoch, totals)
        try:
            while (group := waiting.get()) is not None:
                if not has_failed.is_set():
                    sender.send(group)
        except BaseException as error:
            failures.append(error)
            has_failed.set()
            while waiting.get() is not None:
                pass

    threads = [threading.Thread(target=work, name=f"millstream-append-{number}") for number in range(SENDERS)]
    for thread in threads:
        thread.start()
    try:
        for group in groups:
            if has_failed.is_set():
                break
            waiting.put(group)
    finally:
        for _ in threads:
            waiting.put(None)
        for thread in threads:
            thread.join()
        client.close()
    if failures:
        raise failures[0]
    return Written(totals.messages, totals.appends, totals.repeated)


class BatchWriter(_Writer, DataSourceArrowWriter):
    """`df.write`: one epoch. Tasks of one run share its producers; another run of it is another job, unless `txnAppId`
    and `txnVersion` say that it is the same. The ledger says which run may write a version."""

    def __init__(self, options: WriteOptions, schema: StructType) -> None:
        super().__init__(options, schema)
        self._attempt = SystemClock().random_bytes(8).hex()
        self._sink = options.transaction_app_id or f"job-{self._attempt}"
        self._epoch = options.transaction_version or 0
        self._is_committed = self._with_ledger(self._check, default=False)

    def write(self, iterator: Iterator[arrow.RecordBatch]) -> Written:
        if self._is_committed:
            return Written(0, 0, 0)
        return self._write(iterator, self._sink, self._epoch)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """All tasks are done: from now on, a run with other partitions writes nothing either."""
        if not self._is_committed:
            self._with_ledger(lambda ledger: ledger.commit(self._epoch, self._attempt), default=None)

    def _check(self, ledger: Ledger) -> bool:
        """Whether the version is committed; refused here, before Spark starts, if another run has begun it."""
        if ledger.is_committed(self._epoch):
            return True
        ledger.check_begun(self._epoch, self._attempt, may_resume=self._options.may_resume)
        return False

    def _may_write(self) -> bool:
        may_resume = self._options.may_resume
        return self._with_ledger(
            lambda ledger: ledger.begin(self._epoch, self._attempt, may_resume=may_resume), default=True
        )

    def _with_ledger(self, ask: Callable[[Ledger], T], default: T) -> T:
        """What the ledger says; the default for a write that is no transaction."""
        client = SourceClient(self._options.connection)
        try:
            ledger = ledger_of(client, self._options)
            return default if ledger is None else ask(ledger)
        finally:
            client.close()


class StreamWriter(_Writer, DataSourceStreamArrowWriter):
    """`df.writeStream`: an epoch for every micro-batch, a sink for every checkpoint."""

    def write(self, iterator: Iterator[arrow.RecordBatch]) -> Written:
        context = TaskContext.get()
        assert context is not None, "Spark runs writers in tasks"
        query, batch = context.getLocalProperty(_QUERY_ID), context.getLocalProperty(_BATCH_ID)
        if query is None or batch is None:
            raise SourceError(
                "Spark does not say which query and micro-batch this is, so exactly-once cannot be kept",
                hint="write from foreachBatch with the options txnAppId and txnVersion",
            )
        return self._write(iterator, self._options.transaction_app_id or query, int(batch))
