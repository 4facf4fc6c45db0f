"""A single server answers an operator as a cluster of one, and says what is large and what its caches do."""

from __future__ import annotations

import time
from collections.abc import Iterator

import httpx
import pytest

from support.serving import Serve

TEXT = {"content-type": "text/plain"}


@pytest.fixture(scope="module")
def client(serve: Serve) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=serve("cold.flush_interval=1h").url, timeout=30) as opened:
        yield opened


def test_status_names_one_node_that_leads(client: httpx.Client) -> None:
    status = client.get("/cluster/status").json()
    assert (status["node_id"], status["leader_id"], status["ready"], status["missing"]) == (1, 1, True, [])
    assert [member["node_id"] for member in status["members"]] == [1]
    (shard,) = status["shards"]
    assert (shard["shard"], shard["role"], shard["leader_id"], shard["caught_up"]) == (0, "leading", 1, True)
    assert client.head("/cluster/status").status_code == 200
    assert client.post("/cluster/status").status_code == 405


def test_a_snapshot_is_taken_and_the_log_is_purged(client: httpx.Client) -> None:
    assert client.put("/v1/stream/ones/s", headers=TEXT, content=b"one").status_code == 201
    answer = client.post("/cluster/trigger-snapshot")
    assert (answer.status_code, answer.json()) == (202, {"queued": [0]})
    deadline = time.monotonic() + 30
    while client.get("/cluster/hot-cold-stats").json()["segment_count"] == 0:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    flushed = client.get("/cluster/status").json()["shards"][0]["flushed_position"]
    answer = client.post("/cluster/purge-log", json={"shard": 0})
    assert (answer.status_code, answer.json()) == (200, {"purged_through": {"0": flushed}})
    assert client.get("/v1/stream/ones/s").content == b"one"


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("transfer-leader", {}, 409, "no_successor"),
        ("transfer-leader", {"node": 2}, 409, "invalid_successor"),
        ("transfer-leader", {"shard": 1}, 400, "invalid_shard"),
        ("trigger-snapshot", {"shard": 7}, 400, "invalid_shard"),
        ("purge-log", {"shard": "x"}, 400, "invalid_shard"),
        ("purge-log", [], 400, "invalid_json"),
        ("members", {"node": 1, "state": "draining"}, 409, "last_node"),
        ("members", {"node": 2, "state": "removed"}, 404, "node_not_found"),
        ("members", {}, 400, "invalid_member"),
    ],
)
def test_what_one_node_cannot_do_is_refused(
    client: httpx.Client, path: str, body: object, status: int, code: str
) -> None:
    answer = client.post(f"/cluster/{path}", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


def test_stats_name_the_largest_streams_and_every_cache(client: httpx.Client) -> None:
    for number in range(1, 31):
        path = f"/v1/stream/large/{number:02d}"
        assert client.put(path, headers=TEXT, content=bytes(1000 * number)).status_code == 201
    stats = client.get("/cluster/hot-cold-stats").json()
    largest = stats["largest_streams"]
    assert [one["stream"] for one in largest] == [f"large/{number:02d}" for number in range(30, 10, -1)]
    assert all(one["hot_bytes"] >= 1000 * number for one, number in zip(largest, range(30, 10, -1), strict=True))
    caches = stats["caches"]
    functions = {"queries", "hosts", "media_types", "content_types", "stored_content_types"}
    assert {"row_groups", "footers", "routes", *functions} <= caches.keys()
    before = caches["queries"]["hits"] + caches["queries"]["misses"]
    for _ in range(3):
        client.get("/v1/stream/large/01?offset=now")
    caches = client.get("/cluster/hot-cold-stats").json()["caches"]
    assert caches["queries"]["hits"] + caches["queries"]["misses"] >= before + 3
    for cache in caches.values():
        assert "entries" in cache
        assert cache.get("entries_max", 1) > 0
    assert all({"hits", "misses"} <= caches[name].keys() for name in functions)
