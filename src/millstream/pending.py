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

import msgspec

from millstream.errors import MillstreamError, Unavailable
from millstream.tasks import end

logger = logging.getLogger("millstream.pending")

T = TypeVar("T")
U = TypeVar("U")

_NOT_YET: Final[Any] = object()


class Pending(msgspec.Struct, Generic[T], eq=False):
    """`outcome` is what it will be settled with, for those who know it beforehand; `settle()` makes it so.

    A struct, because an append makes one, and making one is three times as fast as for a plain class with slots.
    """

    outcome: T | MillstreamError = _NOT_YET
    # What to do if nobody waits any more; None if it is not to be given up.
    on_abandon: Callable[[], object] | None = None
    is_settled: bool = False
    _consumer: Callable[[Any], None] | None = None
    # What is to be made of the value. Nearly always there is one step, or none.
    _step: Callable[[Any], Any] | None = None
    _later_steps: tuple[Callable[[Any], Any], ...] = ()

    @classmethod
    def settled(cls, outcome: T | MillstreamError) -> Pending[T]:
        """One that was settled from the beginning."""
        return cls(outcome, None, True)

    def settle(self, outcome: T | MillstreamError = _NOT_YET) -> None:
        """Settle with an outcome, or with the one that was known beforehand; the first time counts."""
        if self.is_settled:
            return
        value: Any = self.outcome if outcome is _NOT_YET else outcome
        step = self._step
        while step is not None:
            if not isinstance(value, MillstreamError) or type(step) is _Either:
                try:
                    value = step(value)
                except MillstreamError as error:
                    value = error.with_traceback(None)  # whose frames hold this, and this holds the error
                except Exception as error:
                    value = defect(error)
            if self._later_steps:
                self._step, self._later_steps = self._later_steps[0], self._later_steps[1:]
            else:
                self._step = None
            if type(value) is Pending:
                self.on_abandon = value.abandon
                value.when_settled(self.settle)
                return
            step = self._step
        self.is_settled = True
        self.outcome = value
        self.on_abandon = None
        consumer = self._consumer
        if consumer is not None:
            self._consumer = None
            consumer(value)

    @overload
    def then(self, step: Callable[[T], Pending[U]]) -> Pending[U]: ...

    @overload
    def then(self, step: Callable[[T], U | Pending[U]]) -> Pending[U]: ...

    def then(self, step: Callable[[T], Any]) -> Pending[Any]:
        """Go on with what `step` makes of the value; if that is pending as well, with what becomes of that."""
        if self._step is None and not self.is_settled:  # as for every append
            self._step = step
            return self
        return self._add(step)

    def then_either(self, step: Callable[[T | MillstreamError], U | Pending[U] | MillstreamError]) -> Pending[U]:
        """The same for a step that is also told of an error, which it may pass on."""
        return self._add(_Either(step))

    def _add(self, step: Callable[[Any], Any]) -> Pending[Any]:
        if self.is_settled:
            following: Pending[Any] = Pending(self.outcome, None, False, None, step)
            following.settle()
            return following
        if self._step is None:
            self._step = step
        else:
            self._later_steps += (step,)
        return self

    def when_settled(self, consumer: Callable[[T | MillstreamError], None]) -> None:
        """Give the outcome to a consumer, once: now, or when it is there. There is one consumer."""
        if self.is_settled:
            consumer(self.outcome)
        else:
            assert self._consumer is None, "an outcome goes to one consumer"
            self._consumer = consumer

    def interrupt(self, error: MillstreamError) -> None:
        """Settle with an error, and give up what would have settled it."""
        if not self.is_settled:
            give_up = self.on_abandon
            self._step, self._later_steps = None, ()
            self.settle(error)
            if give_up is not None:
                give_up()

    def abandon(self) -> None:
        """Nobody waits for the outcome any more. What only waits is given up; what is on its way to the log goes on,
        and so does what was to follow from it."""
        if not self.is_settled:
            # What is given up may refer to this: without the cut both would stay until the next full collection.
            give_up, self.on_abandon, self._consumer = self.on_abandon, None, None
            if give_up is not None:
                give_up()

    @property
    def is_abandonable(self) -> bool:
        """Whether it only waits, so that it can be given up."""
        return self.on_abandon is not None

    def result(self) -> T:
        """The value of one that is settled; raises its error."""
        assert self.is_settled
        outcome = self.outcome
        if isinstance(outcome, MillstreamError):
            raise outcome
        return outcome

    @property
    def error(self) -> MillstreamError | None:
        """The error of one that is settled, if that is its outcome."""
        return self.outcome if isinstance(self.outcome, MillstreamError) else None

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
            pending.on_abandon = task.cancel
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
        outcome = error.with_traceback(None)  # this frame is among its frames, and holds it
    except OSError as error:
        outcome = Unavailable(f"a file could not be read or written: {error.strerror}", code="disk_error")
    except Exception as error:
        outcome = defect(error)
    pending.settle(outcome)
