"""Rates: what is allowed over time equals what is earned, debts are waited off, and memory is bounded."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.access.rates import Rate


class Time:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_burst_is_allowed_and_then_only_the_rate() -> None:
    time = Time()
    rate = Rate(10, 2.0, 100, time)
    allowed = 0
    for _ in range(1000):
        allowed += not rate.take("a", 1)
        time.now += 0.01
    assert 100 + 19 <= allowed <= 100 + 21


def test_clients_do_not_share() -> None:
    rate = Rate(1, 1.0, 100, Time())
    rate.spend("a", 1)
    assert rate.take("a", 0) > 0
    assert rate.take("b", 0) == 0


def test_a_debt_is_waited_off() -> None:
    time = Time()
    rate = Rate(100, 1.0, 100, time)
    rate.spend("a", 1000)
    wait = rate.take("a", 0)
    assert wait == pytest.approx(9.0, abs=0.01)
    time.now += wait - 0.001
    assert rate.take("a", 0) > 0
    time.now += 0.002
    assert rate.take("a", 0) == 0


def test_no_rate_remembers_nobody() -> None:
    rate = Rate(0, 1.0, 100, Time())
    rate.spend("a", 1 << 60)
    assert len(rate) == 0


@given(st.lists(st.integers(0, 50), max_size=200))
def test_no_more_clients_are_remembered_than_allowed(clients: list[int]) -> None:
    rate = Rate(5, 1.0, 10, Time())
    for number, client in enumerate(clients):
        if number % 2:
            rate.spend(client, 1)
        else:
            rate.take(client, 1)
        assert len(rate) <= 10
    for client in clients[-1:]:
        assert rate.take(client, 0) >= 0
