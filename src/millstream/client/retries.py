"""When a failed call is retried, and after which pause.

Calls are retried that no server answered, or that were answered 408, 429, 500, 502, 503 or 504. An append without a
producer must not be sent twice, unless it is empty: if it may have reached the server and no answer came, the result is
`OutcomeUnknown`, and the caller decides what to do; a 500 is not retried either.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from millstream.client.errors import (
    BadRequest,
    ClientError,
    ConnectionFailed,
    OutcomeUnknown,
    ServerError,
    Unavailable,
)
from millstream.clock import Clock

JITTER: Final = (0.5, 1.0)


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Pauses grow from the first to the longest, each shortened at random by up to a half; a server's Retry-After is
    followed up to a limit. `retries=0` retries nothing.

    With `seconds_max` no attempt begins later than that after the first.
    """

    retries: int = 8
    first_pause_seconds: float = 0.1
    pause_seconds_max: float = 5.0
    retry_after_seconds_max: float = 60.0
    seconds_max: float | None = None
    multiplier: float = 2.0

    def __post_init__(self) -> None:
        if self.retries < 0:
            raise BadRequest(f"retries={self.retries} must be 0 or more")
        if self.first_pause_seconds <= 0:
            raise BadRequest(f"first_pause_seconds={self.first_pause_seconds} must be more than 0")
        if self.pause_seconds_max < self.first_pause_seconds:
            raise BadRequest(f"pause_seconds_max={self.pause_seconds_max} is less than first_pause_seconds")
        if self.multiplier < 1:
            raise BadRequest(f"multiplier={self.multiplier} must be 1 or more")


class Attempts:
    """The number of consecutive failed attempts."""

    def __init__(self, policy: RetryPolicy, clock: Clock, *, can_repeat: bool = True) -> None:
        self._policy = policy
        self._clock = clock
        self._can_repeat = can_repeat
        self._failures = 0
        self._begun = clock.monotonic() if policy.seconds_max is not None else 0.0
        # Whether an earlier attempt may have been carried out although its answer was lost.
        self.may_be_done = False

    def succeeded(self) -> None:
        self._failures = 0
        if self._policy.seconds_max is not None:
            self._begun = self._clock.monotonic()

    def pause_after(self, error: ClientError) -> float:
        """How long to wait before the next attempt; raises the error if there is none."""
        policy = self._policy
        self._note(error)
        if not self._is_transient(error):
            raise error
        self._failures += 1
        if self._failures > policy.retries:
            raise error
        if isinstance(error, ConnectionFailed) and error.was_reused and self._failures == 1:
            return 0.0  # the server had only closed an idle connection
        grown = policy.first_pause_seconds * policy.multiplier ** min(self._failures - 1, 30)
        pause = min(grown, policy.pause_seconds_max) * self._clock.uniform(*JITTER)
        asked = self._asked_pause(error)
        pause = pause if asked is None else max(pause, min(asked, policy.retry_after_seconds_max))
        if policy.seconds_max is not None and self._clock.monotonic() + pause > self._begun + policy.seconds_max:
            raise error
        return pause

    def _is_transient(self, error: ClientError) -> bool:
        if isinstance(error, ServerError):
            return error.status == 500 and self._can_repeat
        return isinstance(error, ConnectionFailed | OutcomeUnknown | Unavailable)

    def _asked_pause(self, error: ClientError) -> float | None:
        """The pause in Retry-After: a number of seconds, or a date (RFC 9110 §10.2.3)."""
        value = error.headers.get("retry-after", "")
        if value.isascii() and value.isdigit():
            return float(value)
        if not value.endswith("GMT"):
            return None
        from email.utils import parsedate_to_datetime  # rarely needed, and slow to import

        try:
            return max(0.0, parsedate_to_datetime(value).timestamp() - self._clock.now_ms() / 1000)
        except ValueError:
            return None

    def _note(self, error: ClientError) -> None:
        if error.status == 500:
            self.may_be_done = True
        if not _may_be_done(error):
            return
        if not self._can_repeat:
            if isinstance(error, OutcomeUnknown):
                raise error
            raise OutcomeUnknown(
                f"the append may or may not have been written: {error.message}",
                hint="look at the stream before repeating it, or append with a producer, which repeats safely",
                status=error.status,
                headers=error.headers,
            ) from error
        self.may_be_done = True


def _may_be_done(error: ClientError) -> bool:
    """429 and 503 mean that nothing was written; a proxy that got no answer cannot know."""
    if isinstance(error, ConnectionFailed):
        return error.was_sent
    return isinstance(error, OutcomeUnknown) or error.status in (408, 502, 504)
