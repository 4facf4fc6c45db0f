"""The caches of this process by name, so that operators can see how full they are. Knows nothing of their content.

Every cache has a limit. A cached function also counts hits and misses. A plain dictionary, used where counting would
cost more than the cache saves, reports only its size.
"""

from __future__ import annotations

from collections.abc import Callable, Sized
from functools import _lru_cache_wrapper, lru_cache
from typing import Final, NamedTuple, TypeVar

T = TypeVar("T")

Counts = dict[str, int]


class _Table(NamedTuple):
    entries: Sized
    entries_max: int


_functions: Final[dict[str, _lru_cache_wrapper[object]]] = {}
_tables: Final[dict[str, _Table]] = {}


def cached(name: str, entries_max: int) -> Callable[[Callable[..., T]], _lru_cache_wrapper[T]]:
    """Cache the results of a function, up to a number of entries."""

    def decorate(function: Callable[..., T]) -> _lru_cache_wrapper[T]:
        wrapper = lru_cache(maxsize=entries_max)(function)
        _functions[name] = wrapper
        return wrapper

    return decorate


def show(name: str, entries: Sized, entries_max: int) -> None:
    """Register a table that another module fills and empties. A table of the same name replaces the earlier one."""
    _tables[name] = _Table(entries, entries_max)


def counts() -> dict[str, Counts]:
    found: dict[str, Counts] = {}
    for name, function in _functions.items():
        info = function.cache_info()
        found[name] = {
            "entries": info.currsize,
            "entries_max": info.maxsize or 0,
            "hits": info.hits,
            "misses": info.misses,
        }
    for name, table in _tables.items():
        found[name] = {"entries": len(table.entries), "entries_max": table.entries_max}
    return found
