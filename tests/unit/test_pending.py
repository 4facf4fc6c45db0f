"""Pending: settled once, passed on by steps, awaited, interrupted, abandoned."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.errors import Conflict, MillstreamError, NotFound, Unavailable
from millstream.pending import BackgroundTasks, Pending

REFUSED = NotFound("it is not there")


def test_an_outcome_reaches_its_consumer_at_once_and_only_once() -> None:
    told: list[object] = []
    pending = Pending("known beforehand")
    pending.when_settled(told.append)
    assert told == []
    pending.settle()
    pending.settle("another")
    assert told == ["known beforehand"]
    assert pending.result() == "known beforehand"


def test_what_is_settled_tells_whoever_comes_later() -> None:
    told: list[object] = []
    Pending.settled(3).then(lambda value: value + 1).when_settled(told.append)
    Pending.settled(REFUSED).then(lambda value: "not reached").when_settled(told.append)
    assert told == [4, REFUSED]


@given(st.lists(st.sampled_from(["value", "pending", "later", "error", "raises"]), max_size=8), st.booleans())
def test_steps_do_the_same_before_and_after_it_is_settled(kinds: list[str], settled_first: bool) -> None:
    """Compared with a plain loop over the same steps."""
    waiting: list[Pending[int]] = []

    def step_of(kind: str) -> Callable[[int], int | Pending[int]]:
        def step(value: int) -> int | Pending[int]:
            if kind == "pending":
                return Pending.settled(value + 1)
            if kind == "later":
                later: Pending[int] = Pending(value + 1)
                waiting.append(later)
                return later
            if kind == "error":
                return Pending.settled(REFUSED)
            if kind == "raises":
                raise REFUSED
            return value + 1

        return step

    pending: Pending[int] = Pending.settled(0) if settled_first else Pending(0)
    for kind in kinds:
        pending = pending.then(step_of(kind))
    told: list[object] = []
    pending.when_settled(told.append)
    if not settled_first:
        pending.settle()
    while waiting:
        waiting.pop(0).settle()
    refusals = [index for index, kind in enumerate(kinds) if kind in ("error", "raises")]
    assert told == [REFUSED if refusals else len(kinds)]


def test_a_step_for_either_is_told_of_errors_and_may_mend_them() -> None:
    told: list[object] = []
    Pending.settled(REFUSED).then_either(lambda outcome: f"mended {outcome}").when_settled(told.append)
    passed_on: Pending[str] = Pending()
    passed_on.then_either(lambda outcome: outcome).when_settled(told.append)
    passed_on.settle(REFUSED)
    assert told == [f"mended {REFUSED}", REFUSED]


def test_a_step_with_a_defect_is_an_internal_error_and_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    pending = Pending.settled(1).then(lambda value: 1 // (value - 1))
    assert pending.error is not None and pending.error.code == "internal_error"
    assert "ZeroDivisionError" in caplog.text


def test_awaiting_gives_the_value_or_raises_the_error() -> None:
    async def main() -> None:
        assert await Pending.settled("at once") == "at once"
        later: Pending[str] = Pending()
        asyncio.get_running_loop().call_soon(later.settle, "later")
        assert await later == "later"
        with pytest.raises(NotFound):
            await Pending[str].settled(REFUSED)

    asyncio.run(main())


def test_an_interrupted_one_tells_the_error_and_gives_up_its_work() -> None:
    given_up: list[str] = []
    told: list[object] = []
    pending: Pending[str] = Pending(on_abandon=lambda: given_up.append("work"))
    pending.then(lambda value: "not reached").when_settled(told.append)
    pending.interrupt(Conflict("the token has expired"))
    pending.settle("too late")
    assert given_up == ["work"]
    assert [type(one) for one in told] == [Conflict]


def test_an_abandoned_one_tells_nobody_and_gives_up_what_only_waits() -> None:
    given_up: list[str] = []
    told: list[object] = []
    inner: Pending[str] = Pending(on_abandon=lambda: given_up.append("inner"))
    pending = Pending.settled(1).then(lambda value: inner)
    pending.when_settled(told.append)
    assert pending.is_abandonable
    pending.abandon()
    assert (given_up, told) == (["inner"], [])


def test_what_follows_from_a_command_follows_although_nobody_waits_for_it() -> None:
    done: list[str] = []
    committed = Pending("stored")
    committed.then(done.append).when_settled(lambda outcome: pytest.fail("nobody is there"))
    committed.abandon()
    committed.settle()
    assert done == ["stored"]


def test_background_work_settles_and_ends_with_whoever_asked_if_it_is_only_for_them() -> None:
    async def main() -> None:
        tasks, ended = BackgroundTasks(), list[str]()

        async def work(name: str) -> str:
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                ended.append(name)
                raise
            return name

        async def failing(error: Exception) -> None:
            raise error

        assert await tasks.run(work("one")) == "one"
        for_a_reader, for_the_log = tasks.run(work("read"), cancels=True), tasks.run(work("write"))
        await asyncio.sleep(0)
        assert for_a_reader.is_abandonable and not for_the_log.is_abandonable
        for_a_reader.abandon()
        for_the_log.abandon()
        await asyncio.sleep(0.05)
        assert ended == ["read"]
        for error, kind in ((REFUSED, NotFound), (OSError(28, "No space left"), Unavailable), (ValueError(), None)):
            with pytest.raises(kind or MillstreamError):
                await tasks.run(failing(error))
        tasks.run(work("at the end"))
        await asyncio.sleep(0)
        await tasks.end()
        assert ended == ["read", "at the end"]

    asyncio.run(main())


def test_one_that_is_over_is_part_of_no_cycle() -> None:
    class Work:
        def give_up(self) -> None:
            pass

    def abandoned() -> weakref.ref[Work]:
        work = Work()
        pending: Pending[None] = Pending(on_abandon=work.give_up)
        work.pending = pending  # type: ignore[attr-defined]
        pending.when_settled(lambda outcome: None)
        pending.abandon()
        return weakref.ref(work)

    def refused() -> weakref.ref[Work]:
        work = Work()

        def step(value: int) -> int:
            assert work is not None
            raise NotFound("it is gone")

        told: list[object] = []
        pending = Pending(1).then(step)
        pending.when_settled(told.append)
        pending.settle()
        return weakref.ref(work)

    gc.collect()
    gc.disable()
    try:
        assert abandoned()() is None
        assert refused()() is None
    finally:
        gc.enable()
