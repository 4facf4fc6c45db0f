"""Ending background tasks. Knows asyncio alone."""

from __future__ import annotations

import asyncio
from typing import Any, Final

AGAIN_SECONDS: Final = 0.5


async def end(*tasks: asyncio.Task[Any] | None) -> None:
    """Cancel the tasks and wait until each has ended, however it ends.

    One cancellation is not always enough: `asyncio.wait_for` of Python 3.11 drops one that arrives together with the
    result it waits for, and client libraries use it as well. A task that took no notice is told again.
    """
    given = {task for task in tasks if task is not None}
    pending = given
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=AGAIN_SECONDS)
    for task in given:
        if not task.cancelled():
            task.exception()  # looked at, so that it is not reported as forgotten
