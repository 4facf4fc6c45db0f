"""Uploads: several objects on their way to the store at a time, in bounded number and size."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Final

from millstream.tasks import end

UPLOADS_AT_ONCE: Final = 16
# Together; a single one may be larger.
BYTES_AT_ONCE: Final = 64 << 20

Data = bytes | memoryview


class Uploads:
    """When it is left, everything is stored; or, after an error, nothing is under way any more."""

    def __init__(self, put: Callable[[str, Data], Awaitable[None]]) -> None:
        self._put = put
        self._under_way: dict[asyncio.Task[None], int] = {}

    async def __aenter__(self) -> Uploads:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            while error is None and self._under_way:
                await self._wait()
        finally:
            await end(*self._under_way)

    async def put(self, path: str, data: Data) -> None:
        """Begin to store an object as soon as there is room; raises what any of those before it failed with."""
        while self._under_way and not self._has_room(len(data)):
            await self._wait()

        async def store() -> None:
            await self._put(path, data)

        self._under_way[asyncio.get_running_loop().create_task(store())] = len(data)

    def _has_room(self, size: int) -> bool:
        return len(self._under_way) < UPLOADS_AT_ONCE and sum(self._under_way.values()) + size <= BYTES_AT_ONCE

    async def _wait(self) -> None:
        done, _ = await asyncio.wait(self._under_way, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            del self._under_way[task]
        for task in done:
            task.result()
