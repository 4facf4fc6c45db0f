"""Ending tasks: also those that lose a cancellation on its way."""

from __future__ import annotations

import asyncio

from millstream.tasks import end


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
