"""`/{bucket}/streams/cold`: what a reader of the object store is told, and that it is no secret."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.cold import FolderStore, S3Prefix, names, server_on, wait_until_flushed
from support.s3 import S3Server

JSON = {"content-type": "application/json"}
TEXT = {"content-type": "text/plain"}


@pytest.fixture
def client(tmp_path: Path, folder: FolderStore) -> Iterator[httpx.Client]:
    with (
        server_on(tmp_path / "data", folder, "cold.flush_interval=100ms") as server,
        httpx.Client(base_url=server.url, timeout=30.0) as opened,
    ):
        assert opened.put("/runs").status_code == 201
        yield opened


def described(client: httpx.Client, query: str = "") -> dict[str, Any]:
    answer = client.get(f"/runs/streams/cold{query}")
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def incarnation_of(client: httpx.Client) -> int:
    """That of the stream created last: the position of the record that did it."""
    events = [line for line in client.get("/runs/streams/feed").text.splitlines() if '"created"' in line]
    return int(httpx.Response(200, text=events[-1]).json()["position"])


def alive(client: httpx.Client, *incarnations: int) -> list[list[int]]:
    answer = client.post("/runs/streams/cold", json={"incarnations": list(incarnations)})
    assert answer.status_code == 200, answer.text
    return list(answer.json()["alive"])


def test_segments_cover_exactly_what_is_flushed(client: httpx.Client, folder: FolderStore) -> None:
    client.put("/other")
    for path in ("/runs/a", "/runs/b", "/other/c"):
        client.put(path, headers=JSON)
        client.post(path, headers=JSON, content=b'[{"n":1},{"n":2}]')
    wait_until_flushed(client)
    found = described(client)
    assert found["store"] == {"backend": "fs", "path": str(folder.folder.absolute()), "options": {}}
    (shard,) = found["shards"]
    mine = {path for path in names(folder, "segments") if "bucket=runs" in path}
    assert {segment["path"] for segment in shard["segments"]} == mine
    assert sum(segment["rows"] for segment in shard["segments"]) == 4
    assert max(segment["last_position"] for segment in shard["segments"]) <= shard["flushed"] <= shard["latest"]
    assert described(client, f"?after=0.{shard['latest']}")["shards"][0]["segments"] == []


def test_alive_says_which_streams_count_and_from_where(client: httpx.Client) -> None:
    client.put("/runs/kept", headers=TEXT, content=b"12345")
    kept = incarnation_of(client)
    client.put("/runs/gone", headers=TEXT, content=b"12345")
    gone = incarnation_of(client)
    assert alive(client, kept, gone, 10**9) == [[kept, 0], [gone, 0]]
    wait_until_flushed(client)
    client.delete("/runs/gone")
    client.put(f"/runs/kept/snapshot/{0:016d}_{5:016d}", headers=TEXT, content=b"sum")
    for _ in range(2):
        assert alive(client, kept, gone) == [[kept, 5]]
        wait_until_flushed(client)


@pytest.mark.parametrize("incarnation", [-1, -(2**63), 2**63, 2**64, 10**30, 1.5, "7"])
def test_what_cannot_be_an_incarnation_is_refused(client: httpx.Client, incarnation: object) -> None:
    client.put("/runs")
    answer = client.post("/runs/streams/cold", json={"incarnations": [incarnation]})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_body")


def test_incarnations_of_another_bucket_are_not_told(client: httpx.Client) -> None:
    client.put("/other")
    client.put("/runs/mine", headers=TEXT)
    mine = incarnation_of(client)
    answer = client.post("/other/streams/cold", json={"incarnations": [mine]})
    assert answer.json() == {"alive": []}


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"", 400, "invalid_body"),
        (b'{"incarnations": ["x"]}', 400, "invalid_body"),
        (b'{"incarnation": [1]}', 400, "invalid_body"),
        (b'{"incarnations": [-1]}', 400, "invalid_body"),
        (b'{"incarnations": [9223372036854775808]}', 400, "invalid_body"),
        (b'{"incarnations": [' + b",".join([b"1"] * 100_001) + b"]}", 413, "payload_too_large"),
    ],
    ids=["nothing", "text", "another name", "below 0", "too large", "too many"],
)
def test_bad_question_is_refused(client: httpx.Client, body: bytes, status: int, code: str) -> None:
    answer = client.post("/runs/streams/cold", content=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


def test_unknown_bucket_and_token_are_refused(client: httpx.Client) -> None:
    assert client.get("/nowhere/streams/cold").json()["error"]["code"] == "bucket_not_found"
    assert client.get("/runs/streams/cold?after=x").json()["error"]["code"] == "invalid_token"


def test_credentials_are_never_told(tmp_path: Path, s3_server: S3Server) -> None:
    store = S3Prefix(s3_server)
    with server_on(tmp_path / "data", store) as server, httpx.Client(base_url=server.url) as client:
        client.put("/runs")
        found = described(client)
        assert found["store"]["backend"] == "s3"
        assert found["store"]["path"] == store.prefix
        assert set(found["store"]["options"]) == {"bucket", "region", "endpoint"}
        assert "thing" not in client.get("/runs/streams/cold").text
