"""materialize: fold each stream into its current state, and publish that as the stream's snapshot at that offset.

Publishing at N makes N the earliest offset: who joins reads one small object, and what came before can be reclaimed.
A stream that has a snapshot is folded on from there; one without anything new is left alone, so a second run does
nothing. A snapshot is published under the offset it stands for, so a task that is run twice publishes the same again.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyarrow as arrow

from millstream.client import Client, Conflict, Gone, NotFound
from millstream.clock import monotonic_seconds
from millstream.pipeline import folds
from millstream.pipeline.tasks import run_edges
from millstream.protocol.offsets import format_offset
from millstream.spark.options import Connection

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# A snapshot waits for the disk of the server, where those that wait together share most of it.
PUBLISHERS: Final = 24
PUBLISHING_MAX: Final = 192
CHUNK_BYTES: Final = 4 << 20
_COLUMNS: Final = "published long, overtaken long, messages long, read_bytes long, snapshot_bytes long"


@dataclass(frozen=True)
class MaterializeOptions:
    connection: Connection
    source_options: dict[str, str]
    bucket: str
    fold: str
    prefix: str = ""
    key: str | None = None
    content_type: str | None = None
    messages_min: int = 1
    """Streams with fewer new messages are left alone."""
    partitions: int | None = None


class MaterializeSummary(NamedTuple):
    published: int
    overtaken: int
    """Streams that were deleted, or got a later snapshot, meanwhile."""
    messages: int
    read_bytes: int
    snapshot_bytes: int
    seconds: float


def materialize(spark: SparkSession, options: MaterializeOptions) -> MaterializeSummary:
    from pyspark.sql import functions

    started = monotonic_seconds()
    folding = folds.find(options.fold, options.key, options.content_type)
    folds.travel(options.fold)
    rows = (
        spark.read.format("millstream")
        .options(**options.source_options)
        .option("bucket", options.bucket)
        .option("prefix", options.prefix)
        .option("columns", "stream,offset,next_offset,position,payload")
        .load()
    )
    if options.fold == folds.YJS:
        rows = rows.where("not startswith(stream, 'awareness/')")  # who is looking is no part of a document
    by_stream = rows.repartition(options.partitions, "stream") if options.partitions else rows.repartition("stream")
    ordered = by_stream.sortWithinPartitions("stream", "position")

    def fold_all(batches: Iterator[arrow.RecordBatch]) -> Iterator[arrow.RecordBatch]:
        yield _Folder(options, folding).run(batches)

    names = [part.split()[0] for part in _COLUMNS.split(", ")]
    sums = [functions.coalesce(functions.sum(name), functions.lit(0)).alias(name) for name in names]
    total = ordered.mapInArrow(fold_all, _COLUMNS).agg(*sums).collect()[0]
    published, overtaken, messages, read_bytes, snapshot_bytes = (int(total[name]) for name in names)
    seconds = monotonic_seconds() - started
    return MaterializeSummary(published, overtaken, messages, read_bytes, snapshot_bytes, seconds)


class _Stream:
    """One stream's messages, folded as they come."""

    def __init__(self, name: str, first_offset: int) -> None:
        self.name = name
        self.first_offset = first_offset
        self.state: bytes | None = None
        self.pending: list[bytes] = []
        self.pending_bytes = 0
        self.messages = 0
        self.end = first_offset


class _Folder:
    """What one task does: its rows come by stream, in order."""

    def __init__(self, options: MaterializeOptions, folding: folds.Folding) -> None:
        self._options = options
        self._folding = folding
        self._client = Client(options.connection.url, token=options.connection.token)
        self._current: _Stream | None = None
        self._publishing: list[Future[int | None]] = []
        self._totals = [0, 0, 0, 0, 0]

    def run(self, batches: Iterator[arrow.RecordBatch]) -> arrow.RecordBatch:
        with self._client, ThreadPoolExecutor(PUBLISHERS, thread_name_prefix="millstream-publish") as threads:
            for batch in batches:
                self._take(batch, threads)
            self._finish_stream(threads)
            self._settle(0)
        columns = [arrow.array([value], arrow.int64()) for value in self._totals]
        return arrow.record_batch(columns, [part.split()[0] for part in _COLUMNS.split(", ")])

    def _take(self, batch: arrow.RecordBatch, threads: ThreadPoolExecutor) -> None:
        names, payloads = batch.column("stream"), batch.column("payload")
        offsets, ends = batch.column("offset"), batch.column("next_offset")
        for first, stop in pairwise(run_edges(names)):
            name = names[first].as_py()
            if self._current is None or self._current.name != name:
                self._finish_stream(threads)
                self._current = _Stream(name, offsets[first].as_py())
            stream = self._current
            messages = payloads.slice(first, stop - first).to_pylist()
            stream.pending += messages
            stream.pending_bytes += sum(map(len, messages))
            stream.messages += len(messages)
            stream.end = ends[stop - 1].as_py()
            if stream.pending_bytes >= CHUNK_BYTES and stream.first_offset == 0:
                self._fold(stream)

    def _fold(self, stream: _Stream) -> None:
        self._totals[3] += stream.pending_bytes
        stream.state = self._folding.fold(stream.state, stream.pending)
        stream.pending, stream.pending_bytes = [], 0

    def _finish_stream(self, threads: ThreadPoolExecutor) -> None:
        stream, self._current = self._current, None
        if stream is None or stream.messages < self._options.messages_min:
            return
        self._totals[2] += stream.messages
        if stream.first_offset == 0:
            if stream.pending:
                self._fold(stream)
        else:
            self._totals[3] += stream.pending_bytes
        self._publishing.append(threads.submit(self._publish, stream))
        self._settle(PUBLISHING_MAX)

    def _settle(self, left: int) -> None:
        while len(self._publishing) > left:
            size = self._publishing.pop(0).result()
            self._totals[1 if size is None else 0] += 1
            self._totals[4] += size or 0

    def _publish(self, stream: _Stream) -> int | None:
        """The size of what was published; None if the stream has gone on without us."""
        handle = self._client.bucket(self._options.bucket).stream(stream.name)
        try:
            state, end = stream.state, stream.end
            if stream.first_offset > 0:
                # It goes on from a snapshot, or from the stream it was forked from: the server has the whole.
                state, end = self._bootstrapped(handle)
            assert state is not None
            handle.publish_snapshot(state, format_offset(end), self._folding.content_type)
        except (NotFound, Gone, Conflict):
            return None
        return len(state)

    def _bootstrapped(self, handle: Any) -> tuple[bytes, int]:
        found = handle.bootstrap()
        state = found.snapshot.data if found.snapshot is not None else None
        return self._folding.fold(state, found.messages), int(found.next_offset.partition("_")[2])
