"""Entity tags: they name a state exactly, and change with everything that must invalidate a cache."""

from __future__ import annotations

from typing import Any

from hypothesis import assume, given
from hypothesis import strategies as st

from millstream.protocol.etags import continues_another, format_etag, none_match, state_matches
from millstream.protocol.offsets import OFFSET_MAX, format_offset
from millstream.units import Incarnation

states = st.tuples(st.integers(1, 2**63).map(Incarnation), st.integers(0, OFFSET_MAX).map(format_offset), st.booleans())
starts = st.one_of(st.just("-1"), st.integers(0, OFFSET_MAX).map(format_offset))


@given(states, starts)
def test_a_tag_matches_the_state_it_was_made_from(state: tuple[Incarnation, str, bool], start: str) -> None:
    incarnation, end, closed = state
    tag = format_etag(incarnation, start, end, closed)
    assert state_matches(tag, *state)
    assert none_match(tag, tag)


@given(states, states, starts)
def test_a_tag_matches_no_other_state(one: Any, other: Any, start: str) -> None:
    assume(one != other)
    assert not state_matches(format_etag(one[0], start, one[1], one[2]), *other)


@given(states, starts)
def test_closing_changes_the_tag(state: tuple[Incarnation, str, bool], start: str) -> None:
    incarnation, end, _ = state
    open_tag, closed_tag = (format_etag(incarnation, start, end, closed) for closed in (False, True))
    assert open_tag != closed_tag
    assert not none_match(open_tag, closed_tag)


@given(states, starts, st.data())
def test_a_tag_that_is_cut_short_matches_nothing(state: tuple[Incarnation, str, bool], start: str, data: Any) -> None:
    tag = format_etag(state[0], start, state[1], state[2])
    cut = tag[: data.draw(st.integers(0, len(tag) - 1))]
    assert not none_match(cut, tag)
    assert not state_matches(cut, *state)


@given(states, starts, st.data())
def test_a_tag_with_a_character_changed_does_not_validate_a_cache(
    state: tuple[Incarnation, str, bool], start: str, data: Any
) -> None:
    tag = format_etag(state[0], start, state[1], state[2])
    at = data.draw(st.integers(0, len(tag) - 1))
    other = data.draw(st.characters(min_codepoint=33, max_codepoint=126).filter(lambda c: c != tag[at]))
    assert not none_match(tag[:at] + other + tag[at + 1 :], tag)


def test_a_list_of_tags_is_searched_for_each() -> None:
    tag = format_etag(Incarnation(10), "-1", format_offset(5), False)
    assert none_match(f'"x", {tag} ,"y"', tag)
    assert state_matches(f'"x", {tag} ,"y"', Incarnation(10), format_offset(5), False)
    assert not none_match('"x","y"', tag)


def test_a_star_matches_whatever_exists() -> None:
    assert none_match(" * ", '"1:0:0"')
    assert state_matches(" * ", Incarnation(1), format_offset(0), False)


def test_a_weak_tag_serves_if_none_match_but_not_if_match() -> None:
    tag = format_etag(Incarnation(10), "-1", format_offset(5), False)
    assert none_match(f"W/{tag}", tag)
    # RFC 9110 §13.1.1: If-Match compares strongly.
    assert not state_matches(f"W/{tag}", Incarnation(10), format_offset(5), False)


@given(states, states, starts, st.sampled_from(["{}", "W/{}", '"other", {}']))
def test_a_tag_of_another_incarnation_continues_another_where_it_ended(
    one: Any, other: Any, start: str, form: str
) -> None:
    assume(one[0] != other[0])
    header = form.format(format_etag(one[0], start, one[1], one[2]))
    assert continues_another(header, other[0], one[1])
    assert not continues_another(header, one[0], one[1])
    assert one[1] == other[1] or not continues_another(header, other[0], other[1])
