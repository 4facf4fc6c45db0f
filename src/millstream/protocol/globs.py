"""Glob patterns over stream paths: `*` is one segment, `**` any number of them, also none.

`Patterns` matches a path against very many patterns at once: they share a tree of their segments, and a path walks down
it. What a path costs grows with its own length and with how many different beginnings of patterns it fits, not with how
many patterns there are.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile
from typing import Final

ONE: Final = "*"
ANY: Final = "**"


def segments_of(pattern: str) -> list[str]:
    """The pattern's segments; `**` after `**` adds nothing."""
    segments: list[str] = []
    for segment in pattern.strip("/").split("/"):
        if segment != ANY or segments[-1:] != [ANY]:
            segments.append(segment)
    return segments


def wildcards_of(pattern: str) -> int:
    return sum(segment in (ONE, ANY) for segment in segments_of(pattern))


class _Node:
    """A beginning that patterns share; `names` are those whose pattern ends here."""

    __slots__ = ("children", "is_any", "names")

    def __init__(self, *, is_any: bool = False) -> None:
        self.children: dict[str, _Node] = {}
        self.names: set[str] = set()
        self.is_any = is_any


class Patterns:
    """Patterns by name. `version` changes with each of them, for those who remember what matched."""

    def __init__(self) -> None:
        self._root = _Node()
        self.version = 0

    def __bool__(self) -> bool:
        return bool(self._root.children)

    def add(self, name: str, pattern: str) -> None:
        node = self._root
        for segment in segments_of(pattern):
            child = node.children.get(segment)
            if child is None:
                child = node.children[segment] = _Node(is_any=segment == ANY)
            node = child
        node.names.add(name)
        self.version += 1

    def remove(self, name: str, pattern: str) -> None:
        segments = segments_of(pattern)
        nodes = [self._root]
        for segment in segments:
            nodes.append(nodes[-1].children[segment])
        nodes[-1].names.discard(name)
        for parent, segment in zip(reversed(nodes[:-1]), reversed(segments), strict=True):
            child = parent.children[segment]
            if child.names or child.children:
                break
            del parent.children[segment]
        self.version += 1

    def steps(self, path: str) -> Iterator[set[str]]:
        """Walk a path down, a segment at a time; the last set has the names of all patterns that fit the path.

        A step takes time for each place in the tree where the walk stands, so a caller with little time stops between
        steps.
        """
        places = _with_nothing({self._root})
        for segment in path.strip("/").split("/"):
            reached = set()
            for place in places:
                if place.is_any:
                    reached.add(place)
                for key in (segment, ONE) if segment not in (ONE, ANY) else (ONE,):
                    child = place.children.get(key)
                    if child is not None:
                        reached.add(child)
            places = _with_nothing(reached)
            yield set()
        yield {name for place in places for name in place.names}

    def matching(self, path: str) -> set[str]:
        *_, found = self.steps(path)
        return found


def _with_nothing(places: set[_Node]) -> set[_Node]:
    """With the places that are reached by letting `**` match nothing."""
    for place in list(places):
        child = place.children.get(ANY)
        if child is not None:
            places.add(child)  # which has no `**` below it: one after the other is one
    return places


def matches(pattern: str, path: str) -> bool:
    """Whether the path fits the pattern, in time proportional to both: a set of states, no backtracking."""
    patterns = Patterns()
    patterns.add("", pattern)
    return bool(patterns.matching(path))


def literal_prefix(pattern: str) -> str:
    """The text every matching path starts with; it bounds the search for them."""
    return "/".join(takewhile(lambda segment: segment not in (ONE, ANY), pattern.strip("/").split("/")))
