"""Cursors: what a live answer says of itself and the next request echoes (§8.1).

Decimal digits, as the protocol wants them: the number of the present interval, which keeps caches from serving one
live answer for ever, then the stream's incarnation in 18 digits and the offset that was reached in 16. So a cursor
alone says where to go on, and that of a stream which was deleted and made anew is noticed. The interval comes first, so
a later cursor is the greater number. An interval number alone is a cursor too, one that says nothing of a stream.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from millstream.units import Incarnation, Milliseconds, Offset

INTERVAL_SECONDS: Final = 20
EPOCH_MS: Final = 1_728_432_000_000  # 2024-10-09T00:00:00Z
JITTER_SECONDS: Final = (1.0, 3600.0)

_WHOLE: Final = re.compile(r"([0-9]{7,16})([0-9]{18})([0-9]{16})", re.ASCII)
_INTERVAL: Final = re.compile(r"[0-9]{1,16}", re.ASCII)


class Cursor(NamedTuple):
    interval: int
    incarnation: Incarnation | None = None
    offset: Offset | None = None

    def __str__(self) -> str:
        if self.incarnation is None or self.offset is None:
            return str(self.interval)
        return f"{self.interval:07d}{self.incarnation:018d}{self.offset:016d}"


def parse_cursor(text: str) -> Cursor | None:
    """The cursor that a client echoed; None for what is none."""
    whole = _WHOLE.fullmatch(text)
    if whole is not None:
        return Cursor(int(whole[1]), Incarnation(int(whole[2])), Offset(int(whole[3])))
    return Cursor(int(text)) if _INTERVAL.fullmatch(text) is not None else None


def next_interval(now_ms: Milliseconds, echoed: Cursor | None, jitter_seconds: float) -> int:
    """The interval of a live answer: the present one, or one beyond that of the cursor which the client echoed."""
    current = max(0, (now_ms - EPOCH_MS) // (INTERVAL_SECONDS * 1000))
    if echoed is not None and echoed.interval >= current:
        return echoed.interval + max(1, int(jitter_seconds) // INTERVAL_SECONDS)
    return current
