"""Tokens for URLs: what is signed comes back, and nothing else is good."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.access.url_tokens import PREFIX, UrlGrant, make_url_token, read_url_token
from millstream.errors import Unauthorized
from millstream.protocol.tokens import issue_token

SECRET = bytes(range(32))
GRANT = UrlGrant("team-a", "chat/1", 2_000, "token:80fe1dd1291c")

grants = st.builds(UrlGrant, st.text(), st.text(), st.integers(1, 2**53), st.text())


@given(grants, st.binary(min_size=32, max_size=32))
def test_a_token_survives_the_round_trip_and_can_stand_in_a_url(grant: UrlGrant, secret: bytes) -> None:
    token = make_url_token(secret, grant)
    assert token.isascii() and all(one.isalnum() or one in "-_." for one in token)
    if len(token) <= 2048:
        assert read_url_token(secret, token, grant.expires_at_ms - 1) == grant


@given(st.data())
def test_a_token_with_any_character_changed_is_refused(data: st.DataObject) -> None:
    token = make_url_token(SECRET, GRANT)
    at = data.draw(st.integers(0, len(token) - 1))
    other = data.draw(st.characters())
    changed = token[:at] + other + token[at + 1 :]
    if changed != token:
        with pytest.raises(Unauthorized):
            read_url_token(SECRET, changed, 0)


@given(grants, st.data())
def test_any_token_that_is_cut_off_or_has_a_bit_flipped_is_refused(grant: UrlGrant, data: st.DataObject) -> None:
    token = make_url_token(SECRET, grant)
    with pytest.raises(Unauthorized):
        read_url_token(SECRET, token[: data.draw(st.integers(0, len(token) - 1))], 0)
    flipped = bytearray(token.encode())
    flipped[data.draw(st.integers(0, len(flipped) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(Unauthorized):
        read_url_token(SECRET, flipped.decode("latin-1"), 0)


@given(st.text() | st.text().map(lambda text: PREFIX + text))
def test_whatever_else_stands_in_a_url_is_refused(text: str) -> None:
    with pytest.raises(Unauthorized):
        read_url_token(SECRET, text, 0)


def test_a_token_that_is_cut_off_is_refused() -> None:
    token = make_url_token(SECRET, GRANT)
    for length in range(len(token)):
        with pytest.raises(Unauthorized):
            read_url_token(SECRET, token[:length], 0)


def test_a_token_is_good_until_it_expires_and_not_a_moment_longer() -> None:
    token = make_url_token(SECRET, GRANT)
    assert read_url_token(SECRET, token, 1_999) == GRANT
    with pytest.raises(Unauthorized, match="expired"):
        read_url_token(SECRET, token, 2_000)


def test_a_token_of_another_server_is_refused() -> None:
    with pytest.raises(Unauthorized):
        read_url_token(SECRET, make_url_token(bytes(32), GRANT), 0)


def test_what_the_same_secret_signs_elsewhere_does_not_pass() -> None:
    lease = issue_token(SECRET, "subscription", 1, 2_000)
    for token in (lease, PREFIX + lease):
        with pytest.raises(Unauthorized):
            read_url_token(SECRET, token, 0)
