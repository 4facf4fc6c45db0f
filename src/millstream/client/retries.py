"""When a call that failed is tried again, and how long to wait before that.

Repeated are calls that no server answered, and those answered 408, 429, 500, 502, 503 or 504. An append that is neither
a producer's nor empty must not be sent twice: if it may have reached the server and no answer came, that is
`OutcomeUnknown`, and what to do is the caller's to say; a 500 is not repeated either.
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
    heeded up to its own limit. `retries=0` repeats nothing.

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
    """How often something has been tried in a row without success."""

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
        """How long to wait before the next attempt; raises the error if there is to be none."""
        policy = self._policy
        self._note(error)
        if not self._is_transient(error):
            raise error
        self._failures += 1
        if self._failures > policy.retries:
            raise error
        if isinstance(error, ConnectionFailed) and error.was_reused and self._failures == 1:
            return 0.0  # the server had merely let an idle connection go
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
        """What Retry-After asks for: a number of seconds, or a date (RFC 9110 §10.2.3)."""
        value = error.headers.get("retry-after", "")
        if value.isascii() and value.isdigit():
            return float(value)
        if not value.endswith("GMT"):
            return None
        from email.utils import parsedate_to_datetime  # few servers send one, and it takes long to import

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
    """429 and 503 say that nothing was written; a proxy that got no answer knows no more than we do."""
    if isinstance(error, ConnectionFailed):
        return error.was_sent
    return isinstance(error, OutcomeUnknown) or error.status in (408, 502, 504)
