"""Time and chance, behind one interface, so that tests drive them and nothing else reads them."""

from __future__ import annotations

import logging
import secrets
import time
from random import SystemRandom
from typing import Final, Protocol

logger = logging.getLogger("millstream.clock")


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


# A difference between two looks at the clocks that is no drift any more.
JUMP_MS: Final = 2_000
# How long a wall clock that jumped ahead must go on steadily before anything expires by it.
HOLD_SECONDS: Final = 600.0


class ExpiryClock:
    """The wall clock as whoever deletes by age sees it: it does not jump ahead.

    Both clocks are looked at together, at least once a second. Normally this is the wall clock. One that moves ahead of
    the monotonic clock by more than `JUMP_MS` at once is not believed: time goes on here as it went before, until the
    wall clock is back or has gone on without another jump for `HOLD_SECONDS`. So a clock that is wrong for a time makes
    nothing expire, and one that was wrong before and was put right, or a machine that slept, delays it by the hold. A
    wall clock that moves back is believed: what is judged later lives longer.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        # Where both clocks were at the last look, and when the wall clock was last believed.
        self._seen = self._believed = (clock.now_ms(), clock.monotonic())
        self._held_until: float | None = None
        self.jumps = 0

    @property
    def is_held(self) -> bool:
        return self._held_until is not None

    def now_ms(self) -> int:
        """What time it is for whoever asks whether something is over; never later than the wall clock."""
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

    def _jumped(self, moved_ms: int, at: float, *, is_ahead: bool) -> None:
        self.jumps += 1
        if is_ahead:
            self._held_until = at + HOLD_SECONDS
        logger.warning(
            "the wall clock jumped by %+.1f s%s",
            moved_ms / 1000,
            f"; nothing expires by it for {HOLD_SECONDS:.0f} s" if is_ahead else "",
        )


def _after(seen: tuple[int, float], at: float) -> int:
    """Where the wall clock should be by now."""
    return seen[0] + int((at - seen[1]) * 1000)


# For measuring how long things take; nothing is decided by it, so it needs no interface.
monotonic_seconds = time.perf_counter
