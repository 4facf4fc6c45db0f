"""Buckets and the listing of their streams, over HTTP (Extensions §1)."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.raw_http import RawConnection
from support.server import ServerProcess
from support.serving import Serve, Server

TEXT = {"content-type": "text/plain"}
RESERVED = ("v1", "healthz", "readyz", "metrics", "cluster", "console", "__ds")
SECONDS = 20.0

_numbers = count()


@pytest.fixture(scope="module")
def running(serve: Serve) -> Server:
    settings = ("read.long_poll_timeout=500ms", "cold.flush_interval=200ms")
    return serve(*settings)


@pytest.fixture(scope="module")
def client(running: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=running.url, timeout=SECONDS) as opened:
        yield opened


@pytest.fixture
def bucket(client: httpx.Client) -> str:
    name = f"bucket-{next(_numbers)}"
    assert client.put(f"/{name}").status_code == 201
    return name


def create(client: httpx.Client, bucket: str, *names: str) -> None:
    for name in names:
        assert client.put(f"/{bucket}/{name}", headers=TEXT).status_code == 201


def page(client: httpx.Client, bucket: str, **query: Any) -> dict[str, Any]:
    answer = client.get(f"/{bucket}/streams", params=query)
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    assert body["bucket_id"] == bucket
    assert body["prefix"] == query.get("prefix", "")
    assert body["stream_count"] == len(body["streams"]) <= query.get("limit", 1000)
    return body


def names(client: httpx.Client, bucket: str, **query: Any) -> list[str]:
    return [stream["stream_id"] for stream in page(client, bucket, **query)["streams"]]


def all_names(client: httpx.Client, bucket: str, limit: int, prefix: str = "") -> list[str]:
    """Every page after another."""
    found: list[str] = []
    after = ""
    for _ in range(1000):
        body = page(client, bucket, limit=limit, after=after, prefix=prefix)
        found += [stream["stream_id"] for stream in body["streams"]]
        if not body["has_more"]:
            return found
        assert body["stream_count"] == limit
        after = body["next_cursor"]
    raise AssertionError("the pages do not end")


def wait_for_flush(client: httpx.Client, running: Server) -> None:
    """Make a change, then wait until the catalog was written after it."""
    catalog = running.data_dir / "catalog" / "data.mdb"
    before = catalog.stat().st_mtime_ns if catalog.exists() else 0
    deadline = time.monotonic() + SECONDS
    # Two writes: the first may belong to a flush that was under way already.
    for _ in range(2):
        while not catalog.exists() or catalog.stat().st_mtime_ns == before:
            assert time.monotonic() < deadline, "no flush was written"
            client.put(f"/v1/stream/flushes/{next(_numbers)}", headers=TEXT)
            time.sleep(0.02)
        before = catalog.stat().st_mtime_ns


# -- names -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RESERVED)
def test_put_of_a_reserved_bucket_is_400(client: httpx.Client, name: str) -> None:
    assert client.put(f"/{name}").status_code == 400
    assert client.put(f"/{name}/stream", headers=TEXT).status_code == 400


@pytest.mark.parametrize(
    "name",
    [
        "abc",
        "a" * 65,
        "Demo",
        "dem.o",
        "de mo",
        "dém0",
        "demo!",
        "demo%2Fx",
        "de%00mo",
        "demo%0A",
        "..",
        "....",
        "a+b+c",
    ],
)
@pytest.mark.parametrize("method", ["PUT", "GET", "DELETE"])
def test_bucket_name_outside_the_rules_is_400(running: Server, method: str, name: str) -> None:
    target = "/" + name.replace(" ", "%20").replace("é", "%C3%A9")
    with RawConnection(running.url) as connection:
        answer = connection.exchange(method, target)
    assert answer.status == 400
    assert answer.error["code"] in ("invalid_bucket", "invalid_path")


@pytest.mark.parametrize("name", ["abcd", "a" * 64, "____", "-0_9", "_default2"])
def test_bucket_name_inside_the_rules_is_created(client: httpx.Client, name: str) -> None:
    answer = client.put(f"/{name}")
    assert answer.status_code == 201
    assert answer.headers["location"] == f"{client.base_url}/{name}".replace("//" + name, "/" + name)
    assert client.get(f"/{name}").json()["bucket_id"] == name
    assert client.delete(f"/{name}").status_code == 204


@pytest.mark.parametrize(
    "name", ["streams", "a%2Fb", "a%00b", "..", "a..b", "a%2E%2Eb", "%FF", "%zz", "", "n" * 130, "%C3%A9" * 60]
)
@pytest.mark.parametrize("method", ["PUT", "POST", "DELETE"])
def test_stream_name_outside_the_rules_is_refused(
    running: Server, client: httpx.Client, bucket: str, method: str, name: str
) -> None:
    with RawConnection(running.url) as connection:
        answer = connection.exchange(method, f"/{bucket}/{name}", [("Content-Type", "text/plain")], b"x")
    # `streams` is the listing, which knows only GET; everywhere else the name itself is refused.
    assert answer.status == (405 if name == "streams" and method != "PUT" else answer.status)
    assert answer.status in (400, 405)
    assert names(client, bucket) == []


def test_put_of_the_reserved_stream_name_creates_nothing(client: httpx.Client, bucket: str) -> None:
    assert client.put(f"/{bucket}/streams", headers=TEXT).status_code in (400, 405)
    assert page(client, bucket)["streams"] == []


def test_bucket_and_stream_of_122_bytes_together_is_created_and_of_123_is_400(
    client: httpx.Client, bucket: str
) -> None:
    longest = "é" * ((122 - len(bucket) - 1) // 2)
    longest += "x" * (122 - len(bucket) - 1 - len(longest.encode()))
    assert client.put(f"/{bucket}/{longest}x", headers=TEXT).status_code == 400
    assert client.put(f"/{bucket}/{longest}", headers=TEXT).status_code == 201
    assert names(client, bucket) == [longest]


# -- create, inspect, delete -------------------------------------------------------------------------------------


def test_bucket_created_twice_is_201_then_409(client: httpx.Client, bucket: str) -> None:
    again = client.put(f"/{bucket}")
    assert again.status_code == 409
    assert again.json()["error"]["code"] == "bucket_exists"


def test_bucket_metadata_counts_its_streams(client: httpx.Client, bucket: str) -> None:
    assert client.get(f"/{bucket}").json()["streams"] == 0
    create(client, bucket, "a", "b", "c")
    client.delete(f"/{bucket}/b")
    answer = client.get(f"/{bucket}")
    assert (answer.status_code, answer.json()["bucket_id"], answer.json()["streams"]) == (200, bucket, 2)
    assert answer.headers["content-type"] == "application/json"


def test_unknown_bucket_is_404_for_every_operation_on_it(client: httpx.Client) -> None:
    for answer in (
        client.get("/nowhere"),
        client.delete("/nowhere"),
        client.get("/nowhere/streams"),
        client.get("/nowhere/streams/feed"),
        client.get("/nowhere/streams/feed?live=long-poll"),
        client.get("/nowhere/streams/feed?live=sse"),
    ):
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "bucket_not_found"), answer.request


@pytest.mark.parametrize(
    ("method", "path", "headers"),
    [
        ("PUT", "", TEXT),
        ("PUT", "", {**TEXT, "if-none-match": "*"}),
        ("PUT", "", {**TEXT, "if-match": "*"}),
        ("PUT", "", {**TEXT, "stream-forked-from": "/nowhere/other"}),
        ("POST", "", TEXT),
        ("POST", "", {"stream-closed": "true"}),
        ("GET", "", {}),
        ("GET", "?offset=-1", {}),
        ("GET", "?offset=now&live=long-poll", {}),
        ("GET", "?offset=now&live=sse", {}),
        ("HEAD", "", {}),
        ("DELETE", "", {}),
        ("GET", "/bootstrap", {}),
        ("GET", "/snapshot", {}),
        ("GET", "/snapshot/0000000000000000_0000000000000000", {}),
        ("PUT", "/snapshot/0000000000000000_0000000000000000", {}),
        ("DELETE", "/snapshot/0000000000000000_0000000000000000", {}),
    ],
)
def test_unknown_bucket_is_404_for_every_stream_operation(
    client: httpx.Client, method: str, path: str, headers: dict[str, str]
) -> None:
    body = b"x" if method == "POST" and "stream-closed" not in headers else b""
    assert client.request(method, f"/nowhere/stream{path}", headers=headers, content=body).status_code == 404
    assert client.get("/nowhere").status_code == 404


def test_bucket_with_streams_is_not_deleted_until_they_are(client: httpx.Client, bucket: str) -> None:
    create(client, bucket, "one")
    refused = client.delete(f"/{bucket}")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "bucket_not_empty")
    assert client.get(f"/{bucket}/one").status_code == 200
    assert client.delete(f"/{bucket}/one").status_code == 204
    assert client.delete(f"/{bucket}").status_code == 204
    assert client.get(f"/{bucket}").status_code == 404
    assert client.put(f"/{bucket}/one", headers=TEXT).status_code == 404


def test_bucket_deleted_and_recreated_is_empty(client: httpx.Client, bucket: str) -> None:
    create(client, bucket, "old")
    client.delete(f"/{bucket}/old")
    client.delete(f"/{bucket}")
    assert client.put(f"/{bucket}").status_code == 201
    assert client.get(f"/{bucket}").json()["streams"] == 0
    assert names(client, bucket) == []


def test_method_without_meaning_on_a_bucket_is_405_with_allow(client: httpx.Client, bucket: str) -> None:
    answer = client.post(f"/{bucket}")
    assert answer.status_code == 405
    assert set(answer.headers["allow"].split(", ")) == {"PUT", "GET", "DELETE", "HEAD", "OPTIONS"}
    assert client.delete(f"/{bucket}/streams").status_code == 405


def test_creations_that_race_with_a_bucket_delete_leave_no_stream_without_a_bucket(running: Server) -> None:
    async def race() -> None:
        async with httpx.AsyncClient(base_url=running.url, timeout=SECONDS) as client:
            for round_number in range(12):
                bucket = f"race-{round_number}"
                assert (await client.put(f"/{bucket}")).status_code == 201
                await client.put(f"/{bucket}/s0", headers=TEXT)
                requests = [client.delete(f"/{bucket}/s0")]
                requests += [client.put(f"/{bucket}/s{n % 3}", headers=TEXT) for n in range(6)]
                requests.insert(1 + round_number % 6, client.delete(f"/{bucket}"))
                answers = await asyncio.gather(*requests)
                assert all(answer.status_code in (200, 201, 204, 404, 409) for answer in answers)
                exists = (await client.get(f"/{bucket}")).status_code == 200
                for number in range(3):
                    stream = await client.get(f"/{bucket}/s{number}")
                    assert exists or stream.status_code == 404, "a stream lives in a bucket that does not"
                    if stream.status_code == 200:
                        assert (await client.delete(f"/{bucket}/s{number}")).status_code == 204
                if exists:
                    assert (await client.get(f"/{bucket}")).json()["streams"] == 0
                    assert (await client.delete(f"/{bucket}")).status_code == 204

    asyncio.run(race())


# -- listing -----------------------------------------------------------------------------------------------------


def test_listing_describes_each_stream(client: httpx.Client, bucket: str) -> None:
    before_ms = int(time.time() * 1000)
    client.put(f"/{bucket}/open", headers={"content-type": "text/plain; charset=utf-8"})
    client.post(f"/{bucket}/open", headers=TEXT, content=b"hello")
    client.put(f"/{bucket}/shut", headers={"content-type": "application/json", "stream-closed": "true"}, content=b"[1]")
    body = page(client, bucket)
    opened, shut = body["streams"]
    after_ms = int(time.time() * 1000)
    for stream in (opened, shut):
        created, written = stream.pop("created_at_ms"), stream.pop("last_write_at_ms")
        assert before_ms <= created <= written <= after_ms
    assert opened == {
        "stream_id": "open",
        "status": "Open",
        "content_type": "text/plain; charset=utf-8",
        "tail_offset": 5,
    }
    assert shut == {"stream_id": "shut", "status": "Closed", "content_type": "application/json", "tail_offset": 1}
    assert body["has_more"] is False


def test_listing_is_sorted_by_stream_id_as_bytes(client: httpx.Client, bucket: str) -> None:
    created = ["b", "a", "B", "a-b", "a b", "é", "a", "ab", "z", "10", "9", "𝄞", "\ufffd", "~", "_"]
    for name in created:
        client.put(f"/{bucket}/{name}", headers=TEXT)
    expected = sorted(set(created), key=lambda name: name.encode())
    assert names(client, bucket) == expected
    for limit in (1, 2, 5):
        assert all_names(client, bucket, limit) == expected


def test_listing_of_an_empty_bucket_has_no_cursor(client: httpx.Client, bucket: str) -> None:
    body = page(client, bucket)
    assert (body["streams"], body["next_cursor"], body["has_more"]) == ([], None, False)


def test_prefix_after_and_limit_select_together(client: httpx.Client, bucket: str) -> None:
    create(client, bucket, "user-1", "user-2", "user-3", "user", "userx", "agent-1", "z")
    assert names(client, bucket, prefix="user-") == ["user-1", "user-2", "user-3"]
    assert names(client, bucket, prefix="user") == ["user", "user-1", "user-2", "user-3", "userx"]
    assert names(client, bucket, prefix="user-", after="user-1") == ["user-2", "user-3"]
    assert names(client, bucket, prefix="user-", after="a") == ["user-1", "user-2", "user-3"]
    assert names(client, bucket, prefix="user-", after="v") == []
    assert names(client, bucket, after="user-1x") == ["user-2", "user-3", "userx", "z"], "a cursor need not exist"
    assert names(client, bucket, prefix="nobody") == []
    body = page(client, bucket, prefix="user-", limit=2)
    assert [stream["stream_id"] for stream in body["streams"]] == ["user-1", "user-2"]
    assert (body["next_cursor"], body["has_more"]) == ("user-2", True)
    body = page(client, bucket, prefix="user-", limit=3)
    assert (len(body["streams"]), body["has_more"]) == (3, False)


@pytest.mark.parametrize("limit", ["0", "1001", "-1", "x", "", "1.5", "99999999999999999999", "١"])
def test_limit_outside_1_to_1000_is_400(client: httpx.Client, bucket: str, limit: str) -> None:
    assert client.get(f"/{bucket}/streams", params={"limit": limit}).status_code == 400


@pytest.mark.parametrize("query", ["prefix=a&prefix=b", "after=%zz", "prefix=%FF", "limit=1&limit=2"])
def test_malformed_listing_query_is_400(client: httpx.Client, bucket: str, query: str) -> None:
    assert client.get(f"/{bucket}/streams?{query}").status_code == 400


def test_soft_deleted_and_expired_streams_are_not_listed(client: httpx.Client, bucket: str) -> None:
    client.put(f"/{bucket}/source", headers=TEXT, content=b"abc")
    client.put(f"/{bucket}/fork", headers={"stream-forked-from": f"/{bucket}/source"})
    client.put(f"/{bucket}/short", headers={**TEXT, "stream-ttl": "1"})
    client.put(f"/{bucket}/kept", headers={**TEXT, "stream-ttl": "3600"})
    assert names(client, bucket) == ["fork", "kept", "short", "source"]
    client.delete(f"/{bucket}/source")
    assert client.head(f"/{bucket}/source").status_code == 410
    deadline = time.monotonic() + SECONDS
    while client.head(f"/{bucket}/short").status_code == 200:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert names(client, bucket) == ["fork", "kept"], "expiry shows before the record that enacts it"
    assert client.delete(f"/{bucket}").status_code == 409, "a soft-deleted stream still holds its name"
    assert client.delete(f"/{bucket}/fork").status_code == 204
    assert names(client, bucket) == ["kept"]


def test_listing_is_the_same_before_and_after_flushes_and_a_restart(
    process: ServerProcess, client: httpx.Client, bucket: str
) -> None:
    created = [f"s{number:03d}" for number in range(60)]
    create(client, bucket, *created)
    wait_for_flush(client, process)
    for number in range(0, 60, 3):
        assert client.delete(f"/{bucket}/s{number:03d}").status_code == 204
    create(client, bucket, "s000", "s0005", "t")
    client.post(f"/{bucket}/s001", headers=TEXT, content=b"later")
    expected = sorted({*(set(created) - {f"s{number:03d}" for number in range(0, 60, 3)}), "s000", "s0005", "t"})
    before = page(client, bucket)
    assert [stream["stream_id"] for stream in before["streams"]] == expected
    assert all_names(client, bucket, 7) == expected
    wait_for_flush(client, process)
    assert page(client, bucket) == before
    assert all_names(client, bucket, 7) == expected
    process.kill()
    process.start()
    assert page(client, bucket) == before
    assert all_names(client, bucket, 1) == expected
    process.stop()
    process.start()
    assert page(client, bucket) == before
    assert client.get(f"/{bucket}").json()["streams"] == len(expected)


def test_pages_under_concurrent_creates_and_deletes_hold_every_lasting_stream_once(running: Server) -> None:
    """Streams that exist all the while are in each walk exactly once, whatever comes and goes between them."""
    lasting = [f"k{number:03d}" for number in range(0, 120, 2)]

    async def churn(client: httpx.AsyncClient, bucket: str, stop: asyncio.Event, start: int) -> None:
        number = start
        while not stop.is_set():
            name = f"/{bucket}/k{number % 120:03d}"
            assert (await client.put(name, headers=TEXT)).status_code in (200, 201)
            assert (await client.delete(name)).status_code == 204
            number += 8

    async def walk(client: httpx.AsyncClient, bucket: str, limit: int) -> list[str]:
        found: list[str] = []
        after = ""
        for _ in range(200):
            body = (await client.get(f"/{bucket}/streams", params={"limit": limit, "after": after})).json()
            found += [stream["stream_id"] for stream in body["streams"]]
            if not body["has_more"]:
                return found
            after = body["next_cursor"]
        raise AssertionError("the pages do not end")

    async def main() -> None:
        bucket = "churning"
        async with httpx.AsyncClient(base_url=running.url, timeout=SECONDS) as client:
            await client.put(f"/{bucket}")
            await asyncio.gather(*[client.put(f"/{bucket}/{name}", headers=TEXT) for name in lasting])
            stop = asyncio.Event()
            churning = [asyncio.ensure_future(churn(client, bucket, stop, start)) for start in (1, 3, 5, 7)]
            try:
                for limit in (1, 7, 20, 1000) * 2:
                    found = await walk(client, bucket, limit)
                    assert found == sorted(set(found)), "sorted, and nothing twice"
                    assert [name for name in found if name in lasting] == lasting, "nothing missing"
                    await asyncio.sleep(0.05)  # so that flushes every 200 ms fall between and into the walks
            finally:
                stop.set()
                await asyncio.gather(*churning)
            assert await walk(client, bucket, 9) == lasting

    asyncio.run(main())


# -- the same streams, under both kinds of path ------------------------------------------------------------------


def test_stream_of_a_bucket_is_the_same_under_v1(client: httpx.Client, bucket: str) -> None:
    assert client.put(f"/{bucket}/one", headers=TEXT, content=b"first").status_code == 201
    assert client.put(f"/v1/stream/{bucket}/one", headers=TEXT).status_code == 200
    assert client.post(f"/v1/stream/{bucket}/one", headers=TEXT, content=b" second").status_code == 204
    assert client.get(f"/{bucket}/one").content == client.get(f"/v1/stream/{bucket}/one").content == b"first second"
    heads = [client.head(path) for path in (f"/{bucket}/one", f"/v1/stream/{bucket}/one")]
    assert heads[0].headers["etag"] == heads[1].headers["etag"]
    assert client.put(f"/v1/stream/{bucket}/two", headers=TEXT).status_code == 201
    assert names(client, bucket) == ["one", "two"]
    assert client.delete(f"/v1/stream/{bucket}/one").status_code == 204
    assert client.get(f"/{bucket}/one").status_code == 404


def test_v1_creates_its_bucket_and_the_default_bucket_holds_plain_paths(client: httpx.Client) -> None:
    assert client.put("/v1/stream/implicit/deep/er", headers=TEXT).status_code == 201
    assert client.get("/implicit").json()["streams"] == 1
    assert names(client, "implicit") == ["deep/er"]
    assert client.put("/implicit").status_code == 409
    assert client.put("/v1/stream/plain", headers=TEXT, content=b"x").status_code == 201
    assert "plain" in names(client, "_default")
    assert client.get("/_default/plain").content == b"x"


def test_location_of_a_created_stream_is_the_url_it_was_created_by(client: httpx.Client, bucket: str) -> None:
    answer = client.put(f"/{bucket}/a%20b", headers=TEXT)
    assert answer.headers["location"] == str(client.base_url).rstrip("/") + f"/{bucket}/a%20b"


def test_every_base_operation_works_under_a_bucket(client: httpx.Client, bucket: str) -> None:
    path = f"/{bucket}/run"
    assert client.put(path, headers={"content-type": "application/json"}).status_code == 201
    producer = {"producer-id": "p", "producer-epoch": "0", "producer-seq": "0", "content-type": "application/json"}
    assert client.post(path, headers=producer, content=b'[{"n":1.00},2]').status_code == 200
    assert client.post(path, headers=producer, content=b'[{"n":1.00},2]').status_code == 204
    answer = client.get(path, params={"offset": "-1"})
    assert (answer.status_code, answer.content) == (200, b'[{"n":1.00},2]')
    tail = answer.headers["stream-next-offset"]
    assert client.get(path, params={"offset": tail}).content == b"[]"
    assert client.get(path, params={"offset": tail, "live": "long-poll"}).status_code == 204
    closing = client.post(path, headers={"stream-closed": "true"})
    assert (closing.status_code, closing.headers["stream-closed"]) == (204, "true")
    with client.stream("GET", path, params={"offset": "-1", "live": "sse"}) as events:
        lines = list(events.iter_lines())
    assert "event: data" in lines and any("streamClosed" in line for line in lines)
    assert client.delete(path).status_code == 204
    assert client.head(path).status_code == 404


# -- how much a read returns -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["max_bytes", "limit"])
def test_reads_of_at_most_so_many_bytes_join_to_the_whole(client: httpx.Client, bucket: str, name: str) -> None:
    path = f"/{bucket}/chunks"
    messages = [bytes([65 + number]) * (number % 7 + 1) for number in range(40)]
    client.put(path, headers=TEXT)
    for message in messages:
        client.post(path, headers=TEXT, content=message)
    whole = b"".join(messages)
    ends = {sum(map(len, messages[: count + 1])) for count in range(len(messages))}
    for size in (1, 7, 20, 1000):
        got, offset = b"", "-1"
        for _ in range(len(messages) + 1):
            answer = client.get(path, params={"offset": offset, name: size})
            assert answer.status_code == 200
            assert 0 < len(answer.content) <= max(size, 7), "about that much, but a whole message at least"
            got += answer.content
            assert len(got) in ends, "whole messages"
            offset = answer.headers["stream-next-offset"]
            if answer.headers.get("stream-up-to-date") == "true":
                break
            assert len(got) < len(whole)
        assert got == whole


@pytest.mark.parametrize("value", ["0", "-1", "x", "", "1.5", "9" * 16])
def test_max_bytes_that_is_no_positive_number_is_400(client: httpx.Client, bucket: str, value: str) -> None:
    create(client, bucket, "one")
    assert client.get(f"/{bucket}/one", params={"offset": "-1", "max_bytes": value}).status_code == 400


def test_max_bytes_bounds_a_long_poll_too(client: httpx.Client, bucket: str) -> None:
    path = f"/{bucket}/poll"
    client.put(path, headers=TEXT)
    for message in (b"one", b"two", b"three"):
        client.post(path, headers=TEXT, content=message)
    answer = client.get(path, params={"offset": "-1", "live": "long-poll", "max_bytes": 4})
    assert (answer.status_code, answer.content) == (200, b"one")


@pytest.mark.parametrize("form", ["0000000000000000_{:016d}", "{:020d}"])
def test_cursor_that_is_an_offset_stands_in_for_the_offset(client: httpx.Client, bucket: str, form: str) -> None:
    path = f"/{bucket}/cursor"
    client.put(path, headers=TEXT)
    for message in (b"one", b"two", b"three"):
        client.post(path, headers=TEXT, content=message)
    assert client.get(path, params={"cursor": form.format(3)}).content == b"twothree"
    assert client.get(path, params={"cursor": form.format(6), "live": "long-poll"}).content == b"three"
    assert client.get(path, params={"cursor": form.format(3), "offset": form.format(6)}).content == b"three"


def test_error_bodies_are_json_with_code_and_message(client: httpx.Client) -> None:
    error = json.loads(client.get("/nowhere").content)["error"]
    assert error["code"] == "bucket_not_found" and "nowhere" in error["message"]


def test_bucket_survives_kill_right_after_201(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "data") as server, httpx.Client(base_url=server.url, timeout=SECONDS) as client:
        assert client.put("/durable").status_code == 201
        server.kill()
        server.start()
        assert client.get("/durable").json()["streams"] == 0
        assert client.delete("/durable").status_code == 204
        server.kill()
        server.start()
        assert client.get("/durable").status_code == 404
