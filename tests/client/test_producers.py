"""Idempotent producers: everything once and in order, whatever happens on the way."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from millstream.client import BadRequest, ProducerFenced, StreamClosed
from support.clients import Connect
from support.server import ServerProcess

JSON = "application/json"


def test_many_messages_travel_in_few_appends(client: Any, bucket: Any) -> None:
    stream = bucket.stream("json")
    stream.create(content_type=JSON)
    values = [{"n": number, "list": [number]} for number in range(8_000)]
    with client.producer(stream, "p", batch_bytes=16 << 10) as producer:
        producer.append_many(values[:4_000])
        for value in values[4_000:]:
            producer.append(value)
        producer.flush()
        assert producer.acknowledged == producer.accepted == len(values)
        assert producer.next_offset == stream.head().next_offset
    assert list(stream.read_json()) == values


def test_each_append_is_one_message_also_if_it_is_a_list(client: Any, bucket: Any) -> None:
    stream = bucket.stream("lists")
    stream.create(content_type=JSON)
    with client.producer(stream, "p") as producer:
        producer.append([1, 2])
        producer.append(b"[3]")
        producer.append("text")
    assert list(stream.read_json()) == [[1, 2], [3], "text"]


def test_byte_messages_keep_their_edges_unless_they_may_be_joined(client: Any, bucket: Any) -> None:
    for concatenate, expected in ((False, [b"a", b"bc", b"d"]), (True, [b"abcd"])):
        stream = bucket.stream(f"bytes-{concatenate}")
        stream.create()
        with client.producer(stream, "p", linger=0.2, concatenate=concatenate) as producer:
            for message in (b"a", b"bc", b"d"):
                producer.append(message)
        assert stream.bootstrap().messages == expected


def test_a_message_waits_no_longer_than_it_may(client: Any, bucket: Any) -> None:
    stream = bucket.stream("linger")
    stream.create(content_type=JSON)
    with client.producer(stream, "p", linger=0.05) as producer:
        producer.append(1)
        deadline = time.monotonic() + 10
        while producer.acknowledged < 1:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_full_buffer_makes_append_wait(client: Any, bucket: Any) -> None:
    stream = bucket.stream("full")
    stream.create()
    with client.producer(stream, "p", buffer_bytes=3000, in_flight=1, concatenate=True, batch_bytes=500) as producer:
        for number in range(200):
            producer.append(bytes([number]) * 400)
            assert producer.accepted - producer.acknowledged <= 8
    assert stream.read_all() == b"".join(bytes([number]) * 400 for number in range(200))


def test_closing_comes_after_the_last_message(client: Any, bucket: Any) -> None:
    stream = bucket.stream("done")
    stream.create(content_type=JSON)
    producer = client.producer(stream, "p")
    producer.append(1)
    producer.close(close_stream=True)
    producer.close()
    assert stream.head().closed and list(stream.read_json()) == [1]
    with pytest.raises(BadRequest, match="closed"):
        producer.append(2)


def test_an_error_that_nothing_heals_ends_the_producer(client: Any, bucket: Any) -> None:
    stream = bucket.stream("closed")
    stream.create(content_type=JSON, closed=True)
    producer = client.producer(stream, "p")
    producer.append(1)
    for _ in range(2):
        with pytest.raises(StreamClosed):
            producer.flush()
    with pytest.raises(StreamClosed):
        producer.append(2)
    producer.abort()


def test_a_newer_epoch_fences_an_older_producer(client: Any, bucket: Any) -> None:
    stream = bucket.stream("fenced")
    stream.create(content_type=JSON)
    old = client.producer(stream, "p")
    old.append("old")
    old.flush()
    with client.producer(stream, "p", epoch=1) as new:
        new.append("new")
    old.append("ghost")
    with pytest.raises(ProducerFenced):
        old.flush()
    old.abort()
    assert list(stream.read_json()) == ["old", "new"]


def test_a_producer_that_claims_takes_a_free_epoch(client: Any, bucket: Any) -> None:
    stream = bucket.stream("claimed")
    stream.create(content_type=JSON)
    for expected, start in ((0, 0), (1, 0), (2, 0), (7, 7), (8, 0)):
        with client.producer(stream, "p", start, claim=True) as producer:
            assert producer.epoch == expected
            producer.append(expected)
    assert list(stream.read_json()) == [0, 1, 2, 7, 8]


def test_a_replay_with_the_same_epoch_writes_nothing_twice(client: Any, bucket: Any) -> None:
    stream = bucket.stream("replayed")
    stream.create(content_type=JSON)
    for _ in range(2):
        with client.producer(stream, "import", batch_bytes=100, linger=1.0) as producer:
            producer.append_many(range(500))
    assert list(stream.read_json()) == list(range(500))


def survive(client: Any, server: ServerProcess, kills: int, **options: Any) -> None:
    """Produce while the server is killed and restarted; then compare what is there with what was sent."""
    stream = client.stream("exactly/once")
    stream.create(content_type=JSON)
    is_over = threading.Event()

    def trouble() -> None:
        for _ in range(kills):
            time.sleep(0.3)
            server.kill()
            server.start()
        is_over.set()

    killer = threading.Thread(target=trouble)
    killer.start()
    count = 0
    with client.producer(stream, "p", linger=0.001, batch_bytes=2000, **options) as producer:
        while not is_over.is_set():
            producer.append_many(range(count, count + 50))
            count += 50
            time.sleep(0.002)
    killer.join()
    assert count > 1000
    assert list(stream.read_json()) == list(range(count))


def test_nothing_is_lost_or_doubled_across_kills(connect: Connect, tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "data", settings=("cold.flush_interval=300ms",)) as server:
        survive(connect(server.url), server, 2, in_flight=5)


@pytest.mark.soak
@pytest.mark.parametrize("in_flight", [1, 2, 16])
def test_nothing_is_lost_or_doubled_across_many_kills(connect: Connect, tmp_path: Path, in_flight: int) -> None:
    with ServerProcess(tmp_path / "data", settings=("cold.flush_interval=300ms",)) as server:
        survive(connect(server.url), server, 12, in_flight=in_flight)
