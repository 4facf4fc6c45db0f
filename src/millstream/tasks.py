"""Background tasks: running them, restarting them when they fail, and ending them. Knows only asyncio.

Everything that runs as long as the server does is started by a `Supervisor`. A task that fails is logged, counted, and
restarted after a pause that grows. While a vital task is not running, the server is not ready.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, Final

logger = logging.getLogger("millstream.tasks")

AGAIN_SECONDS: Final = 0.5
TOLD_MAX: Final = 20
# The first and the longest pause before a failed task is restarted.
PAUSE_SECONDS: Final = (1.0, 60.0)
# A task that has run this long, or as long as its last pause, counts as healthy again.
STEADY_SECONDS: Final = 5.0


class Supervisor:
    """The background tasks of a process. They may run on several loops; `problems` and counts may be read from any
    thread."""

    def __init__(self) -> None:
        self.failures: Counter[str] = Counter()
        self._failing: dict[_Supervised, str] = {}

    @property
    def problems(self) -> list[str]:
        """The vital tasks that are not running, and why."""
        return list(self._failing.values())

    def start(
        self,
        name: str,
        work: Callable[[], Awaitable[None]],
        *,
        of: str = "",
        is_vital: bool = False,
        pause_seconds: tuple[float, float] = PAUSE_SECONDS,
    ) -> asyncio.Task[None]:
        """Run `work` until it returns or the task is cancelled; if it raises, run it again after a pause.

        `name` is the label of its failures; `of` distinguishes tasks of the same name.
        """
        supervised = _Supervised(self, name, f"{name} of {of}" if of else name, work, is_vital, pause_seconds)
        return asyncio.get_running_loop().create_task(supervised.run(), name=name)

    def failed(self, task: _Supervised, error: Exception) -> None:
        self.failures[task.name] += 1
        logger.error(
            "the background task %s failed and starts again in %.1f s", task.title, task.pause_seconds, exc_info=error
        )
        if task.is_vital:
            self._failing[task] = f"the background task {task.title} fails: {type(error).__name__}: {error}"

    def recovered(self, task: _Supervised) -> None:
        self._failing.pop(task, None)


class _Supervised:
    """One background task across its restarts."""

    def __init__(
        self,
        supervisor: Supervisor,
        name: str,
        title: str,
        work: Callable[[], Awaitable[None]],
        is_vital: bool,
        pause_seconds: tuple[float, float],
    ) -> None:
        self._supervisor = supervisor
        self.name = name
        self.title = title
        self._work = work
        self.is_vital = is_vital
        self._first_pause_seconds, self._longest_pause_seconds = pause_seconds
        self.pause_seconds = self._first_pause_seconds

    async def run(self) -> None:
        try:
            while not await self._runs_to_its_end():
                await asyncio.sleep(self.pause_seconds)
                self.pause_seconds = min(self.pause_seconds * 2, self._longest_pause_seconds)
        finally:
            self._supervisor.recovered(self)

    async def _runs_to_its_end(self) -> bool:
        steady = asyncio.get_running_loop().call_later(max(STEADY_SECONDS, self.pause_seconds), self._recover)
        try:
            await self._work()
            return True
        except Exception as error:
            self._supervisor.failed(self, error)
            return False
        finally:
            steady.cancel()

    def _recover(self) -> None:
        self.pause_seconds = self._first_pause_seconds
        self._supervisor.recovered(self)


async def end(*tasks: asyncio.Task[Any] | None) -> None:
    """Cancel the tasks and wait until each has ended, with whatever result.

    One cancellation is not always enough: `asyncio.wait_for` of Python 3.11 drops one that arrives together with the
    result it waits for, and client libraries use it too. So a task that did not end is cancelled again, a limited
    number of times: a task that never ends must not keep a server from stopping.
    """
    given = {task for task in tasks if task is not None}
    pending = given
    for _ in range(TOLD_MAX):
        if not pending:
            break
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=AGAIN_SECONDS)
    for task in pending:
        logger.error("the task %s takes no notice that it is to end; nobody waits for it", task.get_name())
    for task in given - pending:
        if not task.cancelled():
            task.exception()  # retrieved, so that asyncio does not report it as never retrieved
