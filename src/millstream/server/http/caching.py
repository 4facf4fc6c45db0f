"""Cache-Control: an answer that needed a token may be cached by the token's holder only.

Handlers set cache fields as if the answer were public. Every answer passes through here on its way out, from whichever
handler, node or adapter, so no handler can forget that reading needed a token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from millstream.caches import cached
from millstream.server.http.messages import Fields

_NAME: Final = b"cache-control: "
_VARY: Final = b"vary: authorization\r\n"
_ABOUT_SHARING: Final = frozenset({b"", b"public", b"private"})


def never(fields: Fields) -> Fields:
    """The fields of an answer that nobody may cache, because its URL is valid for a limited time only."""
    return _with_line(fields, lambda line: b"cache-control: private, no-store\r\n" + _VARY)


def private(fields: Fields) -> Fields:
    """The fields of an answer for one principal: `private`, and varying with the Authorization header."""
    if b"\r\n" + _VARY in fields:
        return fields  # another node has done it already
    return _with_line(fields, _private_line)


def _with_line(fields: Fields, replaced: Callable[[bytes], Fields]) -> Fields:
    """The fields with the cache-control line replaced."""
    # Searched for at the start of a line, because values of other fields, such as content types, are chosen by clients.
    start = 0 if fields.startswith(_NAME) else fields.find(b"\r\n" + _NAME) + 2
    if start == 1:
        return fields + replaced(_NAME)
    end = fields.index(b"\r\n", start) + 2
    return fields[:start] + replaced(fields[start:end]) + fields[end:]


@cached("cache_control_lines", 64)
def _private_line(line: bytes) -> Fields:
    directives = [directive.strip() for directive in line.removeprefix(_NAME).split(b",")]
    kept = [directive for directive in directives if directive not in _ABOUT_SHARING]
    return _NAME + b", ".join([b"private", *kept]) + b"\r\n" + _VARY
