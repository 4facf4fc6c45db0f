"""Progress of long work: a bar on a terminal, nothing elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Literal, TextIO

from millstream.sizes import human_bytes

WIDTH = 30
REDRAW_SECONDS = 0.1


class Progress:
    """`with Progress("reading", total) as progress: progress.advance()`. With a total of 0 only the count is shown."""

    def __init__(
        self,
        label: str,
        total: int,
        stream: TextIO | None = None,
        *,
        unit: Literal["", "bytes"] = "",
        is_shown: bool = True,
    ) -> None:
        self._label = label
        self._total = total
        self._stream = stream or sys.stderr
        self._unit = unit
        self._done = 0
        self._drawn_at = 0.0
        self._is_shown = is_shown and self._stream.isatty()

    def advance(self, count: int = 1) -> None:
        self._done += count
        now = time.monotonic()
        if self._is_shown and (now - self._drawn_at > REDRAW_SECONDS or self._done == self._total):
            self._drawn_at = now
            self._stream.write(f"\r{self._label} {self._picture()}\033[K")
            self._stream.flush()

    def _picture(self) -> str:
        if self._total <= 0:
            return self._amount(self._done)
        share = min(self._done / self._total, 1.0)
        bar = "█" * int(share * WIDTH) + "░" * (WIDTH - int(share * WIDTH))
        return f"{bar} {self._amount(self._done)}/{self._amount(self._total)} ({share:.0%})"

    def _amount(self, count: int) -> str:
        return human_bytes(count) if self._unit == "bytes" else str(count)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_shown:
            self._stream.write("\r\033[K")
            self._stream.flush()
