"""materialize: fold each stream into its current state, and publish that as the stream's snapshot at that offset.

Publishing at N makes N the earliest offset: who joins reads one small object, and what came before can be reclaimed.
A stream that has a snapshot is folded on from there; one without anything new is left alone, so a second run does
nothing. A snapshot is published under the offset it stands for, so a task that is run twice publishes the same again;
and only onto the stream that was read, never onto one that was created under its name since.

A stream whose messages the fold cannot take, or whose snapshot the server refuses, is left as it is and named in the
summary; the others go on.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import pyarrow as arrow

from millstream.client import BadRequest, Client, Conflict, Gone, NotFound
from millstream.clock import monotonic_seconds
from millstream.errors import ConfigurationError
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
FAILURES_NAMED_MAX: Final = 1_000
REASON_CHARACTERS_MAX: Final = 300
_COUNTS: Final = ("published", "overtaken", "messages", "read_bytes", "snapshot_bytes", "failed")
_COLUMNS: Final = ", ".join(f"{name} long" for name in _COUNTS) + ", failures binary"


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
    is_dry_run: bool = False
    """Fold everything and publish nothing."""


class Failure(NamedTuple):
    """A stream that was left as it is, and why."""

    stream: str
    reason: str


class MaterializeSummary(NamedTuple):
    published: int
    overtaken: int
    """Streams that were deleted, or got a later snapshot, meanwhile."""
    messages: int
    read_bytes: int
    snapshot_bytes: int
    failed: int
    failures: list[Failure]
    """Some of the streams that failed; all of them, unless there are very many."""
    seconds: float


def materialize(spark: SparkSession, options: MaterializeOptions) -> MaterializeSummary:
    started = monotonic_seconds()
    folding = folds.find(options.fold, options.key, options.content_type)
    folds.ship_module(options.fold)
    rows = (
        spark.read.format("millstream")
        .options(**options.source_options)
        .option("bucket", options.bucket)
        .option("prefix", options.prefix)
        .option("columns", "stream,incarnation,offset_start,offset_end,position,payload")
        .load()
    )
    if options.fold == folds.YJS:
        rows = rows.where("not startswith(stream, 'awareness/')")  # who is looking is no part of a document
    by_stream = rows.repartition(options.partitions, "stream") if options.partitions else rows.repartition("stream")
    ordered = by_stream.sortWithinPartitions("stream", "position")

    def fold_all(batches: Iterator[arrow.RecordBatch]) -> Iterator[arrow.RecordBatch]:
        yield _Folder(options, folding).run(batches)

    tasks = ordered.mapInArrow(fold_all, _COLUMNS).collect()
    counts = {name: sum(int(task[name]) for task in tasks) for name in _COUNTS}
    named = [one for task in tasks for one in msgspec.json.decode(bytes(task["failures"]), type=list[Failure])]
    return MaterializeSummary(
        **counts, failures=sorted(named)[:FAILURES_NAMED_MAX], seconds=monotonic_seconds() - started
    )


class _Stream:
    """One stream's messages, folded as they come."""

    def __init__(self, name: str, incarnation: int, first_offset: int) -> None:
        self.name = name
        self.incarnation = incarnation
        self.first_offset = first_offset
        self.state: bytes | None = None
        self.pending: list[bytes] = []
        self.pending_bytes = 0
        self.messages = 0
        self.end = first_offset
        self.has_failed = False


class _Folder:
    """What one task does: its rows come by stream, in order."""

    def __init__(self, options: MaterializeOptions, folding: folds.Folding) -> None:
        self._options = options
        self._folding = folding
        self._client = Client(
            options.connection.url, token=options.connection.token, ssl_context=options.connection.trust()
        )
        self._current: _Stream | None = None
        self._publishing: list[Future[int | Failure | None]] = []
        self._counts = dict.fromkeys(_COUNTS, 0)
        self._failures: list[Failure] = []

    def run(self, batches: Iterator[arrow.RecordBatch]) -> arrow.RecordBatch:
        with self._client, ThreadPoolExecutor(PUBLISHERS, thread_name_prefix="millstream-publish") as threads:
            for batch in batches:
                self._take(batch, threads)
            self._finish_stream(threads)
            self._settle(0)
        columns = [arrow.array([self._counts[name]], arrow.int64()) for name in _COUNTS]
        columns.append(arrow.array([msgspec.json.encode(self._failures)], arrow.binary()))
        return arrow.record_batch(columns, [*_COUNTS, "failures"])

    def _take(self, batch: arrow.RecordBatch, threads: ThreadPoolExecutor) -> None:
        names, incarnations, payloads = (batch.column(name) for name in ("stream", "incarnation", "payload"))
        offsets, ends = batch.column("offset_start"), batch.column("offset_end")
        for first, stop in pairwise(run_edges(incarnations)):
            incarnation = incarnations[first].as_py()
            if self._current is None or self._current.incarnation != incarnation:
                self._finish_stream(threads)
                self._current = _Stream(names[first].as_py(), incarnation, offsets[first].as_py())
            stream = self._current
            if stream.has_failed:
                continue
            messages = payloads.slice(first, stop - first).to_pylist()
            stream.pending += messages
            stream.pending_bytes += sum(map(len, messages))
            stream.messages += len(messages)
            stream.end = ends[stop - 1].as_py()
            if stream.pending_bytes >= CHUNK_BYTES and stream.first_offset == 0:
                self._fold(stream)

    def _fold(self, stream: _Stream) -> None:
        self._counts["read_bytes"] += stream.pending_bytes
        try:
            stream.state = folded(self._folding, stream.state, stream.pending)
        except _CannotFold as error:
            stream.has_failed = True
            self._fail(Failure(stream.name, str(error)))
        stream.pending, stream.pending_bytes = [], 0

    def _fail(self, failure: Failure) -> None:
        self._counts["failed"] += 1
        if len(self._failures) < FAILURES_NAMED_MAX:
            self._failures.append(failure)

    def _finish_stream(self, threads: ThreadPoolExecutor) -> None:
        stream, self._current = self._current, None
        if stream is None or stream.messages < self._options.messages_min:
            return
        self._counts["messages"] += stream.messages
        if stream.first_offset == 0:
            if stream.pending:
                self._fold(stream)
        else:
            self._counts["read_bytes"] += stream.pending_bytes
        if stream.has_failed:
            return
        self._publishing.append(threads.submit(self._publish, stream))
        self._settle(PUBLISHING_MAX)

    def _settle(self, left: int) -> None:
        while len(self._publishing) > left:
            outcome = self._publishing.pop(0).result()
            if isinstance(outcome, Failure):
                self._fail(outcome)
            else:
                self._counts["overtaken" if outcome is None else "published"] += 1
                self._counts["snapshot_bytes"] += outcome or 0

    def _publish(self, stream: _Stream) -> int | Failure | None:
        """The size of what was published; None if the stream has gone on without us."""
        handle = self._client.bucket(self._options.bucket).stream(stream.name)
        try:
            state, end = stream.state, stream.end
            if stream.first_offset > 0:
                # It goes on from a snapshot, or from the stream it was forked from: the server has the whole.
                state, end = self._bootstrapped(handle)
            assert state is not None
            if not self._options.is_dry_run:
                # The name may belong to another stream by now: the state is published onto the one it is of.
                handle.publish_snapshot(
                    state, format_offset(end), self._folding.content_type, incarnation=stream.incarnation
                )
        except (NotFound, Gone, Conflict):
            return None
        except (_CannotFold, BadRequest) as error:
            return Failure(stream.name, str(error)[:REASON_CHARACTERS_MAX])
        return len(state)

    def _bootstrapped(self, handle: Any) -> tuple[bytes, int]:
        found = handle.bootstrap()
        state = found.snapshot.data if found.snapshot is not None else None
        return folded(self._folding, state, found.messages), int(found.next_offset.partition("_")[2])


class _CannotFold(Exception):
    """A fold that raised. Its text says what, and says nothing of the rest of the job."""


def folded(folding: folds.Folding, state: bytes | None, messages: list[bytes]) -> bytes:
    """What a fold makes of messages. Whatever it raises is about these messages, except that it cannot run at all."""
    try:
        return folding.fold(state, messages)
    except (ConfigurationError, MemoryError):
        raise
    except Exception as error:
        raise _CannotFold(f"{type(error).__name__}: {error}"[:REASON_CHARACTERS_MAX]) from error
