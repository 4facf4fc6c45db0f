"""Names: one holder at a time, and those in line go in the order they came."""

from __future__ import annotations

from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from millstream.pending import Pending
from millstream.shard.names import Names


def test_holding_one_name_leaves_the_others_free() -> None:
    names = Names()
    assert not names.is_held("a") and not names
    names.hold("a")
    assert names and names.is_held("a")
    assert not names.is_held("b")


def test_actions_run_in_order_when_the_name_is_released() -> None:
    names, ran, told = Names(), list[int](), list[object]()

    def action(number: int) -> Pending[int]:
        ran.append(number)
        return Pending.settled(number * 10)

    names.hold("a")
    for number in range(5):
        names.wait_for("a", partial(action, number)).when_settled(told.append)
    assert ran == told == []
    names.release("a")
    assert ran == [0, 1, 2, 3, 4]
    assert told == [0, 10, 20, 30, 40]
    assert not names


@given(st.lists(st.booleans(), max_size=12))
def test_order_is_kept_when_some_of_those_in_line_hold_the_name_anew(holders: list[bool]) -> None:
    names, ran, held = Names(), [], []

    def arrive(number: int, holds: bool) -> Pending[None]:
        if names.is_held("a"):
            return names.wait_for("a", partial(arrive, number, holds))
        ran.append(number)
        if holds:
            names.hold("a")
            held.append(number)
        return Pending.settled(None)

    arrive(-1, True)
    for number, holds in enumerate(holders):
        arrive(number, holds)
    while names:
        names.release("a")
    assert ran == [-1, *range(len(holders))]
    assert held == [-1, *(number for number, holds in enumerate(holders) if holds)]
