"""A cache with a limit on bytes, which forgets what was used longest ago."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

V = TypeVar("V")


class ByteLimitedCache(Generic[V]):
    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._entries: OrderedDict[Hashable, tuple[V, int]] = OrderedDict()
        self.bytes = 0
        self.hits = self.misses = 0

    def get(self, key: Hashable) -> V | None:
        entry = self._entries.get(key)
        if entry is None:
            self.misses += 1
            return None
        self.hits += 1
        self._entries.move_to_end(key)
        return entry[0]

    def keep(self, key: Hashable) -> bool:
        """Whether there is such an entry, which then stays for a while; no use of it that counts."""
        if key not in self._entries:
            return False
        self._entries.move_to_end(key)
        return True

    def counts(self) -> dict[str, int]:
        return {
            "bytes": self.bytes,
            "bytes_max": self._bytes_max,
            "entries": len(self._entries),
            "hits": self.hits,
            "misses": self.misses,
        }

    def put(self, key: Hashable, value: V, size: int) -> None:
        """Keep a value; one that is larger than the whole cache is not kept."""
        previous = self._entries.pop(key, None)
        if previous is not None:
            self.bytes -= previous[1]
        if size > self._bytes_max:
            return
        self._entries[key] = (value, size)
        self.bytes += size
        while self.bytes > self._bytes_max:
            _, (_, dropped) = self._entries.popitem(last=False)
            self.bytes -= dropped

    def __contains__(self, key: Hashable) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)
