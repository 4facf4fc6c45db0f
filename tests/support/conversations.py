"""Drives conversations with answers from a script instead of a network."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from millstream.client.conversation import (
    Conversation,
    Emit,
    Evaluate,
    Open,
    Pause,
    Receive,
    Send,
    Settings,
    settings_of,
)
from millstream.client.errors import ClientError, ConnectionFailed
from millstream.client.messages import Request, Response
from millstream.units import Milliseconds

T = TypeVar("T")

Answer = Response | ClientError
URL = "http://first:4437"


class EvenClock:
    """Chance always takes the upper end, and time stands still."""

    def now_ms(self) -> Milliseconds:
        return Milliseconds(0)

    def monotonic(self) -> float:
        return 0.0

    def uniform(self, low: float, high: float) -> float:
        return high

    def random_bytes(self, count: int) -> bytes:
        return bytes(count)


def settings(url: str = URL, *, token: str | None = None, retries: int = 4, patience: int = 50) -> Settings:
    return settings_of(url, token, retries, patience, EvenClock())


class Script:
    """Answers in a row; remembers what was asked and how long was waited."""

    def __init__(self, *answers: Answer) -> None:
        self._answers = list(answers)
        self.asked: list[tuple[str, Request]] = []
        self.pauses: list[float] = []

    def run(self, conversation: Conversation[T]) -> T:
        result: Any = None
        try:
            while True:
                step = conversation.send(result)
                result = None
                if isinstance(step, Send):
                    self.asked.append((str(step.origin), step.request))
                    result = self._answers.pop(0)
                elif isinstance(step, Pause):
                    self.pauses.append(step.seconds)
                elif isinstance(step, Evaluate):
                    result = step.function()
                else:
                    raise AssertionError(step)
        except StopIteration as stop:
            value: T = stop.value
            return value

    @property
    def targets(self) -> list[str]:
        return [f"{origin}{request.target}" for origin, request in self.asked]


def emitted(
    conversation: Conversation[None],
    answer: Callable[[Request, bool], Answer],
    body: Callable[[], bytes | ClientError],
) -> Iterator[Any]:
    """What a live conversation hands out, with someone to answer requests and to deliver bodies."""
    result: Any = None
    try:
        while True:
            step = conversation.send(result)
            result = None
            if isinstance(step, Emit):
                yield step.item
            elif isinstance(step, Send | Open):
                result = answer(step.request, isinstance(step, Open))
            elif isinstance(step, Receive):
                result = body()
    except StopIteration:
        return


def lost(*, was_sent: bool = True) -> ConnectionFailed:
    return ConnectionFailed("lost", was_sent=was_sent)
