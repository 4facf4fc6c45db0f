"""The feed over HTTP: every message and event of a bucket in commit order, as NDJSON, SSE and Arrow."""

from __future__ import annotations

import asyncio
import json
import random
import time
from base64 import b64decode
from collections.abc import Iterator
from itertools import count, pairwise
from typing import Any

import httpx
import pyarrow as arrow
import pytest

from support.raw_http import RawConnection
from support.server import ServerProcess
from support.serving import Serve, Server
from support.sse_parser import Event, parse_events

TEXT = {"content-type": "text/plain"}
JSON = {"content-type": "application/json"}
BYTES = {"content-type": "application/octet-stream"}
ARROW = "application/vnd.apache.arrow.stream"
SECONDS = 30.0

Item = dict[str, Any]

_numbers = count()


@pytest.fixture(scope="module")
def running(serve: Serve) -> Server:
    # History moves to the cold tier all the while and does not stay in memory: the feed must look the same.
    flush = ("cold.flush_interval=200ms", "hot.keep_bytes=0")
    settings = ("read.long_poll_timeout=500ms", "read.sse_lifetime=5s", *flush)
    return serve(*settings)


@pytest.fixture(scope="module")
def client(running: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=running.url, timeout=SECONDS) as opened:
        yield opened


@pytest.fixture
def bucket(client: httpx.Client) -> str:
    name = f"feed-{next(_numbers)}"
    assert client.put(f"/{name}").status_code == 201
    return name


def token(offset: int) -> str:
    return f"0000000000000000_{offset:016d}"


def create(client: httpx.Client, path: str, headers: dict[str, str], body: bytes = b"") -> None:
    assert client.put(path, headers=headers, content=body).status_code == 201


def append(client: httpx.Client, path: str, headers: dict[str, str], body: bytes) -> None:
    assert client.post(path, headers=headers, content=body).status_code in (200, 204)


def page(client: httpx.Client, bucket: str, **query: Any) -> tuple[list[Item], httpx.Response]:
    answer = client.get(f"/{bucket}/streams/feed", params=query)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert answer.headers["cache-control"] == "no-store"
    items = lines(answer.content)
    assert all(item["bucket"] == bucket for item in items)
    return items, answer


def lines(body: bytes) -> list[Item]:
    assert body == b"" or body.endswith(b"\n")
    return [json.loads(line) for line in body.splitlines()]


def everything(client: httpx.Client, bucket: str, after: str = "", **query: Any) -> list[Item]:
    """All pages from a token on."""
    found: list[Item] = []
    for _ in range(10_000):
        items, answer = page(client, bucket, after=after, **query)
        found += items
        after = answer.headers["stream-feed-token"]
        if answer.headers.get("stream-up-to-date") == "true":
            return found
    raise AssertionError("the feed does not end")


def brief(items: list[Item]) -> list[tuple[Any, ...]]:
    return [(item["event"], item["stream"], item.get("payload")) for item in items]


def payload(item: Item) -> bytes:
    if item["encoding"] == "base64":
        return b64decode(item["payload"], validate=True)
    return (item["payload"] if item["encoding"] == "text" else json.dumps(item["payload"])).encode()


def wait_for_flush(running: Server, client: httpx.Client) -> None:
    """Wait until the catalog was written twice: the first may have been under way already."""
    catalog = running.data_dir / "catalog" / "data.mdb"
    deadline = time.monotonic() + SECONDS
    for _ in range(2):
        changed = catalog.stat().st_mtime_ns
        while catalog.stat().st_mtime_ns == changed:
            assert time.monotonic() < deadline, "no flush was written"
            client.put(f"/v1/stream/flushes/{next(_numbers)}", headers=TEXT)
            time.sleep(0.02)


# -- what is in it -----------------------------------------------------------------------------------------------


def test_messages_and_events_of_all_streams_come_in_commit_order(client: httpx.Client, bucket: str) -> None:
    create(client, f"/{bucket}/a", TEXT)
    create(client, f"/{bucket}/b", TEXT, b"first of b")
    append(client, f"/{bucket}/a", TEXT, b"one")
    append(client, f"/{bucket}/b", TEXT, b"two")
    client.put(f"/{bucket}/a/snapshot/{token(3)}", content=b"state")
    append(client, f"/{bucket}/a", TEXT, b"three")
    client.post(f"/{bucket}/b", headers={**TEXT, "stream-closed": "true"}, content=b"last of b")
    client.post(f"/{bucket}/a", headers={"stream-closed": "true"})
    create(client, f"/{bucket}/c", {**TEXT, "stream-closed": "true"}, b"born closed")
    items, answer = page(client, bucket)
    assert answer.headers["stream-up-to-date"] == "true"
    # What a snapshot trimmed may be gone, nothing else.
    assert [item for item in brief(items) if item[2] != "one"] == [
        ("created", "a", None),
        ("created", "b", None),
        ("message", "b", "first of b"),
        ("message", "b", "two"),
        ("snapshot", "a", None),
        ("message", "a", "three"),
        ("message", "b", "last of b"),
        ("closed", "b", None),
        ("closed", "a", None),
        ("created", "c", None),
        ("message", "c", "born closed"),
        ("closed", "c", None),
    ]
    positions = [item["position"] for item in items]
    assert positions == sorted(positions)


def test_items_say_where_when_and_what(client: httpx.Client, bucket: str) -> None:
    before_ms = int(time.time() * 1000)
    create(client, f"/{bucket}/run", {"content-type": "text/plain; charset=utf-8"}, b"hello")
    append(client, f"/{bucket}/run", TEXT, b"world!")
    client.put(f"/{bucket}/run/snapshot/{token(5)}", headers={"content-type": "x/y"}, content=b"state")
    items = everything(client, bucket)
    after_ms = int(time.time() * 1000)
    assert all(before_ms <= item.pop("appended_at_ms") <= after_ms for item in items)
    positions = [item.pop("position") for item in items]
    assert positions == sorted(set(positions))
    kept = {"bucket": bucket, "stream": "run", "content_type": "text/plain; charset=utf-8"}
    created, *rest = items
    assert created == {"event": "created", "offset": token(0), "next_offset": token(0), **kept}
    message = {"event": "message", "offset": token(5), "next_offset": token(11), "encoding": "text", **kept}
    assert {**message, "payload": "world!"} in rest
    snapshot = {"event": "snapshot", "offset": token(5), "next_offset": token(5), **kept, "content_type": "x/y"}
    assert rest[-1] == snapshot


def test_payload_is_json_text_or_base64_by_content_type(client: httpx.Client, bucket: str) -> None:
    create(client, f"/{bucket}/json", JSON)
    append(client, f"/{bucket}/json", JSON, b'[{"b" : 1.00, "a":12345678901234567890123456789012}, "\\u00e9" ,null]')
    create(client, f"/{bucket}/text", {"content-type": "text/markdown; charset=utf-8"}, 'é\r\n"q"\u2028\0'.encode())
    create(client, f"/{bucket}/bad-text", TEXT, b"\xff\xfe")
    create(client, f"/{bucket}/bytes", BYTES, bytes(range(256)))
    create(client, f"/{bucket}/image", {"content-type": "image/png"}, b"plain ascii")
    answer = client.get(f"/{bucket}/streams/feed")
    messages = [item for item in lines(answer.content) if item["event"] == "message"]
    assert [(item["stream"], item["encoding"]) for item in messages] == [
        ("json", "json"),
        ("json", "json"),
        ("json", "json"),
        ("text", "text"),
        ("bad-text", "base64"),
        ("bytes", "base64"),
        ("image", "base64"),
    ]
    raw = [line for line in answer.content.split(b"\n") if b'"encoding":"json"' in line]
    exact = [b'{"b" : 1.00, "a":12345678901234567890123456789012}', b'"\\u00e9"', b"null"]
    for line, payload_bytes in zip(raw, exact, strict=True):
        assert line.endswith(b'"payload":' + payload_bytes + b"}"), "JSON is not re-encoded"
    assert messages[3]["payload"] == 'é\r\n"q"\u2028\0'
    assert [payload(item) for item in messages[4:]] == [b"\xff\xfe", bytes(range(256)), b"plain ascii"]


@pytest.mark.parametrize("body", [b'{\n  "a": 1\n}', b'{\r\n "a":\r1 }', b"[[1,\n2]]"])
def test_json_that_spans_lines_is_still_one_line_of_ndjson(client: httpx.Client, bucket: str, body: bytes) -> None:
    create(client, f"/{bucket}/pretty", JSON, body)
    answer = client.get(f"/{bucket}/streams/feed")
    assert answer.content.count(b"\n") == 2, "created and message"
    value = json.loads(body)
    assert [item.get("payload") for item in lines(answer.content)] == [None, value[0] if body[:1] == b"[" else value]


def test_deleted_and_expired_streams_are_events(client: httpx.Client, bucket: str) -> None:
    create(client, f"/{bucket}/gone", TEXT, b"x")
    create(client, f"/{bucket}/brief", {**TEXT, "stream-ttl": "1"})
    start = page(client, bucket)[1].headers["stream-feed-token"]
    client.delete(f"/{bucket}/gone")
    deadline = time.monotonic() + SECONDS
    found: list[Item] = []
    while len(found) < 2:
        assert time.monotonic() < deadline
        items, answer = page(client, bucket, after=start, live="long-poll")
        start = answer.headers["stream-feed-token"]
        found += items
    assert brief(found) == [("deleted", "gone", None), ("expired", "brief", None)]


def test_recreated_stream_shows_its_new_messages_only(client: httpx.Client, bucket: str) -> None:
    create(client, f"/{bucket}/again", TEXT, b"old")
    client.delete(f"/{bucket}/again")
    create(client, f"/{bucket}/again", TEXT, b"new")
    found = brief(everything(client, bucket))
    assert found[-3:] == [("deleted", "again", None), ("created", "again", None), ("message", "again", "new")]
    assert ("message", "again", "old") not in found, "deleted is deleted"


def test_messages_of_a_deleted_stream_leave_the_feed_wherever_they_were(
    running: Server, client: httpx.Client, bucket: str
) -> None:
    create(client, f"/{bucket}/cold", TEXT, b"secret")
    create(client, f"/{bucket}/kept", TEXT, b"kept")
    wait_for_flush(running, client)
    assert ("message", "cold", "secret") in brief(everything(client, bucket))
    assert client.delete(f"/{bucket}/cold").status_code == 204
    for _ in range(2):
        found = brief(everything(client, bucket))
        assert ("message", "cold", "secret") not in found
        assert ("message", "kept", "kept") in found
        assert ("deleted", "cold", None) in found
        wait_for_flush(running, client)


def test_fork_appears_at_its_offset_with_its_own_messages_only(client: httpx.Client, bucket: str) -> None:
    create(client, f"/{bucket}/source", TEXT, b"shared")
    client.put(f"/{bucket}/fork", headers={"stream-forked-from": f"/{bucket}/source"})
    append(client, f"/{bucket}/fork", TEXT, b"own")
    items = [item for item in everything(client, bucket) if item["stream"] == "fork"]
    assert brief(items) == [("created", "fork", None), ("message", "fork", "own")]
    assert (items[0]["offset"], items[1]["offset"]) == (token(6), token(6))


def test_feed_holds_one_bucket_only_and_v1_writes_too(client: httpx.Client, bucket: str) -> None:
    create(client, f"/v1/stream/{bucket}/one", TEXT, b"mine")
    create(client, f"/v1/stream/{bucket}-other/one", TEXT, b"theirs")
    append(client, f"/v1/stream/{bucket}/one", TEXT, b"mine too")
    assert brief(everything(client, bucket))[1:] == [("message", "one", "mine"), ("message", "one", "mine too")]


def test_prefix_selects_streams_and_its_token_covers_the_others(client: httpx.Client, bucket: str) -> None:
    for number in range(3):
        create(client, f"/{bucket}/user-{number}", TEXT, b"u%d" % number)
        create(client, f"/{bucket}/agent-{number}", TEXT, b"a%d" % number)
    client.delete(f"/{bucket}/user-1")
    expected = [item for item in brief(everything(client, bucket)) if item[1].startswith("user-")]
    assert ("deleted", "user-1", None) in expected
    items, answer = page(client, bucket, prefix="user-")
    assert brief(items) == expected
    assert brief(everything(client, bucket, prefix="user-", max_bytes=1)) == expected
    append(client, f"/{bucket}/agent-1", TEXT, b"later")
    later, answer = page(client, bucket, prefix="user-", after=answer.headers["stream-feed-token"])
    assert (later, answer.headers["stream-up-to-date"]) == ([], "true")
    assert page(client, bucket, prefix="nobody")[0] == []


# -- tokens ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value", ["x", "1", "0", "0.", ".5", "1.5", "-1", "0.-1", "0.1.2", "0.x", "0.1 ", "0." + "9" * 19]
)
def test_malformed_token_is_400(client: httpx.Client, bucket: str, value: str) -> None:
    for mode in ({}, {"live": "sse"}, {"live": "long-poll"}):
        answer = client.get(f"/{bucket}/streams/feed", params={"after": value, **mode})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_token")


@pytest.mark.parametrize("query", ["live=x", "live=", "max_bytes=0", "max_bytes=x", "prefix=a&prefix=b", "after=%zz"])
def test_malformed_query_is_400(client: httpx.Client, bucket: str, query: str) -> None:
    assert client.get(f"/{bucket}/streams/feed?{query}").status_code == 400


def test_now_starts_behind_everything(client: httpx.Client, bucket: str) -> None:
    create(client, f"/{bucket}/s", TEXT, b"before")
    items, answer = page(client, bucket, after="now")
    assert items == []
    append(client, f"/{bucket}/s", TEXT, b"after")
    items, _ = page(client, bucket, after=answer.headers["stream-feed-token"])
    assert brief(items) == [("message", "s", "after")]


def test_post_and_put_on_the_feed_are_405(client: httpx.Client, bucket: str) -> None:
    for method in ("PUT", "POST", "DELETE"):
        assert client.request(method, f"/{bucket}/streams/feed").status_code == 405


@pytest.fixture(scope="module")
def history(running: Server, client: httpx.Client) -> tuple[str, list[list[Item]]]:
    """A bucket that many wrote to at once, and what each writer was told: its messages with their end offsets."""
    bucket = "history"
    assert client.put(f"/{bucket}").status_code == 201

    async def write(other: httpx.AsyncClient, writer: int) -> list[Item]:
        choice = random.Random(writer)
        told: list[Item] = []
        for number in range(40):
            stream = f"s{choice.randrange(12)}"
            headers = JSON if int(stream[1:]) % 2 else TEXT
            values = [f"{writer}.{number}.{index}" for index in range(choice.randrange(1, 4) if headers is JSON else 1)]
            body = json.dumps(values).encode() if headers is JSON else values[0].encode()
            answer = await other.post(f"/{bucket}/{stream}", headers=headers, content=body)
            assert answer.status_code == 204
            told.append({"stream": stream, "values": values, "end": answer.headers["stream-next-offset"]})
            if number == 20 + writer:
                await other.put(f"/{bucket}/w{writer}", headers={**TEXT, "stream-closed": "true"}, content=b"closing")
        return told

    async def main() -> list[list[Item]]:
        async with httpx.AsyncClient(base_url=running.url, timeout=SECONDS) as other:
            for stream in range(12):
                headers = JSON if stream % 2 else TEXT
                await other.put(f"/{bucket}/s{stream}", headers=headers)
            return await asyncio.gather(*[write(other, writer) for writer in range(8)])

    return bucket, asyncio.run(main())


def test_order_is_the_commit_order_of_all_concurrent_writers(
    client: httpx.Client, history: tuple[str, list[list[Item]]]
) -> None:
    bucket, told = history
    items = everything(client, bucket)
    messages = [item for item in items if item["event"] == "message" and item["stream"].startswith("s")]
    positions = [item["position"] for item in messages]
    assert positions == sorted(set(positions)), "one order, every message with a place of its own"
    # Each writer wrote one after another, so the feed has its messages in that order.
    for writer, acknowledged in enumerate(told):
        own = [item["payload"] for item in messages if item["payload"].startswith(f"{writer}.")]
        assert own == [value for entry in acknowledged for value in entry["values"]]
    # Each stream's messages come in the order of its offsets, without holes, and are what reads return.
    for stream in {item["stream"] for item in messages}:
        own_items = [item for item in messages if item["stream"] == stream]
        assert own_items[0]["offset"] == token(0)
        for item, following in pairwise(own_items):
            assert item["next_offset"] == following["offset"]
        read = client.get(f"/{bucket}/{stream}", params={"offset": "-1"})
        payloads = [item["payload"] for item in own_items]
        assert (read.json() if int(stream[1:]) % 2 else read.text) == (
            payloads if int(stream[1:]) % 2 else "".join(payloads)
        )
    ends = {(item["stream"], item["next_offset"]) for item in messages}
    assert all((entry["stream"], entry["end"]) in ends for acknowledged in told for entry in acknowledged)


def test_feed_resumes_from_the_token_of_any_page_without_loss_or_duplicates(
    client: httpx.Client, history: tuple[str, list[list[Item]]]
) -> None:
    bucket, _ = history
    whole = everything(client, bucket)
    choice = random.Random(11)
    for round_number in range(4):
        found: list[Item] = []
        after = ""
        for _ in range(2000):
            # The first round takes the smallest pages there are: one item each.
            size = 1 if round_number == 0 else choice.choice([1, 70, 200, 1000, 5000])
            items, answer = page(client, bucket, after=after, max_bytes=size)
            found += items
            after = answer.headers["stream-feed-token"]
            if answer.headers.get("stream-up-to-date") == "true":
                break
            assert items, "a page that is not the last one brings something"
        assert found == whole


def test_feed_resumes_behind_any_item_without_loss_or_duplicates(
    client: httpx.Client, history: tuple[str, list[list[Item]]]
) -> None:
    bucket, _ = history
    whole = everything(client, bucket)
    for index in sorted(random.Random(5).sample(range(len(whole)), 60)):
        assert everything(client, bucket, after=f"0.{whole[index]['position']}") == whole[index + 1 :]


def test_page_cut_between_the_last_message_and_the_close_loses_neither(client: httpx.Client, bucket: str) -> None:
    create(client, f"/{bucket}/s", TEXT)
    client.post(f"/{bucket}/s", headers={**TEXT, "stream-closed": "true"}, content=b"last")
    create(client, f"/{bucket}/t", {**TEXT, "stream-closed": "true"})
    whole = [
        ("created", "s", None),
        ("message", "s", "last"),
        ("closed", "s", None),
        ("created", "t", None),
        ("closed", "t", None),
    ]
    assert brief(everything(client, bucket)) == whole
    assert brief(everything(client, bucket, max_bytes=1)) == whole


def test_position_of_every_item_is_its_own(client: httpx.Client, bucket: str) -> None:
    """Tokens are positions: two items that share one could not be told apart by whoever resumes between them."""
    create(client, f"/{bucket}/s", {**TEXT, "stream-closed": "true"}, b"only")
    create(client, f"/{bucket}/t", {**TEXT, "stream-closed": "true"})
    items = everything(client, bucket)
    positions = [item["position"] for item in items]
    assert len(set(positions)) == len(positions), brief(items)


@pytest.mark.parametrize("way", ["kill", "stop"])
def test_feed_is_the_same_after_a_restart(
    process: ServerProcess, client: httpx.Client, history: tuple[str, list[list[Item]]], way: str
) -> None:
    bucket, _ = history
    stream = f"restart-{way}"
    create(client, f"/{bucket}/{stream}", BYTES, b"\x00kept")
    create(client, f"/{bucket}/{stream}-deleted", TEXT, b"x")
    client.post(f"/{bucket}/{stream}-deleted", headers={"stream-closed": "true"})
    assert client.delete(f"/{bucket}/{stream}-deleted").status_code == 204
    client.put(f"/{bucket}/{stream}/snapshot/{token(5)}", content=b"state")
    append(client, f"/{bucket}/{stream}", BYTES, b"behind the snapshot")
    # Past a flush, so that recovery does not simply replay the whole log.
    wait_for_flush(process, client)
    before = everything(client, bucket)
    middle = before[len(before) // 2]["position"]
    if way == "kill":
        process.kill()
    else:
        process.stop()
    process.start()
    assert everything(client, bucket) == before
    assert everything(client, bucket, after=f"0.{middle}", max_bytes=300) == before[len(before) // 2 + 1 :]


# -- live --------------------------------------------------------------------------------------------------------


def test_long_poll_wakes_for_the_next_message(running: Server, client: httpx.Client, bucket: str) -> None:
    create(client, f"/{bucket}/s", TEXT)
    after = page(client, bucket)[1].headers["stream-feed-token"]
    for body in (b"one", b"two"):
        with RawConnection(running.url) as waiting:
            waiting.send(waiting.request("GET", f"/{bucket}/streams/feed?after={after}&live=long-poll"))
            append(client, f"/{bucket}/s", TEXT, body)
            answer = waiting.answer()
        assert answer.status == 200
        assert brief(lines(answer.body)) == [("message", "s", body.decode())]
        after = answer.headers["stream-feed-token"]


def test_long_poll_with_a_prefix_sleeps_through_the_others(running: Server, client: httpx.Client, bucket: str) -> None:
    create(client, f"/{bucket}/mine", TEXT)
    create(client, f"/{bucket}/other", TEXT)
    after = page(client, bucket)[1].headers["stream-feed-token"]
    with RawConnection(running.url) as waiting:
        waiting.send(waiting.request("GET", f"/{bucket}/streams/feed?after={after}&live=long-poll&prefix=mine"))
        append(client, f"/{bucket}/other", TEXT, b"not for us")
        append(client, f"/{bucket}/mine", TEXT, b"for us")
        answer = waiting.answer()
    assert brief(lines(answer.body)) == [("message", "mine", "for us")]
    assert page(client, bucket, after=answer.headers["stream-feed-token"])[0] == []


def test_long_poll_without_news_ends_empty_with_a_token(client: httpx.Client, bucket: str) -> None:
    items, answer = page(client, bucket, after="now", live="long-poll")
    assert items == []
    assert answer.headers["stream-up-to-date"] == "true"
    create(client, f"/{bucket}/s", TEXT)
    assert brief(page(client, bucket, after=answer.headers["stream-feed-token"])[0]) == [("created", "s", None)]


def test_long_poll_answers_at_once_when_there_is_something(client: httpx.Client, bucket: str) -> None:
    create(client, f"/{bucket}/s", TEXT, b"there")
    assert brief(page(client, bucket, live="long-poll")[0]) == [("created", "s", None), ("message", "s", "there")]


class Follower:
    """One SSE connection to a feed."""

    def __init__(self, url: str, target: str, last_event_id: str | None = None) -> None:
        self._url, self._target = url, target
        self.received = b""
        self._connect(last_event_id)

    def _connect(self, last_event_id: str | None) -> None:
        self.connection = RawConnection(self._url)
        headers = [("Accept", "text/event-stream")]
        if last_event_id is not None:
            headers.append(("Last-Event-ID", last_event_id))
        self.connection.send(self.connection.request("GET", self._target, headers))
        status, fields = self.connection.head()
        assert (status, fields["content-type"]) == (200, "text/event-stream")
        assert "content-length" not in fields

    def __enter__(self) -> Follower:
        return self

    def __exit__(self, *exc: object) -> None:
        self.connection.socket.close()

    def until(self, items: int, *, resumes: bool = False) -> list[Event]:
        """The events so far, once there are that many that are not control events.

        One that resumes goes on over another connection when its own has lasted as long as one may.
        """
        deadline = time.monotonic() + SECONDS
        while True:
            events = [event for event in parse_events(self.received) if event.type != "control"]
            if len(events) >= items:
                return events
            chunk = self.connection.chunk(deadline)
            if chunk is None:
                assert resumes, "the feed ended"
                ids = [event.id for event in parse_events(self.received) if event.id]
                self.connection.socket.close()
                self._connect(ids[-1] if ids else None)
            else:
                self.received += chunk

    def control(self) -> Event:
        """The first control event."""
        deadline = time.monotonic() + SECONDS
        while True:
            for event in parse_events(self.received):
                if event.type == "control":
                    return event
            chunk = self.connection.chunk(deadline)
            assert chunk is not None, "the feed ended"
            self.received += chunk


def test_sse_brings_past_and_present_with_ids(running: Server, client: httpx.Client, bucket: str) -> None:
    create(client, f"/{bucket}/s", TEXT, b"past")
    with Follower(running.url, f"/{bucket}/streams/feed?live=sse") as follower:
        follower.until(2)
        append(client, f"/{bucket}/s", TEXT, b"present")
        events = follower.until(3)
        assert [(event.type, json.loads(event.data).get("payload")) for event in events] == [
            ("created", None),
            ("message", "past"),
            ("message", "present"),
        ]
        assert [event.id for event in events] == [f"0.{json.loads(event.data)['position']}" for event in events]
        assert [json.loads(event.data) for event in events] == everything(client, bucket)
        control = json.loads(follower.control().data)
        assert control["upToDate"] is True
        assert page(client, bucket, after=control["token"])[0] == everything(client, bucket)[2:]


@pytest.mark.parametrize("query", ["", "&after=0.1"])
def test_sse_resumes_behind_last_event_id_as_an_event_source_does(
    running: Server, client: httpx.Client, bucket: str, query: str
) -> None:
    """An EventSource reconnects to the URL it was given, with the id of the last event beside it: the id counts."""
    target = f"/{bucket}/streams/feed?live=sse{query}"
    create(client, f"/{bucket}/s", TEXT)
    for number in range(6):
        append(client, f"/{bucket}/s", TEXT, b"%d" % number)
    with Follower(running.url, target) as follower:
        whole = follower.until(7)
    for index in (0, 3, 5):
        with Follower(running.url, target, whole[index].id) as follower:
            assert follower.until(6 - index) == whole[index + 1 :]


def test_sse_of_an_event_with_lines_keeps_its_text(running: Server, client: httpx.Client, bucket: str) -> None:
    create(client, f"/{bucket}/s", TEXT, b"a\nb\r\nc\rd\n\n: not a comment\nevent: forged\n\n")
    create(client, f"/{bucket}/j", JSON, b'{\n "a":\r\n 1}')
    with Follower(running.url, f"/{bucket}/streams/feed?live=sse") as follower:
        events = follower.until(4)
    assert json.loads(events[1].data)["payload"] == "a\nb\r\nc\rd\n\n: not a comment\nevent: forged\n\n"
    assert json.loads(events[3].data)["payload"] == {"a": 1}


def test_sse_of_an_empty_bucket_says_where_it_stands(running: Server, client: httpx.Client, bucket: str) -> None:
    for query in ("", "&after=now", "&prefix=nobody"):
        with Follower(running.url, f"/{bucket}/streams/feed?live=sse{query}") as follower:
            assert json.loads(follower.control().data)["upToDate"] is True


def test_sse_with_a_prefix_follows_matching_streams_only(running: Server, client: httpx.Client, bucket: str) -> None:
    create(client, f"/{bucket}/mine", TEXT)
    create(client, f"/{bucket}/other", TEXT)
    with Follower(running.url, f"/{bucket}/streams/feed?live=sse&prefix=mine") as follower:
        for number in range(5):
            append(client, f"/{bucket}/other", TEXT, b"no")
            append(client, f"/{bucket}/mine", TEXT, b"%d" % number)
        follower.until(6)  # what is deleted before it is read is not sent
        client.delete(f"/{bucket}/mine")
        events = follower.until(7)
    assert [json.loads(event.data)["stream"] for event in events] == ["mine"] * 7
    assert events[-1].type == "deleted"


def test_sse_under_concurrent_writers_is_the_feed(running: Server, client: httpx.Client, bucket: str) -> None:
    async def write() -> None:
        async with httpx.AsyncClient(base_url=running.url, timeout=SECONDS) as other:

            async def one(writer: int) -> None:
                await other.put(f"/{bucket}/w{writer}", headers=TEXT)
                for number in range(20):
                    body = b"%d-%d" % (writer, number)
                    assert (await other.post(f"/{bucket}/w{writer}", headers=TEXT, content=body)).status_code == 204

            await asyncio.gather(*map(one, range(6)))

    with Follower(running.url, f"/{bucket}/streams/feed?live=sse") as follower:
        asyncio.run(write())
        events = follower.until(6 * 21, resumes=True)
    assert [json.loads(event.data) for event in events] == everything(client, bucket)


# -- Arrow -------------------------------------------------------------------------------------------------------


def read_arrow(client: httpx.Client, bucket: str, **query: Any) -> tuple[arrow.Table, httpx.Response]:
    answer = client.get(f"/{bucket}/streams/feed", params=query, headers={"accept": ARROW})
    assert answer.status_code == 200
    assert answer.headers["content-type"] == ARROW
    with arrow.ipc.open_stream(answer.content) as reader:
        return reader.read_all(), answer


def test_arrow_has_the_same_items_with_the_columns_of_a_segment(client: httpx.Client, bucket: str) -> None:
    create(client, f"/{bucket}/bytes", BYTES, bytes(range(256)))
    create(client, f"/{bucket}/json", JSON, b'[{"a" : 1.0}, "x"]')
    client.post(f"/{bucket}/bytes", headers={"stream-closed": "true"})
    table, answer = read_arrow(client, bucket)
    columns = "bucket stream offset_start offset_end shard position appended_at content_type payload event incarnation"
    assert table.schema.names == columns.split()
    assert str(table.schema.field("appended_at").type) == "timestamp[ms, tz=UTC]"
    assert table.schema.field("payload").type == arrow.binary()
    items = everything(client, bucket)
    rows = table.to_pylist()
    assert [
        (row["event"], row["stream"], row["position"], token(row["offset_start"]), token(row["offset_end"]))
        for row in rows
    ] == [(item["event"], item["stream"], item["position"], item["offset"], item["next_offset"]) for item in items]
    assert [int(row["appended_at"].timestamp() * 1000 + 0.5) for row in rows] == [i["appended_at_ms"] for i in items]
    assert [row["payload"] for row in rows] == [None, bytes(range(256)), None, b'{"a" : 1.0}', b'"x"', None]
    assert {(row["bucket"], row["shard"]) for row in rows} == {(bucket, 0)}
    assert read_arrow(client, bucket, after=answer.headers["stream-feed-token"])[0].num_rows == 0
    assert answer.headers["vary"] == "accept"


def test_arrow_pages_join_to_the_whole(client: httpx.Client, history: tuple[str, list[list[Item]]]) -> None:
    bucket, _ = history
    expected = [(item["position"], item["event"]) for item in everything(client, bucket)]
    found: list[tuple[int, str]] = []
    after = ""
    for _ in range(2000):
        table, answer = read_arrow(client, bucket, after=after, max_bytes=2000)
        found += [(row["position"], row["event"]) for row in table.to_pylist()]
        after = answer.headers["stream-feed-token"]
        if answer.headers.get("stream-up-to-date") == "true":
            break
    assert found == expected


def test_arrow_of_nothing_is_an_empty_stream_with_its_schema(client: httpx.Client, bucket: str) -> None:
    table, _ = read_arrow(client, bucket)
    assert table.num_rows == 0
    assert "payload" in table.schema.names


def test_arrow_long_poll_wakes(running: Server, client: httpx.Client, bucket: str) -> None:
    create(client, f"/{bucket}/s", TEXT)
    after = page(client, bucket)[1].headers["stream-feed-token"]
    with RawConnection(running.url) as waiting:
        target = f"/{bucket}/streams/feed?after={after}&live=long-poll"
        waiting.send(waiting.request("GET", target, [("Accept", ARROW)]))
        append(client, f"/{bucket}/s", TEXT, b"woken")
        answer = waiting.answer()
    with arrow.ipc.open_stream(answer.body) as reader:
        rows = reader.read_all().to_pylist()
    assert [row["payload"] for row in rows] == [b"woken"]
