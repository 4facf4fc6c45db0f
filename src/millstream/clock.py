"""Time and randomness behind one interface, so that tests control them. Nothing else reads them."""

from __future__ import annotations

import logging
import secrets
import time
from random import SystemRandom
from typing import Any, Final, Protocol

from millstream.units import Milliseconds

logger = logging.getLogger("millstream.clock")


class Clock(Protocol):
    def now_ms(self) -> Milliseconds:
        """Wall-clock milliseconds since the Unix epoch."""
        ...

    def monotonic(self) -> float:
        """Seconds on a clock that never goes back and keeps running while the process is suspended: for leases and
        timeouts.

        Only differences have a meaning.
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

    def now_ms(self) -> Milliseconds:
        # Not by a call of the type: this is asked for every request.
        nanoseconds: Any = time.time_ns()
        now_ms: Milliseconds = nanoseconds // 1_000_000
        return now_ms

    def monotonic(self) -> float:
        return time.monotonic()

    def uniform(self, low: float, high: float) -> float:
        return self._random.uniform(low, high)

    def random_bytes(self, count: int) -> bytes:
        return secrets.token_bytes(count)


# A difference between two readings of both clocks that is too large to be drift.
JUMP_MS: Final = 2_000
# How long a wall clock that jumped ahead must run steadily before anything expires by it.
HOLD_SECONDS: Final = 600.0


class ExpiryClock:
    """A wall clock that does not jump ahead, for deleting by age.

    Both clocks are read together, at least once a second. Normally this clock equals the wall clock. If the wall clock
    moves ahead of the monotonic clock by more than `JUMP_MS` at once, the jump is ignored: this clock continues at its
    former pace until the wall clock is back, or has run without another jump for `HOLD_SECONDS`. So a clock that is
    wrong for a time makes nothing expire. A clock that is corrected forwards, or a machine that slept, delays expiry by
    the hold. A wall clock that moves back is followed: data then lives longer.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        # Both clocks at the last reading, and when the wall clock was last followed.
        self._seen = self._believed = (clock.now_ms(), clock.monotonic())
        self._held_until: float | None = None
        self.jumps = 0

    @property
    def is_held(self) -> bool:
        return self._held_until is not None

    def now_ms(self) -> Milliseconds:
        """The time by which things expire; never later than the wall clock."""
        wall_ms, at = self._clock.now_ms(), self._clock.monotonic()
        moved_ms = wall_ms - _after(self._seen, at)
        believed_ms = _after(self._believed, at)
        self._seen = wall_ms, at
        if abs(moved_ms) > JUMP_MS:
            self._jumped(moved_ms, at, is_ahead=wall_ms - believed_ms > JUMP_MS)
        if self._held_until is not None:
            if wall_ms - believed_ms > JUMP_MS and at < self._held_until:
                return believed_ms
            self._held_until = None
            logger.warning("the wall clock is believed again: streams expire by it")
        self._believed = wall_ms, at
        return wall_ms

    def _jumped(self, moved_ms: Milliseconds, at: float, *, is_ahead: bool) -> None:
        self.jumps += 1
        if is_ahead:
            self._held_until = at + HOLD_SECONDS
        logger.warning(
            "the wall clock jumped by %+.1f s%s",
            moved_ms / 1000,
            f"; nothing expires by it for {HOLD_SECONDS:.0f} s" if is_ahead else "",
        )


def _after(seen: tuple[Milliseconds, float], at: float) -> Milliseconds:
    """Where the wall clock should be by now."""
    return seen[0] + int((at - seen[1]) * 1000)


# For measuring durations only. No decision depends on it, so it needs no interface.
monotonic_seconds = time.perf_counter
