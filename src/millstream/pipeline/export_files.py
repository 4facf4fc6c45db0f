"""The files of an export: Parquet by bucket and date, written by tasks straight into the place of the tables.

    raw/bucket=<bucket>/date=<UTC day>/<batch>-<random>.parquet
    typed/bucket=<bucket>/date=<UTC day>/<batch>-<random>.parquet

Bucket and date are in the path, where engines look for them, and not in the file. Until its batch counts a file lies
under `_staging/`, where no reader of the tables looks.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple
from urllib.parse import quote

import msgspec
import pyarrow as arrow
import pyarrow.compute as compute
import pyarrow.parquet as parquet

from millstream.pipeline.typing_json import CORRUPT, KINDS, Fields, column_names, columns_of, observe
from millstream.protocol.content_types import is_json
from millstream.tiers.objects import ObjectStoreSettings, open_objects

TIMESTAMP: Final = arrow.timestamp("us", tz="UTC")
RAW_SCHEMA: Final = arrow.schema(
    [
        ("stream", arrow.string()),
        ("offset_start", arrow.int64()),
        ("offset_end", arrow.int64()),
        ("position", arrow.int64()),
        ("appended_at", TIMESTAMP),
        ("content_type", arrow.string()),
        ("payload", arrow.binary()),
    ]
)
PLACE_COLUMNS: Final = ["stream", "offset_start", "offset_end", "position", "appended_at"]
ROWS_AT_ONCE: Final = 65_536


class ExportFile(msgspec.Struct, frozen=True):
    path: str
    date: str
    size: int
    rows: int
    first_position: int
    last_position: int
    json_rows: int = 0
    fields: Fields = {}

    @property
    def staged_path(self) -> str:
        return f"_staging/{self.path}"


class FileTask(NamedTuple):
    output: ObjectStoreSettings
    bucket: str
    batch: int
    file_bytes: int
    is_typed: bool


def typed_schema(fields: Fields) -> arrow.Schema:
    columns = [(name, KINDS[kind]) for name, kind in zip(column_names(fields), fields.values(), strict=True)]
    return arrow.schema([*(RAW_SCHEMA.field(name) for name in PLACE_COLUMNS), *columns, (CORRUPT, arrow.string())])


class _Writer:
    """One file on its way: spooled locally, then put into the store whole."""

    def __init__(self, task: FileTask, table: str, date: str, schema: arrow.Schema, folder: Path) -> None:
        name = f"{task.batch:08d}-{secrets.token_hex(8)}.parquet"
        self._store = task.output
        self._path = f"{table}/bucket={quote(task.bucket, safe='')}/date={date}/{name}"
        self._date = date
        self._file = folder / name
        self._writer = parquet.ParquetWriter(self._file, schema, compression="zstd")
        self._rows = 0
        self._positions: list[int] = []
        self.size = 0
        self.json_rows = 0
        self.fields: Fields = {}

    def add(self, table: arrow.Table) -> None:
        self._writer.write_table(table)
        self._rows += table.num_rows
        self.size += table.nbytes
        bounds = compute.min_max(table.column("position")).as_py()
        self._positions += [bounds["min"], bounds["max"]]

    def finish(self) -> ExportFile:
        self._writer.close()
        size = self._file.stat().st_size
        bounds = min(self._positions), max(self._positions)
        file = ExportFile(self._path, self._date, size, self._rows, *bounds, self.json_rows, self.fields)
        asyncio.run(open_objects(self._store).put(file.staged_path, self._file))
        self._file.unlink()
        return file


def write_raw(task: FileTask, batches: Iterable[arrow.RecordBatch]) -> Iterator[ExportFile]:
    """A task's messages as files, one open for each day."""
    with TemporaryDirectory(prefix="millstream-export-") as folder:
        open_files: dict[str, _Writer] = {}
        for batch in batches:
            table = arrow.Table.from_batches([batch]).drop_columns(["bucket"])
            for date, rows in _by_date(table):
                writer = open_files.get(date)
                if writer is None:
                    writer = open_files[date] = _Writer(task, "raw", date, RAW_SCHEMA, Path(folder))
                if task.is_typed:
                    _observe(writer, rows)
                writer.add(rows.select(RAW_SCHEMA.names).cast(RAW_SCHEMA))
                if writer.size >= task.file_bytes:
                    yield open_files.pop(date).finish()
        for writer in open_files.values():
            yield writer.finish()


def _by_date(table: arrow.Table) -> Iterator[tuple[str, arrow.Table]]:
    days = compute.strftime(table.column("appended_at").cast(arrow.timestamp("us")), "%Y-%m-%d")
    for day in compute.unique(days).to_pylist():
        yield day, table.filter(compute.equal(days, day))


def _observe(writer: _Writer, rows: arrow.Table) -> None:
    kinds = {kind: is_json(kind) for kind in compute.unique(rows.column("content_type")).to_pylist()}
    columns = zip(rows.column("content_type").to_pylist(), rows.column("payload").to_pylist(), strict=True)
    for kind, payload in columns:
        if kinds[kind]:
            writer.json_rows += 1
            observe(writer.fields, payload)


def write_typed(task: FileTask, raw: ExportFile, fields: Fields) -> list[ExportFile]:
    """The JSON messages of a raw file by their fields, in a file of their own."""
    schema = typed_schema(fields)
    with TemporaryDirectory(prefix="millstream-export-") as folder:
        source = Path(folder) / "raw.parquet"
        source.write_bytes(asyncio.run(open_objects(task.output).get(raw.staged_path)))
        writer = _Writer(task, "typed", raw.date, schema, Path(folder))
        for batch in parquet.ParquetFile(source).iter_batches(ROWS_AT_ONCE):
            rows = _json_rows(arrow.Table.from_batches([batch]))
            if rows.num_rows:
                columns: list[Any] = [rows.column(name) for name in PLACE_COLUMNS]
                columns += columns_of(fields, rows.column("payload").to_pylist())
                writer.add(arrow.table(columns, schema=schema))
        return [writer.finish()]


def _json_rows(table: arrow.Table) -> arrow.Table:
    kinds = [kind for kind in compute.unique(table.column("content_type")).to_pylist() if is_json(kind)]
    return table.filter(compute.is_in(table.column("content_type"), value_set=arrow.array(kinds, arrow.string())))
