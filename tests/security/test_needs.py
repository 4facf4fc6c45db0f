"""Routes that nobody thought of, and patterns of subscriptions."""

from __future__ import annotations

from typing import Any

import pytest

from millstream.access.scopes import Need, Principal, parse_scopes
from millstream.errors import Forbidden
from millstream.server.api import needs
from millstream.server.api.routes import Route
from millstream.server.http.messages import Request
from millstream.streams.subscriptions import parse_config


def request(method: str = "GET", path: bytes = b"/console") -> Request:
    return Request(method, path, b"", {}, b"")


def principal(*scopes: str) -> Principal:
    return Principal("token:1", "n", parse_scopes(scopes))


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
def test_a_route_nobody_thought_of_is_closed(method: str) -> None:
    everything_but = principal("read:*", "write:*", "admin:team-a")
    new: Any = "something new"
    assert not needs.is_open(request(method), new, open_metrics=True)
    with pytest.raises(Forbidden):
        needs.check(everything_but, request(method), Route(new), {})
    needs.check(principal("admin:*"), request(method), Route(new), {})


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("team-a/s", [Need("read", "team-a", "s")]),
        ("team-a/*", [Need("read", "team-a", "")]),
        ("team-a/chat/*", [Need("read", "team-a", "chat/")]),
        ("team-a/chat/**", [Need("read", "team-a", "chat")]),
        ("team-a/*/**", [Need("read", "team-a", "")]),
        ("team-a/**", [Need("read", "team-a", ""), Need("read", "_default", "team-a")]),
        ("*", [Need("read", "*", "")]),
        ("**", [Need("read", "*", "")]),
        ("*/s", [Need("read", "*", "")]),
        ("s", [Need("read", "_default", "s")]),
    ],
)
def test_a_pattern_needs_read_on_all_it_can_match(pattern: str, expected: list[Need]) -> None:
    config = parse_config({"type": "pull-wake", "pattern": pattern, "wake_stream": "w/w"})
    assert needs.subscription_needs(config) == [*expected, Need("write", "w", "w")]
