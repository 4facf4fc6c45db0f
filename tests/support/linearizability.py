"""Is a history of appends and reads of one stream linearizable? A search after Wing and Gong, with Lowe's memory.

A stream is a sequence of values; an append adds one, a read returns all there are. Every operation must seem to
happen at one moment between its call and its return. The content a stream ends with gives the order of the appends, so
the state is how many of them have happened, and the search is over the order of operations that overlap.
"""

from __future__ import annotations

from typing import NamedTuple

NEVER = float("inf")


class Operation(NamedTuple):
    """An append of `value`, or a read that returned the first `count` values. `returned` is NEVER if unanswered."""

    kind: str
    value: str
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody uses
    called: float
    returned: float


class _Event:
    """A call or a return in a doubly linked list, as the search takes operations out and puts them back."""

    __slots__ = ("after", "before", "match", "operation")

    def __init__(self, operation: int, match: _Event | None) -> None:
        self.operation = operation
        self.match = match  # a call's return; None for a return
        self.before: _Event | None = None
        self.after: _Event | None = None


def find_violation(history: list[Operation], final: list[str]) -> str | None:
    """What cannot be explained by any order, or None. `final` is the stream's content at the end."""
    index = {value: position for position, value in enumerate(final)}
    if len(index) != len(final):
        return "a value is there twice"
    operations = []
    for operation in history:
        if operation.kind == "append" and operation.value not in index:
            if operation.returned != NEVER:
                return f"{operation.value!r} was acknowledged and is not there"
        else:
            operations.append(operation)
    if not operations:
        return None
    head = _linked(operations)
    state = 0
    done = 0  # which operations have been given their moment, as bits
    tried: set[tuple[int, int]] = set()
    taken: list[tuple[_Event, int]] = []
    event = head.after
    furthest = 0, operations[0]  # how many could be explained, and what then could not
    while head.after is not None:
        if event is not None and event.match is not None:
            following = _step(operations[event.operation], state, index)
            key = (done | 1 << event.operation, following if following is not None else -1)
            if following is not None and key not in tried:
                tried.add(key)
                taken.append((event, state))
                state, done = following, key[0]
                _lift(event)
                event = head.after
            else:
                event = event.after
            continue
        if event is None and all(operations[one].returned == NEVER for one in _left(head)):
            return None  # nobody was told anything of those that remain
        if event is not None and len(taken) >= furthest[0]:
            furthest = len(taken), operations[event.operation]
        if not taken:
            return f"no order explains {furthest[1]}"
        event, state = taken.pop()
        done &= ~(1 << event.operation)
        _unlift(event)
        event = event.after
    return None


def _step(operation: Operation, state: int, index: dict[str, int]) -> int | None:
    """The state after an operation, or None if it cannot happen in this state."""
    if operation.kind == "append":
        return state + 1 if index[operation.value] == state else None
    return state if operation.count == state else None


def _linked(operations: list[Operation]) -> _Event:
    head = _Event(-1, None)
    events: list[tuple[float, int, _Event]] = []
    for number, operation in enumerate(operations):
        returned = _Event(number, None)
        # At equal times a call counts as before a return: that only allows more.
        events.append((operation.called, 0, _Event(number, returned)))
        events.append((operation.returned, 1, returned))
    last = head
    for _, _, event in sorted(events, key=lambda item: item[:2]):
        last.after, event.before = event, last
        last = event
    return head


def _left(head: _Event) -> list[int]:
    found = []
    event = head.after
    while event is not None:
        if event.match is not None:
            found.append(event.operation)
        event = event.after
    return found


def _lift(call: _Event) -> None:
    for event in (call, call.match):
        assert event is not None and event.before is not None
        event.before.after = event.after
        if event.after is not None:
            event.after.before = event.before


def _unlift(call: _Event) -> None:
    for event in (call.match, call):
        assert event is not None and event.before is not None
        event.before.after = event
        if event.after is not None:
            event.after.before = event
