"""Scopes: what a principal may do, by bucket and stream prefix. Pure functions and values.

There are three actions: `read`; `write` for everything that changes streams; `admin` for buckets themselves and, with
bucket `*`, for the server. Admin includes the other two. As text, a scope is `{action}:{bucket}[/{prefix}]`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final, NamedTuple

from millstream.access.url_tokens import UrlGrant

ACTIONS: Final = ("read", "write", "admin")
EVERY_BUCKET: Final = "*"
BY_URL: Final = "url:"

_SCOPE: Final = re.compile(r"(read|write|admin):([^/\s]+)(?:/(\S*))?")


class Need(NamedTuple):
    """What a request needs: an action on one stream, or on all streams whose names start with `stream`."""

    action: str
    bucket: str
    stream: str = ""


class Scope(NamedTuple):
    """One grant: an action on the streams of a bucket whose names start with a prefix."""

    action: str
    bucket: str
    prefix: str = ""

    def __str__(self) -> str:
        return f"{self.action}:{self.bucket}" + (f"/{self.prefix}" if self.prefix else "")

    def covers(self, need: Need) -> bool:
        if self.action not in (need.action, "admin"):
            return False
        if self.bucket not in (need.bucket, EVERY_BUCKET):
            return False
        # A need for a prefix covers all streams below it, so it must be at least as long as the granted prefix.
        return need.stream.startswith(self.prefix)


class Principal(NamedTuple):
    """The holder of a valid token. `key` identifies a principal, `name` is for logs."""

    key: str
    name: str
    scopes: tuple[Scope, ...]
    expires_at_ms: int | None = None

    def may(self, need: Need) -> bool:
        return any(scope.covers(need) for scope in self.scopes)

    @property
    def is_by_url(self) -> bool:
        """Whether the token was in the URL."""
        return self.key.startswith(BY_URL)

    def is_expired(self, now_ms: int) -> bool:
        return self.expires_at_ms is not None and now_ms >= self.expires_at_ms


def principal_by_url(grant: UrlGrant) -> Principal:
    """The principal of a URL token. All URL tokens of one maker share a principal key; its scope is what the maker must
    have."""
    scope = Scope("read", grant.bucket, grant.stream)
    return Principal(f"{BY_URL}{grant.maker}", f"a URL of {grant.maker}", (scope,), grant.expires_at_ms)


def parse_scope(text: str) -> Scope | None:
    """A scope from its text; None if the text is not a scope."""
    match = _SCOPE.fullmatch(text)
    return Scope(match[1], match[2], match[3] or "") if match is not None else None


def parse_scopes(texts: Iterable[str]) -> tuple[Scope, ...]:
    """The scopes among texts. Other texts are skipped: an issuer's tokens may serve other systems too."""
    return tuple(scope for scope in map(parse_scope, texts) if scope is not None)
