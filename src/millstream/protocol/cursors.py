"""Cursors: interval numbers that keep caches from serving one live answer for ever (§8.1)."""

from __future__ import annotations

from typing import Final

INTERVAL_SECONDS: Final = 20
EPOCH_MS: Final = 1_728_432_000_000  # 2024-10-09T00:00:00Z
JITTER_SECONDS: Final = (1.0, 3600.0)


def next_cursor(now_ms: int, echoed: str | None, jitter_seconds: float) -> str:
    """The cursor for a live response; strictly greater than the one the client echoed."""
    current = (now_ms - EPOCH_MS) // (INTERVAL_SECONDS * 1000)
    if echoed is not None and echoed.isascii() and echoed.isdigit() and len(echoed) <= 16 and int(echoed) >= current:
        return str(int(echoed) + max(1, int(jitter_seconds) // INTERVAL_SECONDS))
    return str(current)
