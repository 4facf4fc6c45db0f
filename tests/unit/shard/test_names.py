"""Names: one holder at a time, and those in line go in the order they came."""

from __future__ import annotations

from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from millstream.shard.names import Names


def test_a_free_name_makes_nobody_wait() -> None:
    names = Names()
    assert not names.wait_for("a", lambda: None)
    assert not names


def test_actions_run_in_order_when_the_name_is_released() -> None:
    names, ran = Names(), list[int]()
    names.hold("a")
    for number in range(5):
        assert names.wait_for("a", partial(ran.append, number))
    assert ran == []
    names.release("a")
    assert ran == [0, 1, 2, 3, 4]
    assert not names


def test_holding_one_name_leaves_the_others_free() -> None:
    names = Names()
    names.hold("a")
    assert names
    assert not names.wait_for("b", lambda: None)


@given(st.lists(st.booleans(), max_size=12))
def test_order_is_kept_when_some_of_those_in_line_hold_the_name_anew(holders: list[bool]) -> None:
    names, ran, held = Names(), [], []

    def arrive(number: int, holds: bool) -> None:
        if names.wait_for("a", partial(arrive, number, holds)):
            return
        ran.append(number)
        if holds:
            names.hold("a")
            held.append(number)

    arrive(-1, True)
    for number, holds in enumerate(holders):
        arrive(number, holds)
    while names:
        names.release("a")
    assert ran == [-1, *range(len(holders))]
    assert held == [-1, *(number for number, holds in enumerate(holders) if holds)]
