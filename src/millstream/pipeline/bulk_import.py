"""import: bulk load from Parquet files, JSON lines, or another Durable Streams server, exactly once.

An import has a name. Files are written by the data source's exactly-once writer, one after another, each as one write
of the application `import:<name>`; streams of another server are copied by producers of that name, in pieces whose
edges depend on content and offset alone. So an import that died is run again under its name, and what is there already
is recognised by the server and not written twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from millstream.client import Chunk, Client, Conflict, Producer, Stream
from millstream.client import NotFound as StreamNotFound
from millstream.clock import monotonic_seconds
from millstream.errors import InvalidRequest, NotFound
from millstream.pipeline.tasks import run_tasks
from millstream.protocol.content_types import is_json
from millstream.spark.options import Connection

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FORMATS: Final = ("parquet", "json")
MESSAGES_PER_APPEND: Final = 1_000
APPEND_BYTES: Final = 1 << 20
STREAMS_PER_TASK: Final = 50
TASKS_AT_ONCE: Final = 16

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class ImportOptions:
    connection: Connection
    source_options: dict[str, str]
    bucket: str
    name: str
    """Whatever is imported under one name is imported once."""
    content_type: str | None = None


class ImportSummary(NamedTuple):
    parts: int
    """Files, or streams."""
    messages: int
    repeated: int
    """Appends that the server had already."""
    seconds: float


# -- files -----------------------------------------------------------------------------------------------------------


def import_files(
    spark: SparkSession,
    options: ImportOptions,
    files: Sequence[Path],
    kind: str,
    stream: str | None = None,
    stream_column: str | None = None,
    order_by: str | None = None,
    progress: Progress = lambda done, total: None,
) -> ImportSummary:
    """Rows become messages of the stream they name: a column `payload` as it is, or all other columns as JSON."""
    started = monotonic_seconds()
    if kind not in FORMATS:
        raise InvalidRequest(f"the format {kind!r} is not known", hint=f"there are {', '.join(FORMATS)}")
    found = sorted(_expand(files, kind))
    if not found:
        raise NotFound(f"there are no files in {', '.join(map(str, files))}", code="no_files")
    messages = 0
    for number, file in enumerate(found):
        rows = spark.read.parquet(str(file)) if kind == "parquet" else spark.read.json(str(file))
        if stream_column is not None:
            rows = rows.withColumnRenamed(stream_column, "stream")
        # One partition for each file: its rows come in their own order, whoever reads it again.
        writer = (
            rows.coalesce(1)
            .write.format("millstream")
            .mode("append")
            .options(**options.source_options)
            .option("bucket", options.bucket)
            .option("txnAppId", f"import:{options.name}:{_fingerprint(file)}")
            .option("txnVersion", "0")
            .option("txnLedger", "false")  # always in one partition, so that its producers suffice
            .option("orderBy", order_by or "arrival")
        )
        if stream is not None:
            writer = writer.option("stream", stream)
        if options.content_type is not None:
            writer = writer.option("contentType", options.content_type)
        writer.save()
        messages += rows.count()
        progress(number + 1, len(found))
    return ImportSummary(len(found), messages, 0, monotonic_seconds() - started)


def _fingerprint(file: Path) -> str:
    """What tells a file from the others of an import: its place."""
    return blake2b(str(file.resolve()).encode(), digest_size=8).hexdigest()


def _expand(files: Sequence[Path], kind: str) -> Iterator[Path]:
    endings = {"parquet": (".parquet",), "json": (".json", ".jsonl", ".ndjson")}[kind]
    for file in files:
        if file.is_dir():
            yield from (one for one in file.rglob("*") if one.name.endswith(endings) and not one.name.startswith("_"))
        elif file.exists():
            yield file
        else:
            raise NotFound(f"there is no file {file}", code="no_files", hint="name files or folders of them")


# -- another server --------------------------------------------------------------------------------------------------


class CopyTask(NamedTuple):
    source: Connection
    target: Connection
    bucket: str
    name: str
    streams: list[tuple[str, str]]
    """Paths at the source, and the names they get."""


class Copied(msgspec.Struct):
    messages: int = 0
    repeated: int = 0


def import_server(
    spark: SparkSession,
    options: ImportOptions,
    source: Connection,
    streams: Sequence[tuple[str, str]],
    progress: Progress = lambda done, total: None,
) -> ImportSummary:
    """Copy streams of another server, by path, with their content types, order and closure."""
    started = monotonic_seconds()
    width = max(min(STREAMS_PER_TASK, -(-len(streams) // 2)), 1)
    tasks = [
        CopyTask(source, options.connection, options.bucket, options.name, list(streams[at : at + width]))
        for at in range(0, len(streams), width)
    ]
    total = Copied()
    for first in range(0, len(tasks), TASKS_AT_ONCE):
        for answer in run_tasks(spark, tasks[first : first + TASKS_AT_ONCE], copy_streams):
            copied = msgspec.json.decode(answer, type=Copied)
            total.messages += copied.messages
            total.repeated += copied.repeated
        progress(min((first + TASKS_AT_ONCE) * width, len(streams)), len(streams))
    return ImportSummary(len(streams), total.messages, total.repeated, monotonic_seconds() - started)


def copy_streams(task: CopyTask) -> bytes:
    copied = Copied()
    with (
        Client(task.source.url, token=task.source.token, ssl_context=task.source.trust()) as source,
        Client(task.target.url, token=task.target.token, ssl_context=task.target.trust()) as target,
    ):
        for path, name in task.streams:
            _copy(source, target, task, path, name, copied)
    return msgspec.json.encode(copied)


def _copy(source: Client, target: Client, task: CopyTask, path: str, name: str, copied: Copied) -> None:
    origin = source.stream(path)
    info = origin.head()
    copy = target.stream(f"{task.bucket}/{name}")
    if _is_complete(copy):
        return
    copy.create(content_type=info.content_type)
    producer = f"import:{task.name}"
    count = 0
    for sequence, piece in enumerate(_pieces(origin.read(), is_json(info.content_type))):
        body = b"[" + b",".join(piece) + b"]" if is_json(info.content_type) else b"".join(piece)
        try:
            appended = copy.append(body, producer=Producer(producer, 0, sequence))
        except Conflict as error:
            raise InvalidRequest(
                f"stream {name!r} cannot be imported: {error}",
                hint="streams that were written to otherwise, or under another import's name, are left alone",
            ) from None
        count += 1
        copied.repeated += appended.duplicate
        copied.messages += 0 if appended.duplicate else len(piece)
    if info.closed:
        copy.close(producer=Producer(producer, 0, count))


def _is_complete(copy: Stream) -> bool:
    """Closing comes last, so a copy that is closed has everything."""
    try:
        return copy.head().closed
    except StreamNotFound:
        return False


def _pieces(chunks: Iterator[Chunk], is_json_stream: bool) -> Iterator[list[bytes]]:
    """The messages in pieces that are the same however the server cuts its answers."""
    piece: list[bytes] = []
    size = 0
    for chunk in chunks:
        messages = chunk.messages() if is_json_stream else _blocks(chunk.data, size)
        for message in messages:
            piece.append(message)
            size += len(message)
            if (len(piece) >= MESSAGES_PER_APPEND and is_json_stream) or size >= APPEND_BYTES:
                yield piece
                piece, size = [], 0
    if piece:
        yield piece


def _blocks(data: bytes, held: int) -> Iterator[bytes]:
    """Bytes cut where a piece of them is full; `held` is what the piece has already."""
    at = 0
    while at < len(data):
        length = min(APPEND_BYTES - held, len(data) - at)
        yield data[at : at + length]
        at += length
        held = (held + length) % APPEND_BYTES
