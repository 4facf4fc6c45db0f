"""Scopes: what covers what, and that their text says the same."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.access.scopes import ACTIONS, EVERY_BUCKET, Need, Principal, Scope, parse_scope, parse_scopes

NAMES = st.text(st.sampled_from("ab-_."), min_size=1, max_size=6)
SCOPES = st.builds(Scope, st.sampled_from(ACTIONS), NAMES, st.text(st.sampled_from("ab/."), max_size=4))


@given(SCOPES)
def test_a_scope_survives_its_text(scope: Scope) -> None:
    assert parse_scope(str(scope)) == scope


@given(SCOPES, NAMES, NAMES)
def test_a_scope_covers_only_its_own_bucket_and_prefix(scope: Scope, bucket: str, stream: str) -> None:
    need = Need("read", bucket, stream)
    allowed = scope.bucket == bucket and stream.startswith(scope.prefix) and scope.action in ("read", "admin")
    assert scope.covers(need) == allowed


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("granted", ACTIONS)
def test_admin_includes_the_others_and_they_include_nothing(granted: str, action: str) -> None:
    assert Scope(granted, "b").covers(Need(action, "b", "s")) == (granted in (action, "admin"))


def test_a_star_covers_every_bucket_and_the_server_itself_needs_one() -> None:
    assert Scope("admin", EVERY_BUCKET).covers(Need("admin", "team-a"))
    assert Scope("admin", EVERY_BUCKET).covers(Need("admin", EVERY_BUCKET))
    assert not Scope("admin", "team-a").covers(Need("admin", EVERY_BUCKET))


def test_a_need_for_a_whole_prefix_is_not_covered_by_a_longer_one() -> None:
    scope = Scope("read", "b", "chat/")
    assert scope.covers(Need("read", "b", "chat/rooms"))
    assert not scope.covers(Need("read", "b", "chat"))
    assert not scope.covers(Need("read", "b", ""))


@pytest.mark.parametrize("text", ["", "read", "read:", "own:b", "read:a b", "read:/p", "READ:b", "read:b\n"])
def test_what_is_no_scope_is_none(text: str) -> None:
    assert parse_scope(text) is None


def test_scopes_of_other_systems_are_skipped() -> None:
    assert parse_scopes(["openid", "read:b", "email"]) == (Scope("read", "b"),)


def test_a_principal_expires_at_its_time_and_not_before() -> None:
    principal = Principal("token:1", "n", (), 1000)
    assert not principal.is_expired(999)
    assert principal.is_expired(1000)
    assert not Principal("token:1", "n", ()).is_expired(1 << 62)
