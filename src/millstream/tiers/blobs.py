"""Blobs: large immutable objects that do not belong into the log, such as snapshots.

A blob is spooled to a local file while it arrives and put into the object store whole; only then does a record
name it. Names are never reused. A name in the log therefore always has its blob. The reverse does not hold after a
crash; `names` lets the owner find and remove what nothing refers to.
"""

from __future__ import annotations

import asyncio
import os
import re
import zlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Final

from millstream.descriptors import Descriptor
from millstream.errors import Corrupt, NotFound
from millstream.protocol.keys import StreamKey
from millstream.streams.records import SnapshotRef
from millstream.tiers.objects import Objects
from millstream.units import Offset

_ROOT: Final = "snapshots/"
WHOLE_BYTES: Final = 4 << 20
VERIFIED_MAX: Final = 10_000


class Upload:
    """A blob on its way in. Written chunk by chunk, never held whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        self.checksum = 0
        self._file = Descriptor(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)

    def write(self, chunk: bytes) -> None:
        view = memoryview(chunk)
        while view:
            view = view[os.write(self._file.number, view) :]
        self.size += len(chunk)
        self.checksum = zlib.crc32(chunk, self.checksum)

    def discard(self) -> None:
        """Let go of the spooled file; harmless if that has happened."""
        self._file.close()
        self.path.unlink(missing_ok=True)


class Blobs:
    """`prefix` starts the names of all blobs that belong here, where several owners share an object store."""

    def __init__(self, objects: Objects, spool: Path, prefix: str = "") -> None:
        self.prefix = prefix
        self._objects = objects
        self._spool = spool
        # The names given out whose record is not applied yet: nothing refers to them, and they are no leftovers.
        self.made: set[str] = set()
        # Large ones that were compared with their checksum since the start.
        self._verified: set[str] = set()
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

    def settled(self, name: str) -> None:
        """The record that names a blob was applied, or refused."""
        self.made.discard(name)

    async def open(self, snapshot: SnapshotRef, is_needed: Callable[[], bool] = lambda: True) -> AsyncIterator[bytes]:
        """A snapshot's bytes. None is given out before all have been compared with the checksum once.

        A small one is read whole for that. A large one is read twice when it is first asked for; later it is compared
        on its way out, and if it was damaged meanwhile its last piece never comes.
        """
        path = _ROOT + snapshot.blob
        try:
            with self._objects.damage.noticed(path, is_needed):
                if snapshot.size <= WHOLE_BYTES:
                    data = await self._objects.get(path)
                    _compare(path, snapshot, zlib.crc32(data), len(data))
                    return _one(data)
                if snapshot.blob not in self._verified:
                    await self.verify(snapshot)
        except NotFound:
            raise NotFound("the snapshot was replaced meanwhile", code="snapshot_not_found") from None
        return self._verified_pieces(snapshot)

    async def verify(self, snapshot: SnapshotRef) -> None:
        """Read a snapshot and compare it."""
        path, checksum, size = _ROOT + snapshot.blob, 0, 0
        async for piece in self._objects.stream(path, snapshot.size):
            checksum, size = zlib.crc32(piece, checksum), size + len(piece)
            await asyncio.sleep(0)
        _compare(path, snapshot, checksum, size)
        if len(self._verified) >= VERIFIED_MAX:
            self._verified.clear()
        self._verified.add(snapshot.blob)

    async def _verified_pieces(self, snapshot: SnapshotRef) -> AsyncIterator[bytes]:
        path, checksum, size = _ROOT + snapshot.blob, 0, 0
        waiting = b""
        with self._objects.damage.noticed(path):
            async for piece in self._objects.stream(path, snapshot.size):
                if waiting:
                    yield waiting
                checksum, size, waiting = zlib.crc32(piece, checksum), size + len(piece), piece
            _compare(path, snapshot, checksum, size)
        yield waiting

    def new_name(self, key: StreamKey, offset: Offset, random: bytes) -> str:
        return self.prefix + blob_name(key, offset, random)

    async def names(self) -> list[str]:
        return [entry.path.removeprefix(_ROOT) async for entry in self._objects.list(_ROOT)]


async def _one(data: bytes) -> AsyncIterator[bytes]:
    yield data


def _compare(path: str, snapshot: SnapshotRef, checksum: int, size: int) -> None:
    if (checksum, size) != (snapshot.checksum, snapshot.size):
        raise Corrupt(
            f"the snapshot {path} is damaged: its checksum or size differs from what was recorded",
            code="object_damaged",
        )


def blob_name(key: StreamKey, offset: Offset, random: bytes) -> str:
    """A new name, readable enough to tell what it is when it is found lying about."""
    readable = re.sub(r"[^A-Za-z0-9._-]", "_", str(key))[:80]
    return f"{readable}-{offset:016d}-{random.hex()}"
