"""Background tasks: started again when they fail, and ended, also where a cancellation is lost on its way."""

from __future__ import annotations

import asyncio
import contextlib
from itertools import pairwise

import pytest

from millstream import tasks
from millstream.tasks import PAUSE_SECONDS, STEADY_SECONDS, Supervisor, end
from support.fake_time import FakeClock, run, turns


def test_a_task_that_swallows_a_cancellation_ends_all_the_same() -> None:
    told = 0

    async def deaf() -> None:
        nonlocal told
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                told += 1
                if told == 2:
                    raise

    async def scenario() -> None:
        task = asyncio.create_task(deaf())
        await asyncio.sleep(0)
        await asyncio.wait_for(end(task), 10)
        assert task.cancelled()

    asyncio.run(scenario())
    assert told == 2


def test_a_task_that_never_ends_is_given_up_by_its_name(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tasks, "AGAIN_SECONDS", 0.01)
    is_over = False

    async def deaf() -> None:
        while not is_over:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(60)

    async def scenario() -> None:
        nonlocal is_over
        task = asyncio.create_task(deaf(), name="deaf")
        await asyncio.sleep(0)
        await asyncio.wait_for(end(task), 10)
        assert not task.done()
        is_over = True
        task.cancel()
        await task

    asyncio.run(scenario())
    assert "the task deaf takes no notice" in caplog.text


def test_tasks_that_fail_end_quietly_and_there_may_be_none() -> None:
    async def fails() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            raise ValueError("on the way out")

    async def scenario() -> None:
        task = asyncio.create_task(fails())
        await asyncio.sleep(0)
        await end(task, None)
        assert task.done()
        await end()

    asyncio.run(scenario())


class Flaky:
    """Fails as often as told, then runs on; counts its starts."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.starts = 0

    async def run(self) -> None:
        self.starts += 1
        if self.starts <= self.failures:
            raise ValueError(f"failure {self.starts}")
        await asyncio.sleep(1e9)


async def forward(clock: FakeClock, seconds: float) -> None:
    clock.advance(int(seconds * 1000))
    await turns()


def test_a_failed_task_is_logged_counted_and_started_again_after_growing_pauses(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = FakeClock()

    async def scenario() -> None:
        supervisor, work = Supervisor(), Flaky(3)
        task = supervisor.start("flush", work.run, of="shard 2", is_vital=True, pause_seconds=(1.0, 3.0))
        await turns()
        for starts, pause in ((1, 1.0), (2, 2.0), (3, 3.0)):
            assert work.starts == starts
            await forward(clock, pause - 0.001)
            assert work.starts == starts, "the pause is not over"
            await forward(clock, 0.001)
        assert work.starts == 4
        assert supervisor.failures == {"flush": 3}
        assert [record.levelname for record in caplog.records] == ["ERROR"] * 3
        assert "flush of shard 2 failed" in caplog.text and "failure 3" in caplog.text
        await end(task)

    run(scenario(), clock)


def test_a_vital_task_shows_as_a_problem_until_it_has_run_for_a_while_and_others_never_do() -> None:
    clock = FakeClock()

    async def scenario() -> None:
        supervisor = Supervisor()
        tasks = [
            supervisor.start("reclaim", Flaky(1).run),
            supervisor.start("flush", Flaky(1).run, is_vital=True),
        ]
        await turns()
        assert supervisor.failures == {"reclaim": 1, "flush": 1}
        assert supervisor.problems == ["the background task flush fails: ValueError: failure 1"]
        await forward(clock, PAUSE_SECONDS[0])
        assert supervisor.problems, "it has only just been started again"
        await forward(clock, STEADY_SECONDS)
        assert supervisor.problems == []
        await end(*tasks)

    run(scenario(), clock)


def test_a_task_that_has_run_well_is_started_again_soon_when_it_fails_again() -> None:
    clock = FakeClock()

    async def scenario() -> None:
        starts: list[float] = []

        async def fails_later() -> None:
            starts.append(clock.monotonic())
            await asyncio.sleep(0.0 if len(starts) < 3 else 100.0)
            raise ValueError

        task = Supervisor().start("x", fails_later, pause_seconds=(1.0, 60.0))
        await turns()
        for _ in range(8):
            await forward(clock, 1.0)
        await forward(clock, 95.0)
        await forward(clock, 1.0)
        pauses = [round(after - before) for before, after in pairwise(starts)]
        assert pauses[:2] == [1, 2]
        assert len(starts) == 4, "after a long good run the pause is the first one again"
        await end(task)

    run(scenario(), clock)


def test_a_task_that_returns_or_is_ended_is_no_problem_any_more() -> None:
    async def scenario() -> None:
        supervisor = Supervisor()
        failing = supervisor.start("a", Flaky(100).run, is_vital=True)
        done = supervisor.start("b", turns)
        await asyncio.wait_for(done, 10)
        assert supervisor.problems
        await end(failing)
        assert supervisor.problems == []

    asyncio.run(scenario())
