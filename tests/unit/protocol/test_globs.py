"""Globs against the obvious recursive definition."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.protocol.globs import Patterns, literal_prefix, matches

segments = st.sampled_from(["a", "b", "ab", "é", "a*"])
patterns = st.lists(st.sampled_from(["*", "**"]) | segments, min_size=1, max_size=6).map("/".join)
paths = st.lists(segments, min_size=1, max_size=6).map("/".join)


def reference(pattern: list[str], path: list[str]) -> bool:
    if not pattern:
        return not path
    if pattern[0] == "**":
        return any(reference(pattern[1:], path[skipped:]) for skipped in range(len(path) + 1))
    return bool(path) and pattern[0] in ("*", path[0]) and reference(pattern[1:], path[1:])


@settings(max_examples=200)
@given(patterns, paths)
def test_a_pattern_matches_what_the_definition_says(pattern: str, path: str) -> None:
    assert matches(pattern, path) == reference(pattern.split("/"), path.split("/"))


@given(patterns, paths)
def test_every_path_that_matches_starts_with_the_literal_prefix(pattern: str, path: str) -> None:
    if matches(pattern, path):
        assert path.startswith(literal_prefix(pattern))


@pytest.mark.parametrize(
    ("pattern", "path", "expected"),
    [
        ("events/*", "events/a", True),
        ("events/*", "events", False),
        ("events/*", "events/a/b", False),
        ("events/**", "events", True),
        ("events/**", "events/a/b", True),
        ("**", "anything/at/all", True),
        ("**/z", "z", True),
        ("a/**/z", "a/z", True),
        ("a/**/z", "a/b/c/z", True),
        ("a/**/z", "a/b/c", False),
        ("ev*", "events", False),  # a star is a whole segment, not a part of one
        ("/events/*/", "events/a", True),
        ("Events/*", "events/a", False),
    ],
)
def test_a_known_pair_matches_as_documented(pattern: str, path: str, expected: bool) -> None:
    assert matches(pattern, path) is expected


def test_a_hostile_pattern_does_not_backtrack() -> None:
    started = time.monotonic()
    assert not matches("/".join(["**", "a"] * 60), "/".join(["a"] * 59 + ["b"]))
    assert time.monotonic() - started < 1.0


@settings(max_examples=200)
@given(st.lists(patterns, max_size=12), st.data(), paths)
def test_many_patterns_at_once_match_as_each_of_them(many: list[str], data: st.DataObject, path: str) -> None:
    tree = Patterns()
    kept = {str(number): pattern for number, pattern in enumerate(many)}
    for name, pattern in kept.items():
        tree.add(name, pattern)
    for name in data.draw(st.lists(st.sampled_from(sorted(kept)), unique=True)) if kept else []:
        tree.remove(name, kept.pop(name))
    wanted = {name for name, pattern in kept.items() if reference(pattern.split("/"), path.split("/"))}
    assert tree.matching(path) == wanted
    for name, pattern in kept.items():
        tree.remove(name, pattern)
    assert not tree
