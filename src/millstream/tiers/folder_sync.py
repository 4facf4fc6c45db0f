"""Makes new files durable, and their names: whoever waits at the same time shares the sync of a folder.

A file counts when it and every folder above it, up to a root, has reached the disk. A folder's sync covers the names
that were in it when it began; so whoever comes while one is running waits for the next, with all others who do.
"""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

# The disk joins what is asked of it at once: more threads than cores are worth it.
THREADS: Final = 16


class FolderSync:
    def __init__(self, root: Path) -> None:
        self._root = root
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="millstream-sync")
        self._running: dict[Path, asyncio.Future[None]] = {}
        self._next: dict[Path, asyncio.Future[None]] = {}

    async def sync(self, path: Path) -> None:
        """Return when a file that is in its place cannot be lost any more."""
        await self._sync(path)
        for folder in path.parents:
            await self._sync_folder(folder)
            if folder == self._root:
                return

    async def _sync_folder(self, folder: Path) -> None:
        waiting = self._next.get(folder)
        if waiting is None:
            waiting = asyncio.ensure_future(self._sync_after(self._running.get(folder), folder))
            self._next[folder] = waiting
        # Who is cancelled leaves the others their sync.
        await asyncio.shield(waiting)

    async def _sync_after(self, running: asyncio.Future[None] | None, folder: Path) -> None:
        if running is not None:
            await asyncio.wait({running})
        mine = self._running[folder] = self._next.pop(folder)
        try:
            await self._sync(folder)
        finally:
            if self._running.get(folder) is mine:
                del self._running[folder]

    async def _sync(self, path: Path) -> None:
        await asyncio.get_running_loop().run_in_executor(self._threads, _fsync, path)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
