"""Tokens: what is refused is refused at the earliest moment, in words that name the option."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest
from pyspark.errors import PySparkException

from millstream.spark.columns import message_schema
from millstream.spark.errors import SourceError
from millstream.spark.options import read_options
from millstream.spark.source import MillstreamSource
from millstream.spark.stream import StreamReader
from support.access import bearer, make_token
from support.server import ServerProcess
from support.spark_source import JSON, read, server_at

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROWS = message_schema(("stream", "payload"))
PAYLOADS = message_schema(("payload",))


class Guarded:
    """A server that wants tokens, with a bucket `runs` of one stream, and some tokens for it."""

    def __init__(self, server: ServerProcess, tokens: dict[str, str]) -> None:
        self.url = server.url
        self.tokens = tokens

    def options(self, token: str | None, **more: str) -> dict[str, str]:
        given = {} if token is None else {"token": self.tokens.get(token, token)}
        return {"url": self.url, "bucket": "runs", **given, **more}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("guarded")
    file = folder / "tokens.json"
    tokens = {
        "admin": make_token(file, "admin:*"),
        "both": make_token(file, "read:runs", "write:runs"),
        "reader": make_token(file, "read:runs"),
        "other": make_token(file, "read:other", "write:other"),
    }
    with server_at(folder / "data", "auth.enabled=true", f"auth.tokens_file={file}") as server:
        with httpx.Client(base_url=server.url, headers=bearer(tokens["admin"])) as client:
            assert client.put("/runs").status_code == 201
            assert client.put("/runs/a", headers=JSON, content=json.dumps([{"n": 1}])).status_code == 201
        yield Guarded(server, tokens)


def test_missing_token_is_refused_when_loading(spark: SparkSession, guarded: Guarded) -> None:
    with pytest.raises(
        PySparkException, match=r"refuses access to bucket 'runs': the option 'token' is missing .*Give a token that"
    ):
        spark.read.format("millstream").options(**guarded.options(None)).load()


@pytest.mark.parametrize("token", ["mst_0000_made-up", "other"])
def test_token_that_is_wrong_or_for_something_else_is_refused_before_anything_is_read_or_written(
    guarded: Guarded, token: str
) -> None:
    source = MillstreamSource(guarded.options(token))
    message = "the option 'token' is not accepted"
    with pytest.raises(SourceError, match=message) as refusal:
        source.schema()
    assert guarded.tokens.get(token, token) not in str(refusal.value), "a token is nothing to show"
    with pytest.raises(SourceError, match=message):
        source.writer(ROWS, overwrite=False)
    with pytest.raises(SourceError, match=message):
        source.streamWriter(ROWS, overwrite=False)
    reader = StreamReader(read_options(guarded.options(token)), message_schema())
    with pytest.raises(SourceError, match=message):
        reader.initialOffset()
    reader.stop()


def test_token_that_may_only_read_is_refused_before_the_first_row_of_a_named_stream(guarded: Guarded) -> None:
    assert [row["stream"] for row in read(guarded.options("reader"))] == ["a"]
    for stream in ("a", "not-there-yet"):
        with pytest.raises(SourceError, match=r"bucket 'runs': the option 'token' is not accepted"):
            MillstreamSource(guarded.options("reader", stream=stream)).writer(PAYLOADS, overwrite=False)
        MillstreamSource(guarded.options("both", stream=stream)).writer(PAYLOADS, overwrite=False)
    assert [json.loads(row["payload"]) for row in read(guarded.options("both"))] == [{"n": 1}], "asking wrote nothing"


def test_token_that_may_only_read_is_refused_with_the_first_append_where_a_column_names_the_streams(
    spark: SparkSession, guarded: Guarded, tmp_path: Path
) -> None:
    rows = spark.createDataFrame([("a", '{"n": 2}')], "stream STRING, payload STRING")
    with pytest.raises(PySparkException, match=r"stream 'runs/a' takes no messages.*option 'token' one that may write"):
        rows.write.format("millstream").options(**guarded.options("reader")).mode("append").save()
    rows.write.format("millstream").options(**guarded.options("both")).mode("append").save()
    assert [json.loads(row["payload"])["n"] for row in read(guarded.options("reader"))] == [1, 2]
