"""How long a stream lives: a sliding window or a fixed deadline, never both (§5.1)."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Final, NamedTuple

from millstream.errors import InvalidRequest
from millstream.units import Milliseconds

TTL_SECONDS_MAX: Final = 10**12

_TTL = re.compile(r"0|[1-9][0-9]{0,12}")
_RFC3339 = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}[Tt ][0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,9})?([Zz]|[+-][0-9]{2}:[0-9]{2})"
)


class Expiry(NamedTuple):
    """`ttl_seconds` restarts with every read and write; `expires_at` is kept as the client wrote it."""

    ttl_seconds: int | None = None
    expires_at: str | None = None
    expires_at_ms: Milliseconds | None = None

    def deadline_ms(self, last_access_ms: Milliseconds) -> Milliseconds | None:
        if self.ttl_seconds is not None:
            return last_access_ms + self.ttl_seconds * 1000
        return self.expires_at_ms

    def matches(self, other: Expiry) -> bool:
        return self.ttl_seconds == other.ttl_seconds and self.expires_at_ms == other.expires_at_ms


NEVER: Final = Expiry()


def parse_expiry(ttl: str | None, expires_at: str | None) -> Expiry:
    if ttl is not None and expires_at is not None:
        raise InvalidRequest("Stream-TTL and Stream-Expires-At exclude each other", code="invalid_expiry")
    if ttl is not None:
        if _TTL.fullmatch(ttl) is None or int(ttl) > TTL_SECONDS_MAX:
            raise InvalidRequest(
                f"Stream-TTL {ttl[:40]!r} is not a number of seconds",
                code="invalid_ttl",
                hint="decimal digits, without sign, point or leading zero",
            )
        return Expiry(ttl_seconds=int(ttl))
    if expires_at is not None:
        return Expiry(expires_at=expires_at, expires_at_ms=_parse_rfc3339(expires_at))
    return NEVER


def _parse_rfc3339(value: str) -> Milliseconds:
    if _RFC3339.fullmatch(value) is not None:
        # fromisoformat takes at most six digits of a second's fraction
        trimmed = re.sub(r"(\.[0-9]{6})[0-9]+", r"\1", value.upper().replace(" ", "T"))
        try:
            return Milliseconds(datetime.fromisoformat(trimmed).timestamp() * 1000)
        except (ValueError, OverflowError):
            pass
    raise InvalidRequest(
        f"Stream-Expires-At {value[:60]!r} is not an RFC 3339 time",
        code="invalid_expires_at",
        hint="for example 2030-01-01T00:00:00Z",
    )
