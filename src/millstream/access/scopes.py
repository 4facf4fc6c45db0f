"""Scopes: what a principal may do, by bucket and stream prefix. Pure.

Three actions: `read`; `write`, which is everything that changes streams; `admin`, which is buckets themselves, and
with bucket `*` the server. Admin includes the other two. As text a scope is `{action}:{bucket}[/{prefix}]`.
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
    """What a request asks for: an action on one stream, or on all whose names start as `stream` does."""

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
        # What needs a prefix needs all of it: one that is as long as the grant's, or longer.
        return need.stream.startswith(self.prefix)


class Principal(NamedTuple):
    """Somebody who has shown a good token. `key` tells principals apart, `name` is for logs."""

    key: str
    name: str
    scopes: tuple[Scope, ...]
    expires_at_ms: int | None = None

    def may(self, need: Need) -> bool:
        return any(scope.covers(need) for scope in self.scopes)

    @property
    def is_by_url(self) -> bool:
        """Whether this is somebody who has shown a token in a URL."""
        return self.key.startswith(BY_URL)

    def is_expired(self, now_ms: int) -> bool:
        return self.expires_at_ms is not None and now_ms >= self.expires_at_ms


def principal_by_url(grant: UrlGrant) -> Principal:
    """Who shows a token in a URL: all of one maker count as one. Its scope says what its maker must be allowed."""
    scope = Scope("read", grant.bucket, grant.stream)
    return Principal(f"{BY_URL}{grant.maker}", f"a URL of {grant.maker}", (scope,), grant.expires_at_ms)


def parse_scope(text: str) -> Scope | None:
    """A scope from its text; None for what is no scope of ours."""
    match = _SCOPE.fullmatch(text)
    return Scope(match[1], match[2], match[3] or "") if match is not None else None


def parse_scopes(texts: Iterable[str]) -> tuple[Scope, ...]:
    """The scopes among texts. Others are skipped: an issuer's tokens may serve other systems too."""
    return tuple(scope for scope in map(parse_scope, texts) if scope is not None)
