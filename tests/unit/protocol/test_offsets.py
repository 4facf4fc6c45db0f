"""Offset tokens: what is written comes back, what is malformed is refused."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.errors import InvalidRequest
from millstream.protocol.offsets import OFFSET_MAX, format_offset, parse_offset

offsets = st.integers(0, OFFSET_MAX)


@given(offsets)
def test_an_offset_survives_the_round_trip(offset: int) -> None:
    assert parse_offset(format_offset(offset)) == offset


@given(offsets, offsets)
def test_tokens_sort_as_text_in_the_order_of_their_offsets(left: int, right: int) -> None:
    assert (format_offset(left) < format_offset(right)) == (left < right)


@given(offsets)
def test_the_twenty_digit_alias_means_the_same_offset(offset: int) -> None:
    assert parse_offset(f"{offset:020d}") == offset


@given(offsets)
def test_a_plain_decimal_means_the_same_offset(offset: int) -> None:
    assert parse_offset(str(offset)) == offset


def test_the_start_is_the_token_the_official_suite_hard_codes() -> None:
    assert format_offset(0) == "0000000000000000_0000000000000000"


@given(offsets, st.integers(0, 32), st.characters(codec="utf-8"))
def test_a_token_with_one_character_changed_is_refused_or_another_offset(offset: int, at: int, other: str) -> None:
    token = format_offset(offset)
    changed = token[:at] + other + token[at + 1 :]
    if re.fullmatch(r"0{16}_[0-9]{16}", changed):
        assert format_offset(parse_offset(changed)) == changed
    else:
        with pytest.raises(InvalidRequest):
            parse_offset(changed)


@pytest.mark.parametrize(
    "token",
    [
        "",
        "-1",
        "now",
        " 0000000000000000_0000000000000000",
        "0000000000000000_0000000000000000\n",
        "0000000000000000_",
        "_0000000000000000",
        "0000000000000001_0000000000000000",
        "0000000000000000_00000000000000000",
        "0000000000000000_000000000000000a",
        "0000000000000000_٠٠٠٠٠٠٠٠٠٠٠٠٠٠٠٠",
        "0000000000000000,0000000000000000",
        "0000000000000000/0000000000000000",
        "0000000000000000_0000000000000000\0",
        "00010000000000000000",  # an alias beyond the greatest offset
        "9" * 20,
        "9" * 19,
        "9" * 17,
        "0" * 21,
    ],
)
def test_a_malformed_token_is_refused_with_a_hint(token: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_offset(token)
    assert caught.value.code == "invalid_offset"
    assert caught.value.hint


def test_a_long_token_is_not_echoed_whole() -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_offset("x" * 10_000)
    assert len(caught.value.message) < 200
