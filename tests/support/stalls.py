"""Measures how long a loop is held: the processor time that this process takes between two beats of the loop.

A heartbeat that is late by the clock says little on a busy machine. Processor time does not pass while other processes
run; between two beats it grows by what the loop's callbacks take, and by what threads take that keep the interpreter
from the loop. Both are stalls; threads that leave the interpreter alone let the loop beat.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

# No request may hold the loop for longer than this.
STALL_SECONDS_MAX = 0.1
BEAT_SECONDS = 0.001


class Stalls:
    """What the beats have shown; `worst_seconds` is the longest stall."""

    def __init__(self) -> None:
        self.worst_seconds = 0.0
        self.beats = 0

    async def beat_forever(self) -> None:
        before = time.process_time()
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            now = time.process_time()
            self.worst_seconds = max(self.worst_seconds, now - before)
            self.beats += 1
            before = time.process_time()


@asynccontextmanager
async def measured_stalls() -> AsyncIterator[Stalls]:
    """Measure what happens inside, on the running loop. Garbage of other tests is collected before."""
    gc.collect()
    stalls = Stalls()
    task = asyncio.get_running_loop().create_task(stalls.beat_forever())
    await asyncio.sleep(2 * BEAT_SECONDS)
    try:
        yield stalls
        await asyncio.sleep(2 * BEAT_SECONDS)
    finally:
        task.cancel()
