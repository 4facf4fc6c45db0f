"""Drives a log without an event loop: answers arrive in a queue, every wait has a deadline."""

from __future__ import annotations

import queue
from collections.abc import Callable

from millstream.errors import MillstreamError
from millstream.log.interface import Log, LogBatch
from millstream.units import Position

ANSWER_SECONDS = 20.0


class LogDriver:
    """Reads a log to its end, starts it, and appends batches of one position per byte string."""

    def __init__(self, log: Log, *, first_position: int = 1, may_block: bool = False) -> None:
        self.log = log
        self.may_block = may_block
        self.found = list(log.read())
        self.next = self.found[-1].next if self.found else first_position
        self._answers: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        log.start(Position(self.next), lambda callback, *args: self._answers.put(lambda: callback(*args)))

    def send(self, payload: bytes, span: int = 1) -> list[MillstreamError | None]:
        """Append without waiting; the list gets the answer once `wait` has delivered it."""
        batch = LogBatch(Position(self.next), Position(self.next + span), payload)
        self.next = batch.next
        outcome: list[MillstreamError | None] = []
        self.log.append(batch, outcome.append, may_block=self.may_block)
        if outcome:
            self._answers.put(lambda: None)  # answered at once; whoever waits for it need not
        return outcome

    def wait(self) -> None:
        """Deliver one answer."""
        self._answers.get(timeout=ANSWER_SECONDS)()

    def append(self, payload: bytes, span: int = 1) -> MillstreamError | None:
        outcome = self.send(payload, span)
        self.wait()
        (error,) = outcome
        if error is not None:
            self.next -= span
        return error
