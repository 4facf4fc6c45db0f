"""The disk operations of the file log, in one place so that tests can make them fail."""

from __future__ import annotations

import os
from pathlib import Path

# Zeros are written ahead of the end in steps of this size. Overwriting allocated blocks spares fdatasync the
# file system's journal: 150 µs against 230–360 µs for a growing file, on ext4.
ALLOCATION_BYTES = 4 << 20


class Disk:
    def write(self, descriptor: int, data: bytes, at: int) -> None:
        view = memoryview(data)
        while view:
            written = os.pwrite(descriptor, view, at)
            view, at = view[written:], at + written

    def write_durably(self, descriptor: int, data: bytes, at: int) -> None:
        """Write and sync in one call: RWF_DSYNC makes the write itself end with what fdatasync does.

        One system call instead of two also means one wait for the interpreter lock instead of two.
        """
        written = os.pwritev(descriptor, [data], at, os.RWF_DSYNC)
        if written < len(data):
            self.write(descriptor, data[written:], at + written)
            os.fdatasync(descriptor)

    def allocate(self, descriptor: int, at: int, size: int) -> None:
        self.write(descriptor, bytes(size), at)

    def sync(self, descriptor: int) -> None:
        os.fdatasync(descriptor)

    def truncate(self, descriptor: int, size: int) -> None:
        os.ftruncate(descriptor, size)

    def sync_directory(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
