"""Time that only tests move: a clock, and an event loop whose timers follow it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from random import Random
from typing import Any

from millstream.units import Milliseconds

START_MS = 1_800_000_000_000


class FakeClock:
    """Implements millstream.clock.Clock; chance is seeded, so that a failing run repeats."""

    def __init__(self, now_ms: int = START_MS, seed: int = 7) -> None:
        self.ms = now_ms
        self.wall_shift_ms = 0  # how far the wall clock was set ahead, or back
        self._random = Random(seed)

    def now_ms(self) -> Milliseconds:
        return Milliseconds(self.ms + self.wall_shift_ms)

    def monotonic(self) -> float:
        return self.ms / 1000

    def uniform(self, low: float, high: float) -> float:
        return self._random.uniform(low, high)

    def random_bytes(self, count: int) -> bytes:
        return self._random.randbytes(count)

    def advance(self, milliseconds: int) -> None:
        self.ms += milliseconds

    def set_wall(self, milliseconds: int) -> None:
        """Set the wall clock ahead, or back, as an operator or NTP does; nothing else notices."""
        self.wall_shift_ms += milliseconds


class FakeTimeLoop(asyncio.SelectorEventLoop):
    """Timers are due when the fake clock says so: any turn of the loop after `advance` runs them."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__()
        self._clock = clock

    def time(self) -> float:
        # Seconds since the test began: small numbers, so that no timer is a rounding error short of being due.
        return (self._clock.ms - START_MS) / 1000


def run(main: Coroutine[Any, Any, Any], clock: FakeClock | None = None) -> Any:
    """asyncio.run over fake time."""
    with asyncio.Runner(loop_factory=lambda: FakeTimeLoop(clock or FakeClock())) as runner:
        return runner.run(main)


async def turns(count: int = 20) -> None:
    """Let the loop go round a few times."""
    for _ in range(count):
        await asyncio.sleep(0)
