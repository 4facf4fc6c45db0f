"""The scopes that each route needs: the only module that decides this.

A route that is not listed here needs the server's admin scope, so a route that is added and forgotten here is closed.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile
from typing import Final

from millstream.access.scopes import EVERY_BUCKET, Need, Principal
from millstream.errors import Forbidden, NotFound
from millstream.protocol.keys import decode_segment, parse_v1_path
from millstream.server.api.routes import Kind, Route
from millstream.server.api.stream_api import source_key
from millstream.server.api.subscription_api import CONTROL_ROOT, json_body, object_body
from millstream.server.api.url_token_api import requested_key
from millstream.server.http.messages import Request, parse_query
from millstream.streams.records import SubscriptionConfig
from millstream.streams.subscriptions import Subscription, checked_paths, parse_config

SERVER_ADMIN: Final = Need("admin", EVERY_BUCKET)

_OPEN: Final = frozenset({Kind.HEALTH, Kind.READINESS, Kind.CLUSTER_READINESS, Kind.CONSOLE})
# Handlers that reveal nothing outside the requested prefix.
_BY_PREFIX: Final = frozenset({Kind.LISTING, Kind.FEED})
# A worker authenticates with the token of its wake.
_LEASED: Final = frozenset({b"ack", b"release", b"callback"})
_READS: Final = ("GET", "HEAD")
# These requests name what they need in their bodies.
IN_BODY: Final = frozenset({Kind.CONTROL, Kind.URL_TOKENS})


def is_open(request: Request, kind: Kind, *, open_metrics: bool) -> bool:
    """Whether a request needs no token: health, the console's files, preflights, public keys, and requests that have
    tokens of their own."""
    if kind in _OPEN or request.method == "OPTIONS" or (kind is Kind.METRICS and open_metrics):
        return True
    if kind is not Kind.CONTROL:
        return False
    section, _, action = _control_path(request)
    return section == b"jwks.json" or (section == b"subscriptions" and action in _LEASED)


def check(principal: Principal, request: Request, route: Route, subscriptions: Mapping[str, Subscription]) -> None:
    """Refuse what a principal's scopes do not cover. The message does not depend on what exists."""
    kind, key, bucket = route.kind, route.key, route.bucket
    if kind is Kind.CONTROL:
        _check_control(principal, request, subscriptions)
    elif kind is Kind.URL_TOKENS:
        key = requested_key(request)
        _demand(principal, Need("read", key.bucket, key.stream))
    elif kind is not Kind.RESERVED:  # reserved paths name no resource
        action = "read" if request.method in _READS else "write"
        if key is not None:
            need = Need(action, key.bucket, key.stream)
        elif not bucket:
            need = SERVER_ADMIN
        elif kind is Kind.BUCKET:
            need = Need("read" if action == "read" else "admin", bucket)
        elif kind in _BY_PREFIX:
            need = Need("read", bucket, parse_query(request.query).get("prefix", ""))
        else:
            need = Need("read", bucket)
        _demand(principal, need)
        if key is not None and request.method == "PUT" and b"stream-forked-from" in request.headers:
            source = source_key(request.headers[b"stream-forked-from"].decode("latin-1"))
            _demand(principal, Need("read", source.bucket, source.stream))


def _demand(principal: Principal, *needs: Need) -> None:
    if not all(principal.may(need) for need in needs):
        raise Forbidden("the token does not allow this", hint="ask for a token with the scopes that this needs")


# -- subscriptions -------------------------------------------------------------------------------------------


def _control_path(request: Request) -> tuple[bytes, bytes, bytes]:
    """Section, subscription id and action of a control path."""
    rest = request.path.removeprefix(CONTROL_ROOT.encode()).lstrip(b"/")
    section, _, tail = rest.partition(b"/")
    raw_id, _, action = tail.partition(b"/")
    return section, raw_id, action


def _check_control(principal: Principal, request: Request, subscriptions: Mapping[str, Subscription]) -> None:
    """A subscription may be created and managed by principals that may read all its streams and write its wake stream.

    For other principals it does not exist: they get the same answer.
    """
    section, raw_id, action = _control_path(request)
    if section != b"subscriptions":
        return  # no such resource
    subscription_id = decode_segment(raw_id)
    if request.method == "PUT" and not action:
        _demand(principal, *subscription_needs(parse_config(json_body(request))))
        return
    subscription = subscriptions.get(subscription_id)
    if subscription is None:
        # Deleting a missing subscription succeeds. For principals without full access that would reveal whether it
        # exists.
        is_theirs = request.method == "DELETE" and not principal.may(Need("read", EVERY_BUCKET))
    else:
        needs = [*subscription_needs(subscription.config), *map(_read_need, subscription.links.explicit)]
        is_theirs = not all(principal.may(need) for need in needs)
    if is_theirs:
        raise NotFound(f"subscription {subscription_id!r} does not exist", code="SUBSCRIPTION_NOT_FOUND")
    if subscription is not None and action == b"streams" and request.method == "POST":
        _demand(principal, *map(_read_need, checked_paths(object_body(request).get("streams"))))


def subscription_needs(config: SubscriptionConfig) -> list[Need]:
    needs = [_read_need(path) for path in config.streams]
    if config.pattern is not None:
        needs += _pattern_needs(config.pattern)
    if config.wake_stream is not None:
        key = parse_v1_path(config.wake_stream)
        needs.append(Need("write", key.bucket, key.stream))
    return needs


def _read_need(path: str) -> Need:
    key = parse_v1_path(path)
    return Need("read", key.bucket, key.stream)


def _pattern_needs(pattern: str) -> list[Need]:
    """The needs for everything that a pattern can match, or for more where that is hard to determine."""
    segments = pattern.strip("/").split("/")
    literal = list(takewhile(lambda segment: segment not in ("*", "**"), segments))
    if len(literal) == len(segments):
        return [_read_need(pattern.strip("/"))]
    if not literal:
        return [Need("read", EVERY_BUCKET)]
    is_any = segments[len(literal)] == "**"  # `**` also matches nothing
    bucket, *rest = literal
    prefix = "/".join(rest) + ("/" if rest and not is_any else "")
    needs = [Need("read", bucket, prefix)]
    if is_any and not rest:
        needs.append(_read_need(bucket))  # a stream of the default bucket with the same name
    return needs
