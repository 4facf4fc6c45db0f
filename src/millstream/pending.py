"""What was asked for and is not there yet: a value or an error, settled once.

Whatever a shard is asked, it answers with a `Pending`. It has one owner at a time, who passes it on: `then` says what
becomes of the value and gives the same object back, `when_settled` says who takes it in the end, and `await` does both
for code that can wait. An error passes every `then` by and reaches whoever takes the outcome.

An append makes one of these, so it is small, and settling one calls its consumer at once: no task, no turn of the loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Final, Generic, TypeVar, overload

from millstream.errors import MillstreamError, Unavailable
from millstream.tasks import end

logger = logging.getLogger("millstream.pending")

T = TypeVar("T")
U = TypeVar("U")

_NOT_YET: Final[Any] = object()


class Pending(Generic[T]):
    """`outcome` is what it will be settled with, for those who know it beforehand; `settle()` makes it so."""

    __slots__ = ("_consumer", "_on_abandon", "_outcome", "_steps", "is_settled")

    def __init__(self, outcome: T | MillstreamError = _NOT_YET, on_abandon: Callable[[], object] | None = None) -> None:
        self._outcome = outcome
        self._on_abandon = on_abandon
        self._steps: tuple[Callable[[Any], Any], ...] = ()
        self._consumer: Callable[[Any], None] | None = None
        self.is_settled = False

    @classmethod
    def settled(cls, outcome: T | MillstreamError) -> Pending[T]:
        """One that was settled from the beginning."""
        pending = cls(outcome)
        pending.is_settled = True
        return pending

    def settle(self, outcome: T | MillstreamError = _NOT_YET) -> None:
        """Settle with an outcome, or with the one that was known beforehand; the first time counts."""
        if self.is_settled:
            return
        value: Any = self._outcome if outcome is _NOT_YET else outcome
        while self._steps:
            step, self._steps = self._steps[0], self._steps[1:]
            value = _outcome_of(step, value)
            if type(value) is Pending:
                self._on_abandon = value.abandon
                value.when_settled(self.settle)
                return
        self._finish(value)

    def _finish(self, outcome: T | MillstreamError) -> None:
        self.is_settled = True
        self._outcome = outcome
        self._on_abandon = None
        consumer = self._consumer
        if consumer is not None:
            self._consumer = None
            consumer(outcome)

    @overload
    def then(self, step: Callable[[T], Pending[U]]) -> Pending[U]: ...

    @overload
    def then(self, step: Callable[[T], U | Pending[U]]) -> Pending[U]: ...

    def then(self, step: Callable[[T], Any]) -> Pending[Any]:
        """Go on with what `step` makes of the value; if that is pending as well, with what becomes of that."""
        return self._add(step)

    def then_either(self, step: Callable[[T | MillstreamError], U | Pending[U] | MillstreamError]) -> Pending[U]:
        """The same for a step that is also told of an error, which it may pass on."""
        return self._add(_Either(step))

    def _add(self, step: Callable[[Any], Any]) -> Pending[Any]:
        if not self.is_settled:
            self._steps += (step,)
            return self
        made = _outcome_of(step, self._outcome)
        return made if type(made) is Pending else Pending.settled(made)

    def when_settled(self, consumer: Callable[[T | MillstreamError], None]) -> None:
        """Give the outcome to a consumer, once: now, or when it is there. There is one consumer."""
        if self.is_settled:
            consumer(self._outcome)
        else:
            assert self._consumer is None, "an outcome goes to one consumer"
            self._consumer = consumer

    def interrupt(self, error: MillstreamError) -> None:
        """Settle with an error, and give up what would have settled it."""
        if not self.is_settled:
            give_up = self._on_abandon
            self._steps = ()
            self._finish(error)
            if give_up is not None:
                give_up()

    def abandon(self) -> None:
        """Nobody waits for the outcome any more. What only waits is given up; what is on its way to the log goes on,
        and so does what was to follow from it."""
        if not self.is_settled:
            # What is given up may refer to this: without the cut both would stay until the next full collection.
            give_up, self._on_abandon, self._consumer = self._on_abandon, None, None
            if give_up is not None:
                give_up()

    @property
    def is_abandonable(self) -> bool:
        """Whether it only waits, so that it can be given up."""
        return self._on_abandon is not None

    def result(self) -> T:
        """The value of one that is settled; raises its error."""
        assert self.is_settled
        outcome = self._outcome
        if isinstance(outcome, MillstreamError):
            raise outcome
        return outcome

    @property
    def error(self) -> MillstreamError | None:
        """The error of one that is settled, if that is its outcome."""
        return self._outcome if isinstance(self._outcome, MillstreamError) else None

    def __await__(self) -> Generator[Any, None, T]:
        if not self.is_settled:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

            def wake(_: object) -> None:
                if not future.done():
                    future.set_result(None)

            self.when_settled(wake)
            try:
                yield from future
            except asyncio.CancelledError:
                self.abandon()
                raise
        return self.result()


class _Either:
    """A step that takes errors as well."""

    __slots__ = ("step",)

    def __init__(self, step: Callable[[Any], Any]) -> None:
        self.step = step

    def __call__(self, outcome: object) -> Any:
        return self.step(outcome)


def _outcome_of(step: Callable[[Any], Any], value: object) -> Any:
    if isinstance(value, MillstreamError) and type(step) is not _Either:
        return value
    try:
        return step(value)
    except MillstreamError as error:
        return error
    except Exception as error:
        return defect(error)


def defect(error: Exception) -> MillstreamError:
    """What somebody is told who waited for something that failed in a way nobody foresaw."""
    logger.error("a step of a request failed", exc_info=error)
    return MillstreamError("the server failed; its log says why", code="internal_error")


class BackgroundTasks:
    """Coroutines that run beside requests, each with a `Pending` for its outcome."""

    def __init__(self) -> None:
        # The loop keeps only weak references to tasks.
        self._running: set[asyncio.Task[None]] = set()

    def run(self, work: Coroutine[Any, Any, T], *, cancels: bool = False) -> Pending[T]:
        """Begin some work; with `cancels` it ends when its outcome is abandoned, and goes on otherwise."""
        pending: Pending[T] = Pending()
        task = asyncio.get_running_loop().create_task(_settle_with(work, pending))
        if cancels:
            pending._on_abandon = task.cancel
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        task.add_done_callback(lambda _: work.close())  # one that was cancelled early never began it
        return pending

    async def end(self) -> None:
        """Cancel what still runs, and wait until it is over."""
        await end(*self._running)


async def _settle_with(work: Coroutine[Any, Any, T], pending: Pending[T]) -> None:
    outcome: T | MillstreamError
    try:
        outcome = await work
    except MillstreamError as error:
        outcome = error
    except OSError as error:
        outcome = Unavailable(f"a file could not be read or written: {error.strerror}", code="disk_error")
    except Exception as error:
        outcome = defect(error)
    pending.settle(outcome)
