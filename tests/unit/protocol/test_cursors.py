"""Cursors: interval numbers since 2024-10-09, always beyond the one a client echoes."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.protocol.cursors import EPOCH_MS, JITTER_SECONDS, next_cursor

times = st.integers(EPOCH_MS, EPOCH_MS + 10**12)
jitters = st.floats(*JITTER_SECONDS)


def test_the_epoch_is_the_ninth_of_october_2024() -> None:
    assert datetime(2024, 10, 9, tzinfo=UTC).timestamp() * 1000 == EPOCH_MS
    assert next_cursor(EPOCH_MS, None, 1.0) == "0"
    assert next_cursor(EPOCH_MS + 19_999, None, 1.0) == "0"
    assert next_cursor(EPOCH_MS + 20_000, None, 1.0) == "1"


@given(times, st.integers(0, 10**15), jitters)
def test_a_cursor_is_greater_than_the_one_echoed_and_never_behind_the_clock(
    now_ms: int, echoed: int, jitter: float
) -> None:
    current = int(next_cursor(now_ms, None, jitter))
    cursor = int(next_cursor(now_ms, str(echoed), jitter))
    assert cursor > echoed or cursor == current > echoed
    assert cursor >= current
    # One hour of jitter at most: a client cannot be pushed out of all collapsing.
    assert cursor <= max(current, echoed + 180)


@given(times, jitters)
def test_a_cursor_that_is_echoed_keeps_moving(now_ms: int, jitter: float) -> None:
    cursor = next_cursor(now_ms, None, jitter)
    for _ in range(3):
        following = next_cursor(now_ms, cursor, jitter)
        assert int(following) > int(cursor)
        cursor = following


@pytest.mark.parametrize("echoed", ["", "abc", "-5", "1.5", "1e9", " 1", "²", "٣", "9" * 17, "1\n"])
def test_a_cursor_that_is_no_number_is_ignored(echoed: str) -> None:
    assert next_cursor(EPOCH_MS + 100_000, echoed, 60.0) == "5"
