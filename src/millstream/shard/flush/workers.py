"""Where the heavy jobs of a flush run: on a thread, or in a process of their own if there is much to go through.

The process runs at idle priority, and at normal priority for a while after memory was short or a flush failed. It ends
when it has had nothing to do for some time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

from millstream.shard.flush.limits import FlushLimits
from millstream.shard.parts import ShardParts
from millstream.tiers.flush_jobs import FlushJobs, LocalJobs
from millstream.tiers.flush_process import FlushProcess, Priority

# So many streams and messages are for a process of their own, which ends when it has had nothing to do for so long.
PROCESS_ROWS: Final = 2048
PROCESS_IDLE_SECONDS: Final = 60.0
# So long after memory was short, or a flush has failed, the process runs at normal priority.
NORMAL_PRIORITY_SECONDS: Final = 600.0

T = TypeVar("T")


class FlushWorkers:
    def __init__(self, parts: ShardParts, limits: FlushLimits) -> None:
        self._clock = parts.clock
        self._budget = parts.budget
        self._limits = limits
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="millstream-flush")
        self.local = LocalJobs(parts.catalog)
        self.process = FlushProcess(parts.catalog)
        # Ages are by the monotonic clock: the wall clock may be set.
        self._process_used_at: float | None = None
        self._normal_priority_until = float("-inf")

    def jobs(self, rows: int) -> FlushJobs:
        """Where so many streams and messages are gone through."""
        if rows < PROCESS_ROWS or self.process.is_impossible:
            return self.local
        now = self._process_used_at = self._clock.monotonic()
        if self._budget.used > self._limits.pressure_bytes:
            self.raise_priority()
        self.process.set_priority(Priority.NORMAL if now < self._normal_priority_until else Priority.IDLE)
        return self.process

    def raise_priority(self) -> None:
        """From here on a flush may take processor time from requests, for a while."""
        self._normal_priority_until = self._clock.monotonic() + NORMAL_PRIORITY_SECONDS

    async def in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    @property
    def is_process_idle(self) -> bool:
        """Whether a process has not been needed for a while."""
        used_at = self._process_used_at
        return used_at is not None and self._clock.monotonic() - used_at > PROCESS_IDLE_SECONDS

    async def end_process(self) -> None:
        """Give the process's memory back; the next large flush starts another."""
        self._process_used_at = None
        await self.in_thread(self.process.close)

    def close(self) -> None:
        self.process.interrupt()  # a flush that was given up may still wait for it
        self._thread.submit(self.process.close)
        self._thread.shutdown()
