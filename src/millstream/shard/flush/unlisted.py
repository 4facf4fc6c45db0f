"""Objects in the store that the catalog does not list yet, and that must not be taken for leftovers of a crash.

Those of the flush under way: no more than its segments, notes and manifest, and none between two flushes. And the
segments that a compaction proposes while it is being checked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class UnlistedObjects:
    def __init__(self) -> None:
        self.written_paths: set[str] = set()
        self._proposed_paths: set[str] = set()

    @property
    def paths(self) -> set[str]:
        return self.written_paths | self._proposed_paths

    @contextmanager
    def writing(self) -> Iterator[None]:
        """A flush is under way; when it ends, the catalog lists what it wrote, or nothing refers to it."""
        try:
            yield
        finally:
            self.written_paths.clear()

    @contextmanager
    def proposing(self, paths: Iterable[str]) -> Iterator[None]:
        """These are being checked for a compaction, one at a time."""
        self._proposed_paths = set(paths)
        try:
            yield
        finally:
            self._proposed_paths = set()
