"""Cursors: intervals since 2024-10-09, always beyond the one a client echoes; and which stream they are of."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.protocol.cursors import EPOCH_MS, JITTER_SECONDS, Cursor, next_interval, parse_cursor
from millstream.protocol.offsets import OFFSET_MAX
from millstream.units import Milliseconds, Offset

times = st.integers(EPOCH_MS, EPOCH_MS + 10**12)
jitters = st.floats(*JITTER_SECONDS)
intervals = st.integers(0, 10**15)
offsets = st.integers(0, OFFSET_MAX).map(Offset)
cursors = st.tuples(intervals, st.integers(0, 10**18 - 1), offsets).map(Cursor._make) | intervals.map(Cursor)


def test_the_epoch_is_the_ninth_of_october_2024() -> None:
    assert datetime(2024, 10, 9, tzinfo=UTC).timestamp() * 1000 == EPOCH_MS
    assert next_interval(Milliseconds(EPOCH_MS), None, 1.0) == 0
    assert next_interval(Milliseconds(EPOCH_MS + 19_999), None, 1.0) == 0
    assert next_interval(Milliseconds(EPOCH_MS + 20_000), None, 1.0) == 1
    assert next_interval(Milliseconds(0), None, 1.0) == 0


@given(cursors)
def test_a_cursor_survives_the_round_trip_and_is_digits_alone(cursor: Cursor) -> None:
    assert str(cursor).isascii() and str(cursor).isdigit()
    assert parse_cursor(str(cursor)) == cursor


@given(times, cursors, jitters)
def test_a_cursor_is_greater_than_the_one_echoed_and_never_behind_the_clock(
    now_ms: int, echoed: Cursor, jitter: float
) -> None:
    current = next_interval(Milliseconds(now_ms), None, jitter)
    interval = next_interval(Milliseconds(now_ms), echoed, jitter)
    assert interval > echoed.interval or interval == current > echoed.interval
    assert interval >= current
    # One hour of jitter at most: a client cannot be pushed out of all collapsing.
    assert interval <= max(current, echoed.interval + 180)
    # Whatever else a cursor says, a later one is the greater number, in doubles too, as JavaScript has them.
    following = echoed._replace(interval=interval)
    assert int(str(following)) > int(str(echoed))
    if echoed.interval < 2**40:
        assert float(str(following)) > float(str(echoed))


@pytest.mark.parametrize("echoed", ["", "abc", "-5", "1.5", "1e9", " 1", "²", "٣", "9" * 17, "1\n", "9" * 40, "9" * 51])
def test_what_is_no_cursor_is_none(echoed: str) -> None:
    assert parse_cursor(echoed) is None


whole_cursors = st.tuples(st.integers(10**6, 10**7 - 1), st.integers(0, 10**18 - 1), offsets).map(Cursor._make)


@given(st.text() | st.text("0123456789", max_size=60))
def test_any_text_is_a_cursor_or_none_and_what_was_read_says_the_same(text: str) -> None:
    cursor = parse_cursor(text)
    if cursor is not None:
        assert int(str(cursor)) == int(text)


@given(whole_cursors, st.data())
def test_a_cursor_that_was_cut_off_names_no_stream(cursor: Cursor, data: st.DataObject) -> None:
    """Otherwise it could name another one, at another offset. (Today's intervals have seven digits.)"""
    text = str(cursor)
    cut = parse_cursor(text[: data.draw(st.integers(0, len(text) - 1))])
    assert cut is None or (cut.incarnation, cut.offset) == (None, None)


@given(whole_cursors, st.data())
def test_a_cursor_with_a_character_changed_is_another_or_none(cursor: Cursor, data: st.DataObject) -> None:
    text = str(cursor)
    at = data.draw(st.integers(0, len(text) - 1))
    changed = text[:at] + data.draw(st.characters()) + text[at + 1 :]
    if changed != text:
        assert parse_cursor(changed) != cursor
