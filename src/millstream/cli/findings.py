"""The finding of a check of `millstream doctor`, with a remedy if there is a problem."""

from __future__ import annotations

import time
from typing import Literal, NamedTuple

Level = Literal["ok", "warning", "problem"]


class Finding(NamedTuple):
    check: str
    level: Level
    message: str
    hint: str | None = None


def date(milliseconds: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(milliseconds / 1000))


def counted(count: int, word: str) -> str:
    return f"{count:,} {word}{'' if count == 1 else 's'}"
