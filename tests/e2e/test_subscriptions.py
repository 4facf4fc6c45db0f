"""Subscriptions over HTTP: what their `GET` tells, a page at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from support.serving import Serve
from support.yjs import wait_for

SUBSCRIPTIONS = "/v1/stream/__ds/subscriptions"
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def client(serve: Serve) -> Iterator[httpx.Client]:
    settings = ("subscriptions.page_streams_max=2", "subscriptions.links_max=5")
    with httpx.Client(base_url=serve(*settings).url, timeout=30) as connected:
        yield connected


def put(client: httpx.Client, name: str, **body: Any) -> httpx.Response:
    return client.put(f"{SUBSCRIPTIONS}/{name}", json=body)


def test_streams_are_listed_a_page_at_a_time(client: httpx.Client) -> None:
    streams = [f"pages/{name}" for name in "cab"]
    hook = {"type": "webhook", "webhook": {"url": "https://hooks.example.com/"}}
    assert put(client, "pages", **hook, streams=streams).json()["stream_count"] == 3
    url = f"{SUBSCRIPTIONS}/pages"
    first = client.get(url, params={"limit": 2}).json()
    assert [stream["path"] for stream in first["streams"]] == ["pages/a", "pages/b"]
    rest = client.get(url, params={"limit": 2, "after": first["next_cursor"]}).json()
    assert [stream["path"] for stream in rest["streams"]] == ["pages/c"] and "next_cursor" not in rest
    for wrong in ("0", "1001", "-1", "x", "9" * 20):
        answer = client.get(url, params={"limit": wrong})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "INVALID_REQUEST")
    refused = client.post(f"{url}/streams", json={"streams": ["pages/d", "pages/e", "pages/f"]})
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "TOO_MANY_LINKS")


def test_a_webhook_that_fails_says_why_and_when_it_is_tried_again(client: httpx.Client) -> None:
    nobody = {"type": "webhook", "webhook": {"url": "http://127.0.0.1:1/"}}
    assert put(client, "failing", **nobody, pattern="failing/*").status_code == 201
    client.put("/v1/stream/failing/a", content='{"x":1}', headers=JSON)
    told = wait_for(lambda: client.get(f"{SUBSCRIPTIONS}/failing").json(), lambda one: one["status"] == "failed")
    assert told["last_error"] and told["retry_count"] >= 1 and told["next_attempt_at"] and told["lease_until"]
    assert (told["generation"], told["pending_count"]) == (1, 1)


def test_a_claim_has_a_page_of_streams_with_work(client: httpx.Client) -> None:
    client.put("/v1/stream/claimed/wakes", headers=JSON)
    pull = {"type": "pull-wake", "pattern": "claimed/work/*", "wake_stream": "claimed/wakes"}
    assert put(client, "claimed", **pull).status_code == 201
    for name in "abc":
        client.put(f"/v1/stream/claimed/work/{name}", content='{"x":1}', headers=JSON)
    url, seen = f"{SUBSCRIPTIONS}/claimed", []
    wait_for(lambda: client.get(url).json(), lambda one: one["pending_count"] == 3)
    for _ in range(2):
        claim = client.post(f"{url}/claim", json={"worker": "w"}).json()
        assert client.get(url).json()["holder"] == "w"
        seen += [stream["path"] for stream in claim["streams"]]
        acks = [{"stream": one["path"], "offset": one["tail_offset"]} for one in claim["streams"]]
        body = {"wake_id": claim["wake_id"], "generation": claim["generation"], "acks": acks, "done": True}
        answer = client.post(f"{url}/ack", json=body, headers={"authorization": f"Bearer {claim['token']}"})
        assert answer.json() == {"ok": True, "next_wake": len(seen) < 3}
    assert sorted(seen) == [f"claimed/work/{name}" for name in "abc"]
