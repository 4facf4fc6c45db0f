"""The data directory, which only one process at a time may use."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from millstream.descriptors import Descriptor
from millstream.errors import ConfigurationError


class DataDirectory:
    """The data directory, locked: no second process may write the same log."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = Descriptor(path / "lock", os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise ConfigurationError(
                f"the data directory {path} cannot be used: {error.strerror}",
                hint="choose a writable one with --data-dir",
            ) from None
        try:
            fcntl.flock(self._lock.number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._lock.number, 32, 0).decode(errors="replace").strip() or "unknown"
            self._lock.close()
            raise ConfigurationError(
                f"the data directory {path} is in use by another process (pid {holder})",
                hint="stop that process, or choose another directory with --data-dir",
            ) from None
        os.ftruncate(self._lock.number, 0)
        os.pwrite(self._lock.number, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Release the lock; idempotent."""
        self._lock.close()
