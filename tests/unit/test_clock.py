"""The clock that things expire by: it does not jump ahead, however the wall clock is set."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.clock import HOLD_SECONDS, JUMP_MS, ExpiryClock
from support.fake_time import FakeClock

HOUR_MS = 3_600_000


def pass_time(clock: FakeClock, expiry: ExpiryClock, seconds: float) -> None:
    """Look once a second, as a shard does."""
    for _ in range(int(seconds)):
        clock.advance(1000)
        expiry.now_ms()


def test_it_is_the_wall_clock_while_that_goes_on_steadily() -> None:
    clock = FakeClock()
    expiry = ExpiryClock(clock)
    for _ in range(10_000):
        clock.advance(1000)
        clock.set_wall(1)  # a millisecond a second is drift, or NTP at work
        assert expiry.now_ms() == clock.now_ms()
    assert expiry.jumps == 0


def test_an_hour_ahead_for_three_seconds_is_never_seen(caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    expiry = ExpiryClock(clock)
    before = expiry.now_ms()
    clock.set_wall(HOUR_MS)
    assert expiry.now_ms() == before, "at the very first look"
    pass_time(clock, expiry, 3)
    assert expiry.now_ms() == before + 3000 and expiry.is_held
    clock.set_wall(-HOUR_MS)
    assert expiry.now_ms() == before + 3000 == clock.now_ms()
    assert not expiry.is_held
    assert expiry.jumps == 2
    assert "jumped by +3600.0 s" in caplog.text and "jumped by -3600.0 s" in caplog.text


def test_a_clock_that_stays_ahead_is_believed_after_the_hold_and_not_before() -> None:
    clock = FakeClock()
    expiry = ExpiryClock(clock)
    clock.set_wall(HOUR_MS)
    expiry.now_ms()
    pass_time(clock, expiry, HOLD_SECONDS - 1)
    assert expiry.now_ms() == clock.now_ms() - HOUR_MS
    pass_time(clock, expiry, 1)
    assert expiry.now_ms() == clock.now_ms()
    assert not expiry.is_held


def test_a_second_jump_begins_the_hold_anew() -> None:
    clock = FakeClock()
    expiry = ExpiryClock(clock)
    clock.set_wall(HOUR_MS)
    pass_time(clock, expiry, HOLD_SECONDS - 10)
    clock.set_wall(HOUR_MS)
    pass_time(clock, expiry, HOLD_SECONDS - 10)
    assert expiry.now_ms() == clock.now_ms() - 2 * HOUR_MS
    pass_time(clock, expiry, 12)
    assert expiry.now_ms() == clock.now_ms()


def test_a_clock_that_is_set_back_is_believed_at_once() -> None:
    clock = FakeClock()
    expiry = ExpiryClock(clock)
    clock.set_wall(-24 * HOUR_MS)
    assert expiry.now_ms() == clock.now_ms()
    assert (expiry.jumps, expiry.is_held) == (1, False)


@given(st.lists(st.tuples(st.integers(0, 400_000), st.integers(-2 * HOUR_MS, 2 * HOUR_MS)), max_size=40))
def test_it_is_never_later_than_the_wall_clock_nor_ahead_of_what_has_passed(steps: list[tuple[int, int]]) -> None:
    clock = FakeClock()
    expiry = ExpiryClock(clock)
    last, passed = expiry.now_ms(), 0.0
    for passing, set_by in steps:
        clock.advance(passing)
        clock.set_wall(set_by)
        was_held = expiry.is_held
        now = expiry.now_ms()
        assert now <= clock.now_ms()
        passed = now - last
        if expiry.is_held or not was_held:
            assert passed <= passing + JUMP_MS + 1
        last = now
