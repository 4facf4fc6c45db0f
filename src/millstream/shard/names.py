"""Commands that change what a name means run alone on that name; others wait in line behind them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable

Action = Callable[[], None]


class Names:
    def __init__(self) -> None:
        self._held: dict[Hashable, deque[Action]] = {}

    def __bool__(self) -> bool:
        return bool(self._held)

    def is_held(self, name: Hashable) -> bool:
        return name in self._held

    def wait_for(self, name: Hashable, action: Action) -> bool:
        """Whether the name is held; if so the action runs when it is free."""
        waiting = self._held.get(name)
        if waiting is None:
            return False
        waiting.append(action)
        return True

    def hold(self, name: Hashable) -> None:
        assert name not in self._held
        self._held[name] = deque()

    def release(self, name: Hashable) -> None:
        """Free the name and let those in line try again, in order; one of them may hold it anew."""
        for action in self._held.pop(name):
            action()
