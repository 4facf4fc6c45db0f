"""Disks that fail, wait or hurry on purpose."""

from __future__ import annotations

import errno
import os
import threading

from millstream.log.disk import Disk


class FailingDisk(Disk):
    """Fails the operations named in `failing` with the given error, and counts what it was asked."""

    def __init__(self) -> None:
        self.failing: set[str] = set()
        self.error = errno.ENOSPC
        self.calls: list[str] = []

    def _ask(self, operation: str) -> None:
        self.calls.append(operation)
        if operation in self.failing:
            raise OSError(self.error, os.strerror(self.error))

    def write_durably(self, descriptor: int, data: bytes, at: int) -> None:
        self._ask("write_durably")
        super().write_durably(descriptor, data, at)

    def allocate(self, descriptor: int, at: int, size: int) -> None:
        self._ask("allocate")
        super().allocate(descriptor, at, size)

    def truncate(self, descriptor: int, size: int) -> None:
        self._ask("truncate")
        super().truncate(descriptor, size)

    def sync(self, descriptor: int) -> None:
        self._ask("sync")
        super().sync(descriptor)


class QuickDisk(Disk):
    """Does not wait for the device: for tests of thousands of records that no power failure is part of."""

    def write_durably(self, descriptor: int, data: bytes, at: int) -> None:
        self.write(descriptor, data, at)


class HeldDisk(Disk):
    """Writes wait while it is held, so that a test can act while a batch is in flight."""

    def __init__(self) -> None:
        self._free = threading.Event()
        self._free.set()

    def hold(self) -> None:
        self._free.clear()

    def let_go(self) -> None:
        self._free.set()

    def write_durably(self, descriptor: int, data: bytes, at: int) -> None:
        assert self._free.wait(20.0), "a test held the disk and forgot it"
        super().write_durably(descriptor, data, at)
