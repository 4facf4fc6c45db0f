"""Time and chance, behind one interface, so that tests drive them and nothing else reads them."""

from __future__ import annotations

import secrets
import time
from random import SystemRandom
from typing import Protocol


class Clock(Protocol):
    def now_ms(self) -> int:
        """Wall-clock milliseconds since the Unix epoch."""
        ...

    def monotonic(self) -> float:
        """Seconds on a clock that never goes back and goes on while the process is stopped: for leases and timeouts.

        Only differences mean anything.
        """
        ...

    def uniform(self, low: float, high: float) -> float:
        """A random number in [low, high]."""
        ...

    def random_bytes(self, count: int) -> bytes:
        """Unpredictable bytes for identifiers, keys and salts."""
        ...


class SystemClock:
    def __init__(self) -> None:
        self._random = SystemRandom()

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic(self) -> float:
        return time.monotonic()

    def uniform(self, low: float, high: float) -> float:
        return self._random.uniform(low, high)

    def random_bytes(self, count: int) -> bytes:
        return secrets.token_bytes(count)


# For measuring how long things take; nothing is decided by it, so it needs no interface.
monotonic_seconds = time.perf_counter
