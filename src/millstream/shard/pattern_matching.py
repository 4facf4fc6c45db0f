"""Which subscriptions a stream belongs to by its name: paths are compared with all patterns once, between requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from millstream.shard.slices import in_slices
from millstream.streams.subscriptions import Subscription, Subscriptions

MATCHED_PATHS_MAX: Final = 100_000


class PatternMatching:
    """`on_found` is told of each subscription for which a path was found."""

    def __init__(self, state: Subscriptions, on_found: Callable[[Subscription], None]) -> None:
        self._state = state
        self._on_found = on_found
        # Paths that no pattern was compared with yet, and those that were since the patterns last changed.
        self._unmatched: dict[str, None] = {}
        self._matched: set[str] = set()
        self._is_running = False
        # By subscription: paths that its pattern fits and that are to be linked.
        self.found: dict[str, dict[str, None]] = {}

    def clear(self) -> None:
        self._unmatched.clear()
        self._matched.clear()
        self.found.clear()

    def is_matched(self, path: str) -> bool:
        return path in self._matched

    def forget(self, paths: Iterable[str]) -> None:
        """Compare these paths again when something is appended to their streams."""
        self._matched.difference_update(paths)

    def forget_all(self) -> None:
        """There is a new pattern, which no path was compared with."""
        self._matched.clear()

    def match(self, paths: Iterable[str]) -> None:
        """Find out, soon, whose patterns these paths fit."""
        self._unmatched.update(dict.fromkeys(paths))
        if not self._is_running:
            self._is_running = True
            in_slices(self._steps()).when_settled(self._finished)

    def _finished(self, _: object) -> None:
        self._is_running = False

    def _steps(self) -> Iterator[None]:
        patterns = self._state.patterns
        while self._unmatched:
            path = next(iter(self._unmatched))
            version = patterns.version
            names: set[str] = set()
            for fitting in patterns.steps(path):
                names = fitting
                yield
            if version != patterns.version:
                continue  # the patterns changed half-way: once more
            self._unmatched.pop(path, None)
            if len(self._matched) >= MATCHED_PATHS_MAX:
                self._matched.clear()
            self._matched.add(path)
            for name in names:
                subscription = self._state.by_id.get(name)
                if subscription and path not in subscription.links and path != subscription.config.wake_stream:
                    self.found.setdefault(name, {})[path] = None
                    self._on_found(subscription)
