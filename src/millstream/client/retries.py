"""When a call that failed is tried again, and how long to wait before that.

An append that is neither a producer's nor empty must not be sent twice: if it may have reached the server and no answer
came, that is `OutcomeUnknown`, and what to do is the caller's to say. Everything else is repeated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from millstream.client.errors import ClientError, ConnectionFailed, OutcomeUnknown, Unavailable
from millstream.clock import Clock

JITTER: Final = (0.5, 1.0)


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Pauses double from the first to the longest; a server's Retry-After is heeded up to its own limit.

    With `seconds_max` no attempt begins later than that after the first.
    """

    retries: int = 8
    first_pause_seconds: float = 0.1
    pause_seconds_max: float = 5.0
    retry_after_seconds_max: float = 60.0
    seconds_max: float | None = None


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
        if not isinstance(error, ConnectionFailed | OutcomeUnknown | Unavailable):
            raise error
        self._failures += 1
        if self._failures > policy.retries:
            raise error
        if isinstance(error, ConnectionFailed) and error.was_reused and self._failures == 1:
            return 0.0  # the server had merely let an idle connection go
        pause = min(policy.first_pause_seconds * 2.0 ** min(self._failures - 1, 30), policy.pause_seconds_max)
        pause *= self._clock.uniform(*JITTER)
        asked = error.retry_after_seconds if isinstance(error, Unavailable) else None
        pause = pause if asked is None else max(pause, min(asked, policy.retry_after_seconds_max))
        if policy.seconds_max is not None and self._clock.monotonic() + pause > self._begun + policy.seconds_max:
            raise error
        return pause

    def _note(self, error: ClientError) -> None:
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
