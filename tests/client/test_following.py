"""Following: everything once and in order, whatever happens to the connection and the server."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from millstream.client import AsyncClient, Client, NotFound, OffsetTrimmed
from millstream.client.live import Mode
from support.clients import Connect
from support.server import ServerProcess

JSON = "application/json"


def in_background(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("mode", ["sse", "long-poll", "auto"])
@pytest.mark.parametrize("content_type", [JSON, "application/octet-stream", "text/plain"])
def test_a_follower_sees_old_and_new_until_the_stream_closes(bucket: Any, mode: str, content_type: str) -> None:
    stream = bucket.stream(f"{mode}-{content_type.replace('/', '-')}")
    is_json = content_type == JSON
    stream.create(content_type=content_type, body=b'["old"]' if is_json else b"old ")
    following = stream.follow(mode=mode)
    first = next(following)
    assert first.data == (b'["old"]' if is_json else b"old ")
    stream.append([" {", "\u2028"] if is_json else b" data: new\n\nevent: x ")
    stream.append(["end"] if is_json else b"end", close=True)
    rest = list(following)
    if is_json:
        assert [value for chunk in rest for value in chunk.json()] == [" {", "\u2028", "end"]
    else:
        assert b"".join(chunk.data for chunk in rest) == b" data: new\n\nevent: x end"
    assert following.closed and following.offset == stream.head().next_offset == rest[-1].next_offset


def test_text_is_followed_byte_for_byte_unless_sse_is_asked_for(bucket: Any) -> None:
    stream = bucket.stream("lines")
    stream.create(content_type="text/plain", body=b"a\r\nb\rc\n", closed=True)
    assert [chunk.data for chunk in stream.follow()] == [b"a\r\nb\rc\n"]
    assert [chunk.data for chunk in stream.follow(mode="sse")] == [b"a\nb\nc\n"]


def test_now_starts_at_the_end(bucket: Any) -> None:
    stream = bucket.stream("late")
    stream.create(content_type=JSON, body=["before"])
    for mode in ("sse", "long-poll"):
        following = stream.follow("now", mode=mode)
        writer = threading.Timer(0.3, lambda: stream.append(["after"]))
        writer.start()
        assert next(following).json() == ["after"]
        following.close()
        writer.join()


def test_connections_that_end_in_time_are_not_noticed(bucket: Any) -> None:
    """The server ends live connections after half a second here."""
    for mode in ("sse", "long-poll"):
        stream = bucket.stream(f"long-{mode}")
        stream.create(content_type=JSON)

        def write(stream: Any = stream) -> None:
            for number in range(6):
                stream.append([number], close=number == 5)
                time.sleep(0.2)

        writer = in_background(write)
        assert [value for chunk in stream.follow(mode=mode) for value in chunk.json()] == list(range(6))
        writer.join()


def test_a_stream_that_goes_away_ends_its_followers_with_the_reason(bucket: Any) -> None:
    stream = bucket.stream("mortal")
    stream.create(content_type=JSON, body=[1])
    following = stream.follow()
    assert next(following).json() == [1]
    stream.delete()
    with pytest.raises(NotFound):
        next(following)
    other = bucket.stream("trimmed")
    other.create(content_type=JSON, body=[1])
    other.publish_snapshot(b"", other.head().next_offset)
    with pytest.raises(OffsetTrimmed):
        next(other.follow())


def test_a_follower_can_be_closed_by_another_thread(shared_server: ServerProcess, bucket_name: str) -> None:
    with Client(shared_server.url) as client:
        stream = client.stream(f"{bucket_name}/quiet")
        stream.create(content_type=JSON)
        following = stream.follow(mode="sse")
        threading.Timer(0.3, following.close).start()
        began = time.monotonic()
        assert list(following) == []
        assert time.monotonic() - began < 10


def test_a_feed_is_followed(bucket: Any) -> None:
    for mode in ("sse", "long-poll"):
        token = [page.token for page in bucket.feed()][-1]
        following = bucket.feed(token, live=mode)
        threading.Timer(0.3, lambda mode=mode: bucket.stream(f"new-{mode}").create(content_type=JSON, body=[1])).start()
        items: list[Any] = []
        while len(items) < 2:
            items += next(following).items
        assert [(item.event, item.payload) for item in items] == [("created", None), ("message", b"1")]
        assert following.offset == [page.token for page in bucket.feed()][-1]
        following.close()


@pytest.mark.parametrize("mode", ["sse", "long-poll"])
def test_a_follower_outlasts_kills_and_restarts(connect: Connect, tmp_path: Path, mode: str) -> None:
    """Nothing is missed and nothing comes twice, although the server is killed again and again."""
    settings = ("read.long_poll_timeout=500ms", "cold.flush_interval=300ms")
    with ServerProcess(tmp_path / "data", settings=settings) as server:
        client = connect(server.url)
        stream = client.stream("run/steps")
        stream.create(content_type=JSON)
        seen: list[int] = []

        def follow() -> None:
            for chunk in stream.follow(mode=mode):
                seen.extend(chunk.json())

        follower = in_background(follow)
        with Client(server.url) as writing, writing.producer("run/steps", "writer", linger=0.001) as producer:
            for number in range(2000):
                producer.append(number)
                if number % 1000 == 500:
                    time.sleep(0.05)
                    server.kill()
                    server.start()
            producer.close(close_stream=True)
        follower.join(60)
        assert not follower.is_alive()
        assert seen == list(range(2000)) == list(stream.read_json())


@pytest.mark.parametrize("mode", ["sse", "long-poll", "auto"])
def test_a_follower_may_stop_at_the_end(bucket: Any, mode: str) -> None:
    stream = bucket.stream(f"until-{mode}")
    stream.create(content_type=JSON)
    assert list(stream.follow(mode=mode, until_up_to_date=True)) == []
    stream.append([1, 2])
    following = stream.follow(mode=mode, until_up_to_date=True)
    assert [value for chunk in following for value in chunk.json()] == [1, 2]
    assert following.up_to_date and not following.closed and following.offset == stream.head().next_offset


@pytest.mark.parametrize("mode", ["sse", "long-poll"])
def test_a_follower_may_stop_after_a_time(connect: Connect, server: ServerProcess, mode: str) -> None:
    """Here the server keeps live reads open for a minute, so the wait itself is cut short."""
    stream = connect(server.url).stream("a/timed", content_type=JSON)
    stream.create(content_type=JSON, body=[1])
    begun = time.monotonic()
    following = stream.follow(mode=mode, timeout=0.4)
    assert [chunk.json() for chunk in following] == [[1]]
    assert 0.3 < time.monotonic() - begun < 5
    assert list(following) == []


@pytest.mark.parametrize("mode", ["sse", "long-poll"])
def test_another_thread_may_stop_a_follower_that_waits(server: ServerProcess, mode: Mode) -> None:
    with Client(server.url) as client:
        stream = client.stream("a/stopped", content_type=JSON)
        stream.create(content_type=JSON)
        following = stream.follow(mode=mode)
        stopper = threading.Timer(0.4, following.close)
        stopper.start()
        begun = time.monotonic()
        assert list(following) == []
        assert time.monotonic() - begun < 5
        stopper.join()
        stream.append([1])
        assert [chunk.json() for chunk in stream.follow(mode=mode, until_up_to_date=True)] == [[1]]


@pytest.mark.parametrize("mode", ["sse", "long-poll"])
def test_another_task_may_stop_a_follower_that_waits(server: ServerProcess, mode: Mode) -> None:
    async def main() -> None:
        async with AsyncClient(server.url) as client:
            stream = client.stream("a/stopped", content_type=JSON)
            await stream.create(content_type=JSON)
            following = stream.follow(mode=mode)
            asyncio.get_running_loop().call_later(0.4, following.close)
            async with asyncio.timeout(5):
                assert [chunk async for chunk in following] == []
            await stream.append([1])
            assert [chunk.json() async for chunk in stream.follow(mode=mode, until_up_to_date=True)] == [[1]]

    asyncio.run(main())
