"""Glob patterns over stream paths: `*` is one segment, `**` any number of them, also none."""

from __future__ import annotations

from itertools import takewhile


def matches(pattern: str, path: str) -> bool:
    """Whether the path fits the pattern, in time proportional to both: a set of states, no backtracking."""
    wanted = pattern.strip("/").split("/")
    states = _past_any({0}, wanted)
    for segment in path.strip("/").split("/"):
        reached = set()
        for state in states:
            if state < len(wanted):
                if wanted[state] == "**":
                    reached.add(state)
                elif wanted[state] in ("*", segment):
                    reached.add(state + 1)
        states = _past_any(reached, wanted)
    return len(wanted) in states


def _past_any(states: set[int], wanted: list[str]) -> set[int]:
    """The states reachable from these by letting `**` match nothing more."""
    for state in sorted(states):
        while state < len(wanted) and wanted[state] == "**":
            state += 1
            states.add(state)
    return states


def literal_prefix(pattern: str) -> str:
    """The text every matching path starts with; it bounds the search for them."""
    return "/".join(takewhile(lambda segment: segment not in ("*", "**"), pattern.strip("/").split("/")))
