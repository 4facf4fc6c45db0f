"""Blobs: large immutable objects that do not belong into the log, such as snapshots.

A blob is written to a temporary file while it arrives, made durable, and only then given its name, which is never
reused: `{stream}-{offset}-{random}`. A name in the log therefore always has its blob. The reverse does not
hold after a crash; `names` lets the owner find and remove what nothing refers to.
"""

from __future__ import annotations

import os
import re
import zlib
from pathlib import Path
from typing import Final

from millstream.protocol.keys import StreamKey

_TEMPORARY: Final = ".part"


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

    def sync(self) -> None:
        os.fsync(self._descriptor)
        os.close(self._descriptor)
        self._descriptor = -1

    def discard(self) -> None:
        """Give up an upload that did not become a blob; harmless for one that did."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        self.path.unlink(missing_ok=True)


class FileBlobs:
    """Blobs as files in one directory. All methods but `begin` and `path` may block on the disk."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        for leftover in directory.glob(f"*{_TEMPORARY}"):
            leftover.unlink()

    def begin(self, random: bytes) -> Upload:
        return Upload(self._directory / f"{random.hex()}{_TEMPORARY}")

    def commit(self, upload: Upload, name: str) -> None:
        """Make an upload durable under its name."""
        upload.sync()
        upload.path.rename(self.path(name))
        self._sync_directory()

    def copy(self, name: str, copy: str) -> None:
        """Give a blob a second name, with a life of its own."""
        os.link(self.path(name), self.path(copy))
        self._sync_directory()

    def delete(self, name: str) -> None:
        self.path(name).unlink(missing_ok=True)

    def names(self) -> list[str]:
        return [path.name for path in self._directory.iterdir() if not path.name.endswith(_TEMPORARY)]

    def path(self, name: str) -> Path:
        return self._directory / name

    def _sync_directory(self) -> None:
        descriptor = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def blob_name(key: StreamKey, offset: int, random: bytes) -> str:
    """A new name, readable enough to tell what it is when it is found lying about."""
    readable = re.sub(r"[^A-Za-z0-9._-]", "_", str(key))[:80]
    return f"{readable}-{offset:016d}-{random.hex()}"
