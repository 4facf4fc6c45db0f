"""What the client does on a real server, sync and async alike."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from millstream.client import (
    AsyncClient,
    AsyncStream,
    BadRequest,
    Conflict,
    ConnectionFailed,
    NotFound,
    OffsetTrimmed,
    PayloadTooLarge,
    PreconditionFailed,
    Producer,
    ProducerFenced,
    SequenceGap,
    Stream,
    StreamClosed,
)
from support.server import ServerProcess

JSON = "application/json"


def test_json_messages_come_back_as_they_were_appended(client: Any, bucket: Any) -> None:
    stream = client.stream(f"{bucket.name}/notes")
    created = stream.create(content_type=JSON)
    assert created.is_new and created.content_type == JSON and not created.closed
    assert not stream.create(content_type=JSON).is_new
    first = stream.append({"a": 1})
    assert (first.duplicate, first.closed) == (False, False)
    stream.append([2, "three"])
    stream.append(b'[1.00, {"deep": [4]}]')
    assert list(stream.read_json()) == [{"a": 1}, 2, "three", 1.0, {"deep": [4]}]
    assert list(stream.read_json(first.next_offset)) == [2, "three", 1.0, {"deep": [4]}]
    (chunk,) = stream.read()
    assert chunk.messages()[-2:] == [b"1.00", b'{"deep": [4]}']
    assert chunk.up_to_date and chunk.next_offset == stream.head().next_offset


def test_bytes_come_back_chunk_by_chunk(bucket: Any) -> None:
    stream = bucket.stream("blob")
    stream.create(body=b"\0first\xff")
    for number in range(5):
        stream.append(bytes([number]) * 1000)
    chunks = list(stream.read(max_bytes=1500))
    assert len(chunks) > 2
    assert [chunk.up_to_date for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    expected = b"\0first\xff" + b"".join(bytes([number]) * 1000 for number in range(5))
    assert b"".join(chunk.data for chunk in chunks) == stream.read_all() == expected


def test_text_is_encoded_and_other_values_are_refused_on_a_byte_stream(bucket: Any) -> None:
    stream = bucket.stream("text")
    stream.create(content_type="text/plain; charset=utf-8")
    stream.append("grün\r\n")
    assert stream.read_all() == "grün\r\n".encode()
    with pytest.raises(BadRequest, match="a dict cannot be appended to a stream of text/plain"):
        stream.append({})


def test_names_with_awkward_letters_are_one_stream_in_both_forms(client: Any, bucket: Any) -> None:
    name = "größe 100% + ?#&="
    client.stream(bucket=bucket.name, name=name).create(body=b"x")
    assert client.stream(f"{bucket.name}/{name}").read_all() == b"x"
    assert [entry.name for entry in bucket.list()] == [name]


def test_head_tells_what_was_asked_for(bucket: Any) -> None:
    stream = bucket.stream("mortal")
    stream.create(content_type="text/plain", ttl=3600)
    info = stream.head()
    assert (info.ttl_seconds, info.expires_at, info.content_type) == (3600, None, "text/plain")
    other = bucket.stream("dated")
    other.create(expires_at="2090-01-01T00:00:00Z", closed=True, body=b"all")
    info = other.head()
    assert (info.expires_at, info.closed, info.ttl_seconds) == ("2090-01-01T00:00:00Z", True, None)


def test_a_closed_stream_takes_no_more(bucket: Any) -> None:
    stream = bucket.stream("short")
    stream.create()
    stream.append(b"last", close=True)
    assert stream.close().closed
    with pytest.raises(StreamClosed) as refused:
        stream.append(b"more")
    assert refused.value.next_offset == stream.head().next_offset
    assert refused.value.status == 409 and refused.value.code == "stream_closed"


def test_a_deleted_stream_is_not_found(bucket: Any) -> None:
    stream = bucket.stream("gone")
    stream.create()
    stream.delete()
    with pytest.raises(NotFound) as missing:
        stream.head()
    assert missing.value.status == 404
    with pytest.raises(NotFound) as missing:
        list(stream.read())
    assert missing.value.code == "stream_not_found" and "gone" in missing.value.message


def test_a_fork_shares_history_and_lives_alone(bucket: Any) -> None:
    source = bucket.stream("src")
    source.create(content_type=JSON)
    middle = source.append([1, 2]).next_offset
    source.append([3])
    fork = bucket.stream("fork")
    fork.create(fork_from=source, fork_offset=middle)
    fork.append(["own"])
    other = bucket.stream("other")
    other.create(fork_from=f"{bucket.name}/src", fork_offset=middle, fork_sub_offset=1)
    assert list(fork.read_json()) == [1, 2, "own"]
    assert list(other.read_json()) == [1, 2, 3]
    assert list(source.read_json()) == [1, 2, 3]


def test_conditions_are_checked(bucket: Any) -> None:
    stream = bucket.stream("state")
    etag = stream.create(body=b"0").etag
    etag_after = stream.append(b"1", if_match=etag).etag
    with pytest.raises(PreconditionFailed):
        stream.append(b"2", if_match=etag)
    stream.append(b"2", if_match=etag_after)
    with pytest.raises(PreconditionFailed):
        stream.create(only_if_absent=True)
    stream.append(b"3", seq="a")
    with pytest.raises(Conflict):
        stream.append(b"4", seq="a")
    assert stream.read_all() == b"0123"


def test_a_producers_repeat_is_told_and_written_once(bucket: Any) -> None:
    stream = bucket.stream("exact")
    stream.create(content_type=JSON)
    assert not stream.append([1], producer=Producer("p", 0, 0)).duplicate
    assert stream.append([1], producer=Producer("p", 0, 0)).duplicate
    with pytest.raises(SequenceGap) as gap:
        stream.append([3], producer=Producer("p", 0, 2))
    assert (gap.value.expected, gap.value.received) == (1, 2)
    stream.append([2], producer=Producer("p", 1, 0))
    with pytest.raises(ProducerFenced) as fenced:
        stream.append([9], producer=Producer("p", 0, 1))
    assert fenced.value.current_epoch == 1
    assert list(stream.read_json()) == [1, 2]


def test_snapshots_and_bootstrap(client: Any, bucket: Any) -> None:
    stream = bucket.stream("page")
    stream.create(content_type=JSON)
    offset = stream.append([1, 2]).next_offset
    empty = stream.bootstrap()
    assert (empty.snapshot, empty.messages, empty.next_offset) == (None, [b"1", b"2"], offset)
    stream.publish_snapshot(b'{"sum":3}', offset, JSON)
    stream.append([[3, "\r\n--"]])
    assert stream.snapshot() == stream.snapshot(offset)
    assert stream.snapshot()[:3] == (b'{"sum":3}', JSON, offset)
    start = client.stream(f"{bucket.name}/page").bootstrap()
    assert start.snapshot.data == b'{"sum":3}' and start.messages == [b'[3,"\\r\\n--"]']
    assert start.next_offset == stream.head().next_offset
    with pytest.raises(OffsetTrimmed) as trimmed:
        list(stream.read())
    assert trimmed.value.earliest_offset == offset
    with pytest.raises(Conflict):
        stream.delete_snapshot(offset)
    with pytest.raises(BadRequest, match="not a bucket name"):
        client.stream("a/b/c").snapshot()


def test_streams_below_a_path_have_snapshots_too(client: Any, bucket: Any) -> None:
    stream = client.stream(f"{bucket.name}/2026/november/page")
    stream.create(content_type=JSON)
    offset = stream.append([1, 2]).next_offset
    stream.publish_snapshot(b'{"sum":3}', offset, JSON)
    stream.append([3])
    assert stream.snapshot()[:3] == (b'{"sum":3}', JSON, offset)
    start = stream.bootstrap()
    assert (start.snapshot.data, start.messages) == (b'{"sum":3}', [b"3"])


def test_buckets_are_created_listed_and_deleted(bucket: Any) -> None:
    with pytest.raises(Conflict):
        bucket.create()
    bucket.create(exist_ok=True)
    for name in ("b-2", "a-1", "b-1"):
        bucket.stream(name).create(content_type=JSON, body=b"[1]")
    assert bucket.info()[:2] == (bucket.name, 3)
    assert [entry.name for entry in bucket.list()] == ["a-1", "b-1", "b-2"]
    (first, _) = bucket.list(prefix="b-")
    assert (first.name, first.closed, first.content_type, first.tail_offset) == ("b-1", False, JSON, 1)
    with pytest.raises(Conflict):
        bucket.delete()
    for entry in bucket.list():
        bucket.stream(entry.name).delete()
    bucket.delete()
    with pytest.raises(NotFound):
        bucket.info()


def test_a_listing_of_many_pages_is_whole(bucket: Any) -> None:
    names = [f"s-{number:02d}" for number in range(10)]
    for name in names:
        bucket.stream(name).create()
    for page_size in (1, 3, 5, 10, 1000):
        assert [entry.name for entry in bucket.list(page_size=page_size)] == names


def test_the_feed_tells_everything_in_order(bucket: Any) -> None:
    json_stream, blob, text = bucket.stream("j"), bucket.stream("b"), bucket.stream("t")
    json_stream.create(content_type=JSON, body=[{"n": 1}])
    blob.create(body=b"\0\xff")
    text.create(content_type="text/plain", body="zwölf\r\n")
    text.delete()
    pages = list(bucket.feed())
    items = [item for page in pages for item in page.items]
    assert [(item.stream, item.event, item.payload) for item in items if item.stream != "t"] == [
        ("j", "created", None),
        ("j", "message", b'{"n":1}'),
        ("b", "created", None),
        ("b", "message", b"\0\xff"),
    ]
    assert items[1].json() == {"n": 1}
    assert items[-1].event == "deleted" and pages[-1].up_to_date
    json_stream.append([2])
    (page,) = bucket.feed(pages[-1].token)
    assert [(item.payload, item.next_offset) for item in page.items] == [(b"2", json_stream.head().next_offset)]
    raw = bucket.feed_page(pages[-1].token, accept="application/vnd.apache.arrow.stream")
    assert raw.content_type == "application/vnd.apache.arrow.stream" and raw.token == page.token


def test_refusals_keep_the_servers_words(bucket: Any) -> None:
    with pytest.raises(BadRequest) as refused:
        list(bucket.stream("x").read("nonsense"))
    assert refused.value.code == "invalid_offset" and "Stream-Next-Offset" in (refused.value.hint or "")
    stream = bucket.stream("big")
    stream.create()
    with pytest.raises(PayloadTooLarge):
        stream.append(bytes(9 << 20))
    with pytest.raises(BadRequest, match="cannot be sent in a header"):
        stream.append(b"x", seq="a\r\nx: y")


def test_the_server_tells_of_itself(client: Any) -> None:
    assert client.health()["status"] == "ok"
    assert client.stats()["backpressure"] is False


def test_a_stream_is_named_by_its_url(client: Any, bucket: Any, shared_server: ServerProcess) -> None:
    url = f"{shared_server.url}/v1/stream/{bucket.name}/by url"
    stream = client.stream(url)
    assert stream.create(content_type=JSON, body=[1]).is_new
    with client.producer(url, "p") as producer:
        producer.append(2)
    assert list(stream.read_json()) == list(client.stream(f"{bucket.name}/by url").read_json()) == [1, 2]
    fork = client.stream(f"{bucket.name}/fork")
    fork.create(fork_from=stream)
    assert list(fork.read_json()) == [1, 2]
    with pytest.raises(BadRequest, match="is not on"):
        client.stream("http://elsewhere.example/stream")


def test_a_url_alone_is_a_stream(bucket: Any, shared_server: ServerProcess) -> None:
    url = f"{shared_server.url}/{bucket.name}/alone"
    with Stream(url, headers={"x-reason": "test"}) as stream:
        stream.create(content_type=JSON)
        stream.append({"a": 1})
        assert str(stream) == url and [chunk.json() for chunk in stream.follow(until_up_to_date=True)] == [[{"a": 1}]]
    with pytest.raises(ConnectionFailed, match="closed"):
        stream.head()

    async def main() -> list[Any]:
        async with AsyncStream(url) as same:
            return [value async for value in same.read_json()]

    assert asyncio.run(main()) == [{"a": 1}]


def test_an_append_that_must_be_written_once_is_a_producers(bucket: Any) -> None:
    stream = bucket.stream("once")
    stream.create(content_type=JSON)
    for number in range(3):
        assert not stream.append([number], once=True).duplicate
    assert stream.append([3], once=True, close=True).closed
    assert list(stream.read_json()) == [0, 1, 2, 3]
    with pytest.raises(BadRequest, match="written once anyway"):
        stream.append([4], once=True, producer=Producer("p", 0, 0))


def test_a_producer_may_end_a_stream_with_a_last_message(client: Any, bucket: Any) -> None:
    stream = bucket.stream("final")
    stream.create(content_type=JSON)
    producer = client.producer(stream, "p", batch_messages=2, linger=60.0)
    for number in range(5):
        producer.append(number)
    producer.close(final={"last": True})
    producer.close()
    info = stream.head()
    assert info.closed and list(stream.read_json()) == [0, 1, 2, 3, 4, {"last": True}]
    other = bucket.stream("detached")
    other.create()
    producer = client.producer(other, "p")
    producer.append(b"x")
    producer.detach()
    assert not other.head().closed and other.read_all() == b"x"


def test_functions_may_be_coroutines_for_the_async_client(bucket: Any, shared_server: ServerProcess) -> None:
    asked: list[str] = []

    async def token() -> str:
        asked.append("token")
        return "secret"

    async def main() -> None:
        async with AsyncClient(shared_server.url, token, headers={"x-number": token}) as client:
            stream = client.stream(f"{bucket.name}/awaited")
            await stream.create(content_type=JSON, body=[1])
            assert [chunk.json() async for chunk in stream.follow(until_up_to_date=True)] == [[1]]

    asyncio.run(main())
    assert len(asked) >= 4
