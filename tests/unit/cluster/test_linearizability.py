"""The checker that the cluster tests rely on: it accepts what some order explains and nothing else."""

from __future__ import annotations

from itertools import permutations

from hypothesis import given
from hypothesis import strategies as st

from support.linearizability import NEVER, Operation, find_violation


def append(value: str, called: float, returned: float) -> Operation:
    return Operation("append", value, 0, called, returned)


def read(count: int, called: float, returned: float) -> Operation:
    return Operation("read", "", count, called, returned)


def test_a_sequential_history_is_linearizable() -> None:
    history = [append("a", 0, 1), read(1, 2, 3), append("b", 4, 5), read(2, 6, 7)]
    assert find_violation(history, ["a", "b"]) is None


def test_a_read_beside_an_append_may_see_it_or_not() -> None:
    for count in (0, 1):
        assert find_violation([append("a", 0, 10), read(count, 2, 3)], ["a"]) is None


def test_a_read_that_misses_an_acknowledged_append_is_found() -> None:
    assert find_violation([append("a", 0, 1), read(0, 2, 3)], ["a"]) is not None


def test_a_read_that_goes_back_is_found() -> None:
    assert find_violation([append("a", 0, 10), read(1, 2, 3), read(0, 4, 5)], ["a"]) is not None


def test_a_read_of_what_is_not_yet_written_is_found() -> None:
    assert find_violation([read(1, 0, 1), append("a", 2, 3)], ["a"]) is not None


def test_appends_in_another_order_than_they_were_made_are_found() -> None:
    assert find_violation([append("a", 0, 1), append("b", 2, 3)], ["b", "a"]) is not None


def test_an_acknowledged_append_that_is_gone_is_found() -> None:
    assert find_violation([append("a", 0, 1)], []) is not None


def test_a_value_that_is_there_twice_is_found() -> None:
    assert find_violation([append("a", 0, 1)], ["a", "a"]) is not None


def test_an_unanswered_append_may_have_happened_at_any_time_or_not_at_all() -> None:
    assert find_violation([append("a", 0, NEVER), read(0, 5, 6), read(1, 7, 8)], ["a"]) is None
    assert find_violation([append("a", 0, NEVER), read(0, 5, 6)], []) is None


@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 3), st.integers(0, 9), st.integers(1, 6)), min_size=1, max_size=5)
)
def test_it_agrees_with_trying_every_order(drawn: list[tuple[bool, int, int, int]]) -> None:
    history = [
        append(f"v{number}", called, called + length) if is_append else read(count, called, called + length)
        for number, (is_append, count, called, length) in enumerate(drawn)
    ]
    final = [operation.value for operation in history if operation.kind == "append"]
    assert (find_violation(history, final) is None) is any(_explains(order, final) for order in permutations(history))


def _explains(order: tuple[Operation, ...], final: list[str]) -> bool:
    for position, operation in enumerate(order):
        if any(later.returned < operation.called for later in order[position + 1 :]):
            return False
    state = 0
    for operation in order:
        if operation.kind == "append":
            if final[state] != operation.value:
                return False
            state += 1
        elif operation.count != state:
            return False
    return True
