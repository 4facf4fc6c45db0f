"""What a task of materialize does with its rows, at a real server and without Spark."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pyarrow as arrow
import pytest

from millstream.pipeline import folds
from millstream.pipeline.materialize import Failure, MaterializeOptions, _Folder
from millstream.spark.options import Connection, read_options
from millstream.spark.source_client import SourceClient
from support.server import ServerProcess
from support.spark_source import Streams, server_at

COLUMNS = ["stream", "incarnation", "offset_start", "offset_end", "position", "payload"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with server_at(tmp_path_factory.mktemp("materialize") / "data") as running:
        yield running


@pytest.fixture
def streams(server: ServerProcess, request: pytest.FixtureRequest) -> Iterator[Streams]:
    with Streams(server, f"folded-{abs(hash(request.node.name)) % 10_000}") as opened:
        yield opened


def rows(streams: Streams) -> arrow.Table:
    """The bucket's messages as the job gets them: by stream, in order."""
    server = SourceClient(read_options(streams.options()).connection)
    try:
        table = server.feed(streams.bucket, 0, 0, "").table
    finally:
        server.close()
    messages = table.filter(arrow.compute.equal(table.column("event"), "message"))
    return messages.select(COLUMNS).sort_by([("stream", "ascending"), ("position", "ascending")])


def fold(streams: Streams, table: arrow.Table, *, is_dry_run: bool = False) -> dict[str, object]:
    options = MaterializeOptions(
        Connection(streams.options()["url"], None, 30.0), {}, streams.bucket, "merge-patch", is_dry_run=is_dry_run
    )
    batch = _Folder(options, folds.find("merge-patch", None, None)).run(iter(table.to_batches()))
    [row] = batch.to_pylist()
    return row | {"failures": [Failure(*one) for one in json.loads(row["failures"])]}


def snapshot(streams: Streams, name: str) -> object:
    answer = streams.client.get(f"/{streams.bucket}/{name}/snapshot", follow_redirects=True)
    return answer.json() if answer.status_code == 200 else None


def test_stream_that_cannot_be_folded_is_named_and_spoils_no_other(streams: Streams) -> None:
    for name in ("a", "bad", "c"):
        streams.create(name)
        streams.append(name, {"name": name})
    body = b'[{"n": 1e999}]'  # valid JSON, and no number that a double holds
    answer = streams.client.post(f"/{streams.bucket}/bad", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 204
    tried = fold(streams, rows(streams), is_dry_run=True)
    assert (tried["published"], tried["failed"]) == (2, 1) and snapshot(streams, "a") is None
    summary = fold(streams, rows(streams))
    assert (summary["published"], summary["failed"], summary["overtaken"]) == (2, 1, 0)
    [failure] = summary["failures"]
    assert failure.stream == "bad" and "out of range" in failure.reason
    assert [snapshot(streams, name) for name in ("a", "bad", "c")] == [{"name": "a"}, None, {"name": "c"}]
    assert len(streams.messages("bad")) == 2, "nothing of it was trimmed"


def test_state_of_a_deleted_stream_is_never_published_onto_its_successor(streams: Streams) -> None:
    streams.create("doc")
    streams.append("doc", {"owner": "first"})
    table = rows(streams)
    assert streams.client.delete(f"/{streams.bucket}/doc").status_code == 204
    streams.create("doc")
    streams.append("doc", {"owner": "other"})
    summary = fold(streams, table)
    assert (summary["published"], summary["overtaken"]) == (0, 1)
    assert snapshot(streams, "doc") is None
    assert streams.messages("doc") == [{"owner": "other"}]


def test_incarnation_that_is_no_number_is_refused(streams: Streams) -> None:
    streams.create("doc")
    answer = streams.client.put(
        f"/{streams.bucket}/doc/snapshot/{'0' * 16}_{'0' * 16}", content=b"{}", headers={"stream-incarnation": "x"}
    )
    assert answer.status_code == 400 and "invalid_incarnation" in answer.text
