"""Commands that change what a name means have that name to themselves; others wait in line behind them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from typing import TypeVar

from millstream.pending import Pending

T = TypeVar("T")


class Names:
    def __init__(self) -> None:
        self._held: dict[Hashable, deque[Callable[[], None]]] = {}

    def __bool__(self) -> bool:
        return bool(self._held)

    def is_held(self, name: Hashable) -> bool:
        return name in self._held

    def wait_for(self, name: Hashable, action: Callable[[], Pending[T]]) -> Pending[T]:
        """Run an action when a name that is held is free; it may find the name held anew, and wait again."""
        outcome: Pending[T] = Pending()
        self._held[name].append(lambda: action().when_settled(outcome.settle))
        return outcome

    def hold(self, name: Hashable) -> None:
        assert name not in self._held
        self._held[name] = deque()

    def release(self, name: Hashable) -> None:
        """Free the name and let those in line try again, in order; one of them may hold it anew."""
        for action in self._held.pop(name):
            action()
