"""What tests of the data source share: a server that flushes when a test wants it to, reads with and without Spark."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pyarrow as arrow
from pyspark.sql.datasource import Filter, InputPartition
from pyspark.sql.types import StructType

from millstream.spark.batch import FilteringBatchReader
from millstream.spark.columns import message_schema
from millstream.spark.options import read_options
from support.cold import wait_until
from support.server import ServerProcess

JSON = {"content-type": "application/json"}
TEXT = {"content-type": "text/plain"}
# Nothing is flushed by age: a test pushes history out by writing this much.
FLUSH_BYTES = 64 << 10
SETTINGS = ("cold.flush_interval=1h", f"cold.flush_bytes={FLUSH_BYTES}", "read.long_poll_timeout=500ms")

Row = dict[str, Any]


class Streams:
    """A server and a bucket in it, as a user of the HTTP interface sees them."""

    def __init__(self, server: ServerProcess, bucket: str = "runs") -> None:
        self.server = server
        self.bucket = bucket
        self.client = httpx.Client(base_url=server.url, timeout=30.0)
        answer = self.client.put(f"/{bucket}")
        assert answer.status_code in (201, 409), answer.text
        self._padding = 0

    def __enter__(self) -> Streams:
        return self

    def __exit__(self, *exc: object) -> None:
        self.client.close()

    @property
    def url(self) -> str:
        return self.server.url

    def create(self, stream: str, headers: dict[str, str] = JSON) -> None:
        answer = self.client.put(f"/{self.bucket}/{stream}", headers=headers)
        assert answer.status_code in (200, 201), answer.text

    def append(self, stream: str, *messages: object) -> None:
        """Append JSON messages in one request, creating the stream if need be."""
        self.create(stream)
        answer = self.client.post(f"/{self.bucket}/{stream}", headers=JSON, content=json.dumps(list(messages)))
        assert answer.status_code in (200, 204), answer.text

    def cold(self) -> dict[str, Any]:
        answer = self.client.get(f"/{self.bucket}/streams/cold")
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def flush(self) -> None:
        """Make everything so far cold, by writing enough into a bucket of its own."""
        self.client.put("/padding")
        latest = self.cold()["shards"][0]["latest"]
        self._padding += 1
        stream = f"/padding/{self.bucket}-{self._padding}"
        self.client.put(stream, headers=TEXT)
        self.client.post(stream, headers=TEXT, content=b"x" * FLUSH_BYTES)
        wait_until(lambda: self.cold()["shards"][0]["flushed"] >= latest, "a flush")

    def options(self, **more: str) -> dict[str, str]:
        return {"url": self.url, "bucket": self.bucket, **more}

    def messages(self, stream: str) -> list[Any]:
        """What a reader over HTTP gets."""
        found: list[Any] = []
        offset = "-1"
        while True:
            answer = self.client.get(f"/{self.bucket}/{stream}", params={"offset": offset})
            assert answer.status_code == 200, answer.text
            found += answer.json()
            offset = answer.headers["stream-next-offset"]
            if answer.headers.get("stream-up-to-date") == "true":
                return found


def server_at(data_dir: Path, *settings: str) -> ServerProcess:
    return ServerProcess(data_dir, settings=(*SETTINGS, *settings))


def reader_of(options: dict[str, str], schema: StructType | None = None, filters: Iterable[Filter] = ()) -> Any:
    """A batch reader as Spark would have it, without Spark."""
    parsed = read_options(options)
    reader = FilteringBatchReader(parsed, schema or message_schema(parsed.columns))
    rest = list(reader.pushFilters(list(filters)))
    assert not rest, f"not pushed down: {rest}"
    return reader


def rows_of(reader: Any, partitions: Sequence[InputPartition]) -> list[Row]:
    batches: list[arrow.RecordBatch] = [batch for one in partitions for batch in reader.read(one)]
    return [row for batch in batches for row in batch.to_pylist()]


def read(options: dict[str, str], schema: StructType | None = None, filters: Iterable[Filter] = ()) -> list[Row]:
    reader = reader_of(options, schema, filters)
    return rows_of(reader, reader.partitions())


def payloads(rows: Iterable[Row]) -> dict[str, list[Any]]:
    """The JSON messages of each stream, by offset."""
    found: dict[str, list[Any]] = {}
    for row in sorted(rows, key=lambda one: (one["stream"], one["offset_start"])):
        found.setdefault(row["stream"], []).append(json.loads(row["payload"]))
    return found
