"""Lease tokens: only what was issued, for this subscription and in time, is accepted."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.errors import Unauthorized
from millstream.protocol.tokens import issue_token, token_generation

KEY = b"k" * 32
names = st.text(st.characters(codec="utf-8"), max_size=20)


def code_of(key: bytes, subscription: str, token: str, now_ms: int) -> str:
    with pytest.raises(Unauthorized) as caught:
        token_generation(key, subscription, token, now_ms)
    return caught.value.code


@given(st.binary(min_size=16, max_size=64), names, st.integers(0, 2**60), st.integers(0, 2**60))
def test_a_token_gives_back_its_generation_until_it_expires(
    key: bytes, subscription: str, generation: int, expires_at_ms: int
) -> None:
    token = issue_token(key, subscription, generation, expires_at_ms)
    assert token_generation(key, subscription, token, expires_at_ms) == generation
    assert code_of(key, subscription, token, expires_at_ms + 1) == "TOKEN_EXPIRED"


@given(names, names)
def test_a_token_of_another_subscription_is_invalid(one: str, other: str) -> None:
    token = issue_token(KEY, one, 1, 100)
    if one == other:
        assert token_generation(KEY, other, token, 0) == 1
    else:
        assert code_of(KEY, other, token, 0) == "TOKEN_INVALID"


def test_a_name_with_line_breaks_cannot_pose_as_another_generation() -> None:
    token = issue_token(KEY, "s\n9\n9", 1, 100)
    assert token_generation(KEY, "s\n9\n9", token, 0) == 1
    assert code_of(KEY, "s", token, 0) == "TOKEN_INVALID"


@given(names, st.data())
def test_a_changed_character_makes_a_token_invalid(subscription: str, data: Any) -> None:
    token = issue_token(KEY, subscription, 3, 100)
    at = data.draw(st.integers(0, len(token) - 1))
    other = data.draw(st.characters(codec="utf-8").filter(lambda c: c != token[at]))
    assert code_of(KEY, subscription, token[:at] + other + token[at + 1 :], 0) == "TOKEN_INVALID"


@given(names, st.data())
def test_a_token_cut_short_is_invalid(subscription: str, data: Any) -> None:
    token = issue_token(KEY, subscription, 3, 100)
    assert code_of(KEY, subscription, token[: data.draw(st.integers(0, len(token) - 1))], 0) == "TOKEN_INVALID"


def test_a_token_of_another_key_is_invalid() -> None:
    assert code_of(b"x" * 32, "s", issue_token(KEY, "s", 1, 100), 0) == "TOKEN_INVALID"


@pytest.mark.parametrize("token", ["", ".", "a.", ".a", "a.b.c", "é.é", "\ud800.x", "no-dot"])
def test_garbage_is_invalid_not_a_crash(token: str) -> None:
    assert code_of(KEY, "s", token, 0) == "TOKEN_INVALID"
