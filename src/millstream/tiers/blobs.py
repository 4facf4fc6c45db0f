"""Blobs: large immutable objects that do not belong into the log, such as snapshots.

A blob is spooled to a local file while it arrives and put into the object store whole; only then does a record
name it. Names are never reused. A name in the log therefore always has its blob. The reverse does not hold after a
crash; `names` lets the owner find and remove what nothing refers to.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

from millstream.protocol.keys import StreamKey
from millstream.tiers.objects import Objects

_ROOT: Final = "snapshots/"


class Upload:
    """A blob on its way in. Written chunk by chunk, never held whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        self.checksum = 0
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o640)

    def write(self, chunk: bytes) -> None:
        view = memoryview(chunk)
        while view:
            view = view[os.write(self._descriptor, view) :]
        self.size += len(chunk)
        self.checksum = zlib.crc32(chunk, self.checksum)

    def discard(self) -> None:
        """Let go of the spooled file; harmless if that has happened."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        self.path.unlink(missing_ok=True)


class Blobs:
    """`prefix` starts the names of all blobs that belong here, where several owners share an object store."""

    def __init__(self, objects: Objects, spool: Path, prefix: str = "") -> None:
        self.prefix = prefix
        self._objects = objects
        self._spool = spool
        # The names given out since the start: whatever their age looks like, they are no leftovers.
        self.made: set[str] = set()
        spool.mkdir(parents=True, exist_ok=True)
        for leftover in spool.iterdir():
            leftover.unlink()

    def begin(self, random: bytes) -> Upload:
        return Upload(self._spool / random.hex())

    async def commit(self, upload: Upload, name: str) -> None:
        """Make an upload durable under its name."""
        self.made.add(name)
        await self._objects.put(_ROOT + name, upload.path)
        upload.discard()

    async def copy(self, name: str, copy: str) -> None:
        """Give a blob a second name, with a life of its own."""
        self.made.add(copy)
        await self._objects.copy(_ROOT + name, _ROOT + copy)

    async def delete(self, name: str) -> None:
        self.made.discard(name)
        await self._objects.delete(_ROOT + name)

    def read(self, name: str, size: int) -> AsyncIterator[bytes]:
        return self._objects.stream(_ROOT + name, size)

    def new_name(self, key: StreamKey, offset: int, random: bytes) -> str:
        return self.prefix + blob_name(key, offset, random)

    async def names(self) -> list[str]:
        return [entry.path.removeprefix(_ROOT) async for entry in self._objects.list(_ROOT)]


def blob_name(key: StreamKey, offset: int, random: bytes) -> str:
    """A new name, readable enough to tell what it is when it is found lying about."""
    readable = re.sub(r"[^A-Za-z0-9._-]", "_", str(key))[:80]
    return f"{readable}-{offset:016d}-{random.hex()}"
