"""Reads that go on where others ended: event ids, cursors, and streams that are not the ones they were."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count

import httpx
import pytest

from support.serving import Serve
from support.sse_parser import Event, parse_events

ADAPTERS = ("in-process", "asgi")
TEXT = {"content-type": "text/plain"}
JSON = {"content-type": "application/json"}
TRUE = {"stream-closed": "true"}

_numbers = count()


@pytest.fixture(scope="module")
def client(serve: Serve) -> Iterator[httpx.Client]:
    settings = (
        "read.sse_lifetime=500ms",
        "read.long_poll_timeout=300ms",
        "cold.flush_interval=200ms",
        "hot.keep_bytes=0",
    )
    with httpx.Client(base_url=serve(*settings).url, timeout=30) as opened:
        yield opened


@pytest.fixture
def path(client: httpx.Client) -> str:
    name = f"/v1/stream/resuming/{next(_numbers)}"
    assert client.put(name, headers=TEXT, content=b"one").status_code == 201
    return name


def token(offset: int) -> str:
    return f"0000000000000000_{offset:016d}"


def recreate(client: httpx.Client, path: str, body: bytes) -> None:
    assert client.delete(path).status_code == 204
    assert client.put(path, headers=TEXT, content=body).status_code == 201


def follow(client: httpx.Client, target: str, last_event_id: str | None = None) -> list[Event]:
    """All events of one connection."""
    headers = {"last-event-id": last_event_id} if last_event_id is not None else {}
    answer = client.get(target, headers=headers)
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/event-stream")
    return parse_events(answer.content)


# -- EventSource ---------------------------------------------------------------------------------------------


def test_every_event_has_the_offset_to_go_on_from_as_its_id(client: httpx.Client, path: str) -> None:
    events = follow(client, f"{path}?offset=-1&live=sse")
    assert [(event.type, event.id) for event in events] == [("data", token(3)), ("control", token(3))]
    assert json.loads(events[1].data)["streamNextOffset"] == token(3)


def test_an_event_source_that_began_at_the_tail_has_an_id_before_there_is_data(client: httpx.Client, path: str) -> None:
    """Without it, one that reconnects before the first message would miss what came in between."""
    (control,) = follow(client, f"{path}?offset=now&live=sse")
    assert (control.type, control.id) == ("control", token(3))
    client.post(path, headers=TEXT, content=b"two")
    events = follow(client, f"{path}?offset=now&live=sse", control.id)
    assert [event.data for event in events if event.type == "data"] == ["two"]


@pytest.mark.parametrize("offset", ["-1", token(0), "now", token(1)])
def test_last_event_id_counts_before_the_offset_of_the_url(client: httpx.Client, path: str, offset: str) -> None:
    client.post(path, headers=TEXT, content=b"two")
    events = follow(client, f"{path}?offset={offset}&live=sse", token(3))
    assert [event.data for event in events if event.type == "data"] == ["two"]


def test_last_event_id_is_for_event_streams_only(client: httpx.Client, path: str) -> None:
    assert client.get(f"{path}?offset=-1", headers={"last-event-id": token(3)}).content == b"one"


def test_last_event_id_that_is_no_offset_is_refused(client: httpx.Client, path: str) -> None:
    answer = client.get(f"{path}?offset=-1&live=sse", headers={"last-event-id": "0.17"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_offset")


def test_an_event_source_that_has_read_a_closed_stream_is_told_to_stop(client: httpx.Client, path: str) -> None:
    assert client.post(path, headers=TRUE).status_code == 204
    first = follow(client, f"{path}?offset=-1&live=sse")
    assert json.loads(first[-1].data)["streamClosed"] is True
    answer = client.get(f"{path}?offset=-1&live=sse", headers={"last-event-id": first[-1].id})
    assert answer.status_code == 204
    assert answer.headers["stream-closed"] == "true"
    assert answer.headers["stream-next-offset"] == token(3)
    # One that has not read everything yet gets the rest.
    events = follow(client, f"{path}?offset=now&live=sse", token(0))
    assert [event.data for event in events if event.type == "data"] == ["one"]
    # Without an event id it is not an EventSource that reconnects: it hears that the stream is closed.
    assert json.loads(follow(client, f"{path}?offset={token(3)}&live=sse")[-1].data)["streamClosed"] is True


def test_nothing_is_lost_or_repeated_over_many_reconnects(client: httpx.Client) -> None:
    path = f"/v1/stream/resuming/{next(_numbers)}"
    client.put(path, headers=JSON)
    seen: list[int] = []
    last: str | None = None
    for number in range(8):
        client.post(path, headers=JSON, content=json.dumps([number, number + 100]))
        for event in follow(client, f"{path}?offset=-1&live=sse", last):
            last = event.id
            if event.type == "data":
                seen += json.loads(event.data)
    assert seen == [value for number in range(8) for value in (number, number + 100)]


# -- cursors -------------------------------------------------------------------------------------------------


def test_a_cursor_that_is_an_interval_number_does_not_say_where_to_read(client: httpx.Client, path: str) -> None:
    for query in ("cursor=12345", "cursor=12345&live=long-poll", "cursor=0"):
        answer = client.get(f"{path}?{query}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_cursor"), query
    assert client.get(f"{path}?offset=-1&cursor=12345").content == b"one"


def test_a_cursor_alone_says_where_to_go_on(client: httpx.Client, path: str) -> None:
    cursor = client.get(f"{path}?offset=-1&live=long-poll").headers["stream-cursor"]
    assert cursor.isdigit()
    client.post(path, headers=TEXT, content=b"two")
    assert client.get(f"{path}?cursor={cursor}").content == b"two"
    assert client.get(f"{path}?cursor={cursor}&live=long-poll").content == b"two"
    assert client.get(f"{path}?cursor={token(3)}").content == b"two"


def test_a_cursor_of_a_stream_that_was_recreated_is_410(client: httpx.Client, path: str) -> None:
    polled = client.get(f"{path}?offset=-1&live=long-poll").headers["stream-cursor"]
    timed_out = client.get(f"{path}?offset={token(3)}&live=long-poll")
    assert timed_out.status_code == 204
    followed = json.loads(follow(client, f"{path}?offset=-1&live=sse")[-1].data)["streamCursor"]
    recreate(client, path, b"another one")
    for cursor in (polled, timed_out.headers["stream-cursor"], followed):
        for query in (f"cursor={cursor}", f"offset={token(3)}&cursor={cursor}"):
            for live in ("", "&live=long-poll", "&live=sse"):
                answer = client.get(f"{path}?{query}{live}")
                assert (answer.status_code, answer.json()["error"]["code"]) == (410, "stream_recreated"), query + live
        # Whoever starts from the beginning passes nothing over.
        assert client.get(f"{path}?offset=-1&cursor={cursor}&live=long-poll").content == b"another one"
        assert client.get(f"{path}?offset=now&cursor={cursor}").status_code == 200


def test_a_tag_of_a_stream_that_was_recreated_is_410_where_it_ended(client: httpx.Client, path: str) -> None:
    tags = [
        client.get(f"{path}?offset=-1").headers["etag"],
        client.get(f"{path}?offset={token(3)}").headers["etag"],
        client.head(path).headers["etag"],
    ]
    recreate(client, path, b"another one")
    for tag in tags:
        for header in (tag, f'"x", W/{tag}'):
            answer = client.get(f"{path}?offset={token(3)}", headers={"if-none-match": header})
            assert (answer.status_code, answer.json()["error"]["code"]) == (410, "stream_recreated")
    # A cache that asks whether what it has of this URL is still good gets what there is now.
    answer = client.get(f"{path}?offset=-1", headers={"if-none-match": tags[0]})
    assert (answer.status_code, answer.content) == (200, b"another one")
    # It has nothing of URLs at which nothing was: that is never kept.
    assert client.get(f"{path}?offset={token(11)}").headers["cache-control"] == "no-store"
    assert client.get(f"{path}?offset=3").content == b"another one"


# -- small things --------------------------------------------------------------------------------------------


def test_a_plain_decimal_offset_is_an_offset(client: httpx.Client, path: str) -> None:
    client.post(path, headers=TEXT, content=b"two")
    assert client.get(f"{path}?offset=3").content == b"two"
    assert client.get(f"{path}?offset=3&live=long-poll").content == b"two"
    assert client.get(f"{path}?offset=00000000000000000003").content == b"two"
    assert client.get(f"{path}?offset={'9' * 17}").status_code == 400


def test_a_producer_gap_says_what_was_expected(client: httpx.Client, path: str) -> None:
    headers = {**TEXT, "producer-id": "p", "producer-epoch": "0", "producer-seq": "4"}
    answer = client.post(path, headers=headers, content=b"x")
    assert answer.status_code == 409
    assert (answer.json()["error"]["expected_seq"], answer.json()["error"]["received_seq"]) == (0, 4)


def test_a_stream_cannot_be_called_like_the_listing_of_its_bucket(client: httpx.Client) -> None:
    for path in ("/v1/stream/resuming/streams", "/v1/stream/resuming/str%65ams", "/v1/stream/streams"):
        answer = client.put(path, headers=TEXT)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_path")
        assert client.get(path).status_code == 404
    assert client.put("/v1/stream/resuming/streams/feed", headers=TEXT).status_code == 201
    assert client.put("/v1/stream/resuming/streams-2", headers=TEXT).status_code == 201


def test_put_echoes_the_producer(client: httpx.Client) -> None:
    path = f"/v1/stream/resuming/{next(_numbers)}"
    headers = {**TEXT, "producer-id": "p", "producer-epoch": "7", "producer-seq": "0"}
    for status in (201, 200):
        answer = client.put(path, headers=headers, content=b"x")
        assert answer.status_code == status
        assert (answer.headers["producer-epoch"], answer.headers["producer-seq"]) == ("7", "0")
    assert "producer-epoch" not in client.put(f"{path}-other", headers=TEXT).headers
