"""Entity tags: `"{incarnation}:{start}:{end}"`, with `:c` once the stream is closed (§8.1).

The incarnation is unique to each creation of a stream, so a deleted and recreated one never validates an old
tag. A tag names both what was read and the state of the stream, so it serves `If-Match` as well.
"""

from __future__ import annotations

import re

from millstream.units import Incarnation

_STATE = re.compile(r'"([0-9a-f]+):[^":]*:([0-9_]+)(:c)?"')


def format_etag(incarnation: Incarnation, start: str, end: str, closed: bool) -> str:
    return f'"{incarnation:x}:{start}:{end}:c"' if closed else f'"{incarnation:x}:{start}:{end}"'


def none_match(header: str, etag: str) -> bool:
    """Whether an `If-None-Match` header covers this tag (weak comparison, RFC 9110 §13.1.2)."""
    if header.strip() == "*":
        return True
    return any(candidate.strip().removeprefix("W/") == etag for candidate in header.split(","))


def continues_another(header: str, incarnation: Incarnation, end: str) -> bool:
    """Whether an `If-None-Match` header holds a tag of another incarnation, of an answer that ended at this offset.

    Whoever goes on reading after an answer shows such a tag. A cache that asks whether what it has is still good shows
    the tag of an answer that began here, and is to get what there is now.
    """
    for candidate in header.split(","):
        match = _STATE.fullmatch(candidate.strip().removeprefix("W/"))
        if match is not None and match[2] == end and int(match[1], 16) != incarnation:
            return True
    return False


def state_matches(header: str, incarnation: Incarnation, tail: str, closed: bool) -> bool:
    """Whether an `If-Match` header holds a tag of the stream's present state (RFC 9110 §13.1.1)."""
    if header.strip() == "*":
        return True
    for candidate in header.split(","):
        match = _STATE.fullmatch(candidate.strip())
        if match is not None and (int(match[1], 16), match[2], match[3] is not None) == (
            incarnation,
            tail,
            closed,
        ):
            return True
    return False
