"""Subscription configurations: what is normalised, what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from millstream.errors import InvalidRequest
from millstream.streams.subscriptions import LEASE_TTL_MS_DEFAULT, STREAMS_MAX, acked_token, parse_config

WEBHOOK = {"type": "webhook", "pattern": "events/*", "webhook": {"url": "https://x.example"}}
PULL = {"type": "pull-wake", "streams": ["a"], "wake_stream": "wakes"}


def test_slashes_order_and_repetition_do_not_make_another_configuration() -> None:
    one = parse_config({**PULL, "streams": ["b", "/a/", "b"], "wake_stream": "/wakes/", "pattern": "/x/**/"})
    other = parse_config({**PULL, "streams": ["a", "b"], "pattern": "x/**", "description": ""})
    assert one == other
    assert (one.streams, one.wake_stream, one.pattern) == (["a", "b"], "wakes", "x/**")
    assert one.lease_ttl_ms == LEASE_TTL_MS_DEFAULT


@pytest.mark.parametrize("lease", [1_000, 600_000])
def test_a_lease_at_the_edges_of_its_range_is_accepted(lease: int) -> None:
    assert parse_config({**WEBHOOK, "lease_ttl_ms": lease}).lease_ttl_ms == lease


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (None, "JSON object"),
        ([], "JSON object"),
        ({}, "type"),
        ({**WEBHOOK, "type": "email"}, "type"),
        ({**WEBHOOK, "pattern": None}, "pattern"),
        ({**WEBHOOK, "pattern": 3}, "pattern"),
        ({**WEBHOOK, "pattern": "é" * 513}, "pattern"),
        ({**WEBHOOK, "webhook": None}, "webhook.url"),
        ({**WEBHOOK, "webhook": {}}, "webhook.url"),
        ({**WEBHOOK, "webhook": {"url": 3}}, "url"),
        ({**WEBHOOK, "lease_ttl_ms": 999}, "lease_ttl_ms"),
        ({**WEBHOOK, "lease_ttl_ms": 600_001}, "lease_ttl_ms"),
        ({**WEBHOOK, "lease_ttl_ms": 1e4}, "lease_ttl_ms"),
        ({**WEBHOOK, "lease_ttl_ms": True}, "lease_ttl_ms"),
        ({**WEBHOOK, "lease_ttl_ms": "5000"}, "lease_ttl_ms"),
        ({**WEBHOOK, "description": 3}, "description"),
        ({**PULL, "wake_stream": ""}, "wake_stream"),
        ({**PULL, "streams": "a"}, "streams"),
        ({**PULL, "streams": [3]}, "streams"),
        ({**PULL, "streams": ["/"]}, "streams"),
        ({**PULL, "streams": ["a"] * (STREAMS_MAX + 1)}, "streams"),
    ],
)
def test_a_wrong_configuration_is_refused_by_the_name_of_the_field(body: Any, named: str) -> None:
    with pytest.raises(InvalidRequest, match=named) as caught:
        parse_config(body)
    assert caught.value.code == "INVALID_REQUEST"


def test_an_offset_that_acknowledges_nothing_is_shown_as_the_beginning() -> None:
    assert acked_token(-1) == "-1"
    assert acked_token(0) == "0000000000000000_0000000000000000"
