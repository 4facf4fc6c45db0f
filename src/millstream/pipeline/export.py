"""export: tables from streams, as Parquet or Delta: `raw`, one row for each message, and `typed`, JSON by its fields.

A run takes a bucket's messages from where the last one ended to the latest. Its files are written aside; then one small
object, the batch's entry in `_millstream/<bucket>/`, makes them count, and it can be created only once; then they are
moved to where readers look. A run that died after its entry is finished by the next one. So one that dies leaves
nothing that counts or all of it, two at a time cannot both succeed, and one with nothing new changes nothing. Delta
tables follow the entries, each batch as one transaction that carries its number.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import quote

import msgspec
import pyarrow as arrow

from millstream.clock import SystemClock, monotonic_seconds
from millstream.errors import Conflict, InvalidRequest, NotFound, Unavailable
from millstream.pipeline import delta
from millstream.pipeline.export_files import ExportFile, FileTask, write_raw, write_typed
from millstream.pipeline.job_client import job_client
from millstream.pipeline.tasks import run_tasks
from millstream.pipeline.typing_json import Fields, merge_fields
from millstream.spark.options import Connection
from millstream.tiers.objects import Objects, ObjectStoreSettings, open_objects

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FORMATS: Final = ("parquet", "delta")
LEFTOVER_SECONDS: Final = 24 * 3600.0  # no run is that long under way with a file that does not count yet


@dataclass(frozen=True)
class ExportOptions:
    connection: Connection
    source_options: dict[str, str]
    """Options of the data source, as it takes them: url, token, cold …"""
    bucket: str
    output: ObjectStoreSettings
    format: str = "parquet"
    prefix: str = ""
    is_typed: bool = True
    file_bytes: int = 128 << 20


class ExportSummary(NamedTuple):
    batch: int
    first_position: int
    last_position: int
    messages: int
    typed_rows: int
    files: int
    new_columns: list[str]
    seconds: float


class Entry(msgspec.Struct, frozen=True):
    """What one batch added, and the state after it."""

    batch: int
    first_position: int
    last_position: int
    prefix: str
    fields: Fields
    raw: list[ExportFile]
    typed: list[ExportFile]


def export(spark: SparkSession, options: ExportOptions) -> ExportSummary:
    started = monotonic_seconds()
    if options.format not in FORMATS:
        raise InvalidRequest(f"the format {options.format!r} is not known", hint=f"there are {', '.join(FORMATS)}")
    objects = open_objects(options.output)
    entries = asyncio.run(_entries(objects, options.bucket))
    last = entries[-1] if entries else None
    if last is not None and last.prefix != options.prefix:
        raise Conflict(
            f"the tables at this place hold bucket {options.bucket!r} with prefix {last.prefix!r}",
            hint=f"export prefix {options.prefix!r} to another place",
        )
    first = last.last_position + 1 if last is not None else 0
    latest = _latest(options)
    entry = last
    if last is not None:
        asyncio.run(_publish(objects, last))
    asyncio.run(_remove_leftovers(objects))
    if latest >= first:
        entry = _write(spark, options, last, first, latest)
        _commit(objects, options, entry)
        asyncio.run(_publish(objects, entry))
        entries.append(entry)
    if options.format == "delta":
        delta.follow(options.output, options.bucket, entries)
    if entry is None or entry is last:
        at = last.last_position if last is not None else -1
        return ExportSummary(last.batch if last else 0, first, at, 0, 0, 0, [], monotonic_seconds() - started)
    known = last.fields if last is not None else {}
    return ExportSummary(
        entry.batch,
        entry.first_position,
        entry.last_position,
        sum(file.rows for file in entry.raw),
        sum(file.rows for file in entry.typed),
        len(entry.raw) + len(entry.typed),
        sorted(entry.fields.keys() - known.keys()),
        monotonic_seconds() - started,
    )


def _latest(options: ExportOptions) -> int:
    with job_client(options.connection) as client:
        return max(shard.latest for shard in client.cold(options.bucket).shards)


# -- the entries -----------------------------------------------------------------------------------------------------


def entry_path(bucket: str, batch: int) -> str:
    return f"_millstream/{quote(bucket, safe='')}/{batch:08d}.json"


async def _entries(objects: Objects, bucket: str) -> list[Entry]:
    prefix = entry_path(bucket, 0).rpartition("/")[0] + "/"
    paths = sorted([found.path async for found in objects.list(prefix)])
    return [msgspec.json.decode(await objects.get(path), type=Entry) for path in paths]


def _commit(objects: Objects, options: ExportOptions, entry: Entry) -> None:
    try:
        asyncio.run(objects.put(entry_path(options.bucket, entry.batch), msgspec.json.encode(entry)))
    except Unavailable as error:
        if error.code != "object_exists":
            raise
        raise Conflict(
            f"another export has written batch {entry.batch} meanwhile", hint="run it again: it goes on from there"
        ) from None


async def _publish(objects: Objects, entry: Entry) -> None:
    """Move a batch's files to where readers look; those that are there already stay."""
    for file in (*entry.raw, *entry.typed):
        try:
            await objects.copy(file.staged_path, file.path)
        except NotFound:
            continue
        await objects.delete(file.staged_path)


async def _remove_leftovers(objects: Objects) -> None:
    """Files of batches that never counted: runs that died have left them."""
    before_ms = SystemClock().now_ms() - LEFTOVER_SECONDS * 1000
    stale = [found.path async for found in objects.list("_staging/") if found.modified_ms < before_ms]
    for path in stale:
        await objects.delete(path)


# -- the files -------------------------------------------------------------------------------------------------------


def _write(spark: SparkSession, options: ExportOptions, last: Entry | None, first: int, latest: int) -> Entry:
    batch = last.batch + 1 if last is not None else 1
    rows = (
        spark.read.format("millstream")
        .options(**options.source_options)
        .option("bucket", options.bucket)
        .option("prefix", options.prefix)
        .option("startingOffsets", f'{{"0": {first}}}')
        .option("endingOffsets", f'{{"0": {latest + 1}}}')
        .load()
    )
    task = FileTask(options.output, options.bucket, batch, options.file_bytes, options.is_typed)

    def to_files(batches: Iterator[arrow.RecordBatch]) -> Iterator[arrow.RecordBatch]:
        found = [msgspec.json.encode(file) for file in write_raw(task, batches)]
        yield arrow.record_batch([arrow.array(found, arrow.binary())], ["file"])

    raw = [
        msgspec.json.decode(bytes(row["file"]), type=ExportFile)
        for row in rows.mapInArrow(to_files, "file binary").collect()
    ]
    raw.sort(key=lambda file: file.path)
    fields = merge_fields(last.fields if last is not None else {}, *(file.fields for file in raw))
    typed: list[ExportFile] = []
    if options.is_typed:
        tasks = [(task, file, fields) for file in raw if file.json_rows]
        answers = run_tasks(spark, tasks, _typed_task)
        typed = [file for answer in answers for file in msgspec.json.decode(answer, type=list[ExportFile])]
    return Entry(batch, first, latest, options.prefix, fields, raw, typed)


def _typed_task(arguments: tuple[FileTask, ExportFile, Fields]) -> bytes:
    return msgspec.json.encode(write_typed(*arguments))


def output_settings(place: str) -> ObjectStoreSettings:
    """Where tables go: a folder, or a place in an object store as the option `cold` takes it."""
    from millstream.spark.options import read_options

    root = read_options({"url": "http://localhost", "bucket": "-", "cold": place}).cold.root
    assert root is not None
    return ObjectStoreSettings(root.backend, Path(root.path), root.options)
