"""Progress on long work: a bar on a terminal, silence elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TextIO

WIDTH = 30
REDRAW_SECONDS = 0.1


class Progress:
    """`with Progress("reading", total) as progress: progress.advance()`"""

    def __init__(self, label: str, total: int, stream: TextIO | None = None) -> None:
        self._label = label
        self._total = max(total, 1)
        self._stream = stream or sys.stderr
        self._done = 0
        self._drawn_at = 0.0
        self._is_shown = self._stream.isatty()

    def advance(self, count: int = 1) -> None:
        self._done += count
        now = time.monotonic()
        if self._is_shown and (now - self._drawn_at > REDRAW_SECONDS or self._done >= self._total):
            self._drawn_at = now
            share = min(self._done / self._total, 1.0)
            bar = "█" * int(share * WIDTH) + "░" * (WIDTH - int(share * WIDTH))
            self._stream.write(f"\r{self._label} {bar} {self._done}/{self._total} ({share:.0%})")
            self._stream.flush()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_shown:
            self._stream.write("\r\033[K")
            self._stream.flush()
