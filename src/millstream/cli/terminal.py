"""Terminal output: colours on a terminal, plain text everywhere else."""

from __future__ import annotations

import os
from typing import Final, TextIO

_CODES: Final = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33"}


class Style:
    """`style.green("ok")`: coloured if the stream is a terminal that has colours and NO_COLOR is not set."""

    def __init__(self, stream: TextIO) -> None:
        self.has_colours = (
            stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"
        )

    def bold(self, text: str) -> str:
        return self._in("bold", text)

    def dim(self, text: str) -> str:
        return self._in("dim", text)

    def red(self, text: str) -> str:
        return self._in("red", text)

    def green(self, text: str) -> str:
        return self._in("green", text)

    def yellow(self, text: str) -> str:
        return self._in("yellow", text)

    def _in(self, name: str, text: str) -> str:
        return f"\033[{_CODES[name]}m{text}\033[0m" if self.has_colours else text
