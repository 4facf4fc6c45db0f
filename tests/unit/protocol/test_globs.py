"""Globs against the obvious recursive definition."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.protocol.globs import literal_prefix, matches

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
