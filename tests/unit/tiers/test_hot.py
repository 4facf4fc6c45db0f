"""Hot tails against a plain list of messages."""

from __future__ import annotations

import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from millstream.protocol.keys import StreamKey
from millstream.streams.state import Stream
from millstream.tiers.hot import UNFLUSHED_OVERHEAD_BYTES, HotTier
from millstream.units import Incarnation, Milliseconds, Offset, Position

appends = st.lists(st.lists(st.binary(min_size=1, max_size=6), min_size=1, max_size=4), max_size=6)


def stream_of(incarnation: int) -> Stream:
    return Stream.created(Incarnation(incarnation), StreamKey("b", str(incarnation)), "text/plain", Milliseconds(5))


def filled(start: int, batches: list[list[bytes]]) -> tuple[HotTier, Stream, list[bytes], list[int]]:
    """A tail that begins at `start`, whose it is, its messages and its boundaries."""
    hot, stream, offset, position = HotTier(), stream_of(7), start, 100
    boundaries = [start]
    for batch in batches:
        hot.publish(stream, Offset(offset), Position(position), Milliseconds(5), batch)
        for message in batch:
            offset += len(message)
            boundaries.append(offset)
        position += 1 + len(batch)
    return hot, stream, [message for batch in batches for message in batch], boundaries


@given(st.integers(0, 50), appends.filter(bool), st.data())
def test_a_read_returns_the_whole_messages_that_end_beyond_the_offset(
    start: int, batches: list[list[bytes]], data: st.DataObject
) -> None:
    hot, stream, messages, boundaries = filled(start, batches)
    offset = data.draw(st.integers(start, boundaries[-1]))
    limit = data.draw(st.sampled_from(boundaries))
    bytes_max = data.draw(st.integers(1, 30))
    tail = hot.tail(stream)
    assert tail is not None
    run = tail.read(Offset(offset), Offset(limit), bytes_max)
    first = next((index for index, end in enumerate(boundaries[1:]) if end > offset), len(messages))
    expected: list[bytes] = []
    for message, end in zip(messages[first:], boundaries[first + 1 :], strict=True):
        if end > limit or (expected and sum(map(len, expected)) + len(message) > bytes_max):
            break
        expected.append(message)
    assert run.messages == expected
    assert run.start == boundaries[first]
    assert run.end == run.start + sum(map(len, expected))


@given(st.integers(0, 50), appends.filter(bool))
def test_exactly_the_ends_of_messages_are_boundaries(start: int, batches: list[list[bytes]]) -> None:
    hot, stream, _, boundaries = filled(start, batches)
    tail = hot.tail(stream)
    assert tail is not None
    assert [offset for offset in range(boundaries[-1] + 5) if tail.is_boundary(Offset(offset))] == boundaries


@given(st.integers(0, 50), appends.filter(bool))
def test_the_rest_of_an_append_is_found_from_any_boundary_within_it(start: int, batches: list[list[bytes]]) -> None:
    hot, stream, _, _ = filled(start, batches)
    offset, tail = start, hot.tail(stream)
    assert tail is not None
    for batch in batches:
        for index, message in enumerate(batch):
            assert tail.append_at(Offset(offset)) == batch[index:]
            offset += len(message)
    assert tail.append_at(Offset(offset)) == []


@given(appends, appends, st.booleans(), st.booleans())
def test_letting_go_gives_back_what_publishing_took(
    one: list[list[bytes]], other: list[list[bytes]], looked_at: bool, released: bool
) -> None:
    hot, first, *_ = filled(0, one)
    second = stream_of(8)
    before = hot.bytes
    assert before >= sum(len(message) for batch in one for message in batch)
    offset = 0
    for number, batch in enumerate(other):
        hot.publish(second, Offset(offset), Position(number * 10), Milliseconds(5), batch)
        offset += sum(map(len, batch))
    if looked_at:
        hot.tail(second)
    if released:
        hot.release([second], Position(len(other) * 10))
    else:
        hot.drop(second)
    assert second.hot is None
    assert len(hot) == bool(one)
    assert hot.bytes == before + UNFLUSHED_OVERHEAD_BYTES * sum(map(len, other))
    hot.drop(second)
    hot.drop(first)
    hot.commit(hot.begin_capture(), Position(1 << 62))
    assert hot.bytes == 0


@given(appends.filter(bool), appends, st.integers(0, 5), st.integers(0, 20))
def test_what_is_not_cold_yet_is_there_in_the_order_of_the_log(
    one: list[list[bytes]], other: list[list[bytes]], captured_after: int, cold: int
) -> None:
    hot, position, captured = HotTier(), 10, None
    offsets, expected = {1: 0, 2: 0}, []
    streams = {incarnation: stream_of(incarnation) for incarnation in offsets}
    for number, (incarnation, batch) in enumerate([(1, batch) for batch in one] + [(2, batch) for batch in other]):
        if number == captured_after:
            captured = hot.begin_capture()
        hot.publish(
            streams[incarnation], Offset(offsets[incarnation]), Position(position), Milliseconds(5 + number), batch
        )
        for index, message in enumerate(batch, 1):
            start = offsets[incarnation]
            offsets[incarnation] += len(message)
            expected.append((incarnation, start, offsets[incarnation], position + index, 5 + number, message))
        position += 1 + len(batch)
    assert hot.backlog_bytes == sum(offsets.values())
    if captured is not None:
        with memoryview(captured.ends):  # whoever was at work on it may not have let go yet
            hot.roll_back(captured)
    columns = hot.unflushed
    found = zip(
        columns.incarnations,
        columns.starts,
        columns.ends,
        columns.positions,
        columns.times,
        columns.messages,
        strict=True,
    )
    assert list(found) == expected
    assert columns.bytes == hot.backlog_bytes == sum(offsets.values())
    captured = hot.begin_capture()
    cut = expected[cold][3] if cold < len(expected) else position
    rest = hot.commit(captured, Position(cut))
    assert list(rest.messages) == [row[-1] for row in expected if row[3] >= cut]
    assert hot.backlog_bytes == rest.bytes == sum(map(len, rest.messages))
    hot.roll_back(rest)
    assert hot.backlog_bytes == hot.unflushed.bytes == rest.bytes


def test_what_a_message_costs_is_what_is_counted() -> None:
    """Within what the interpreter's allocator rounds up and arrays grow ahead; never much less than it takes."""
    count = 50_000
    for size in (2, 16, 80, 1000):
        bodies = [b"%d" % (number % 10) * size for number in range(count)]
        tier, stream = HotTier(), stream_of(1)
        tracemalloc.start()
        try:
            before, _ = tracemalloc.get_traced_memory()
            messages = [bytes(bytearray(body)) for body in bodies]
            tier.publish(stream, Offset(0), Position(1), Milliseconds(0), messages)
            del messages
            after, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert 0.8 < (after - before) / tier.bytes < 1.2, size
