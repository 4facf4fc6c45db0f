"""Who may keep an answer: what needed a token, only its holder.

Handlers say how long an answer lasts as if everybody might have it. Every answer passes here on its way out, whichever
handler, node or adapter it comes from, so no handler can forget that reading needed a token.
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
    """The fields of an answer that nobody may keep, not even its reader: its URL is good for a while only."""
    return _with_line(fields, lambda line: b"cache-control: private, no-store\r\n" + _VARY)


def private(fields: Fields) -> Fields:
    """The fields of an answer for one principal alone: `private`, and another one's token asks for another answer."""
    if b"\r\n" + _VARY in fields:
        return fields  # another node has seen to it
    return _with_line(fields, _private_line)


def _with_line(fields: Fields, replaced: Callable[[bytes], Fields]) -> Fields:
    """The fields with another line about caches, in the place of the one there is."""
    # Looked for at the start of a line: the values of other fields, content types for one, are anybody's words.
    start = 0 if fields.startswith(_NAME) else fields.find(b"\r\n" + _NAME) + 2
    if start == 1:
        return fields + replaced(_NAME)
    end = fields.index(b"\r\n", start) + 2
    return fields[:start] + replaced(fields[start:end]) + fields[end:]


@cached("cache_control_lines", 64)
def _private_line(line: bytes) -> Fields:
    directives = [one.strip() for one in line.removeprefix(_NAME).split(b",")]
    kept = [one for one in directives if one not in _ABOUT_SHARING]
    return _NAME + b", ".join([b"private", *kept]) + b"\r\n" + _VARY
