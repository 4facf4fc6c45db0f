"""Offsets: where a message boundary lies in a stream (§6).

An offset counts the payload bytes before it. On the wire it is `%016d_%016d`: the first part is zero, the
second the byte position, so that tokens sort as text. The position alone is accepted too, in up to 16 or in 20 digits.
"""

from __future__ import annotations

import re
from typing import Final

from millstream.errors import InvalidRequest
from millstream.units import Offset

START: Final = Offset(0)

# A position beyond 16 digits cannot be written as a token, so no stream may grow that far.
OFFSET_MAX: Final = 10**16 - 1

BEGINNING_TOKEN: Final = "-1"
NOW_TOKEN: Final = "now"

_TOKEN = re.compile(r"0{1,16}_([0-9]{1,16})")
_ALIAS = re.compile(r"[0-9]{1,16}|[0-9]{20}")


def format_offset(offset: int) -> str:
    return f"0000000000000000_{offset:016d}"


def parse_offset(token: str) -> Offset:
    """The offset a client sent; the sentinels `-1` and `now` are not offsets and are refused here."""
    match = _TOKEN.fullmatch(token)
    if match is not None:
        return Offset(int(match[1]))
    if _ALIAS.fullmatch(token) is not None and int(token) <= OFFSET_MAX:
        return Offset(int(token))
    raise InvalidRequest(
        f"offset {token[:64]!r} is not a valid offset",
        code="invalid_offset",
        hint="use a Stream-Next-Offset value returned by the server, -1 or now",
    )
