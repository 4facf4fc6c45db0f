"""The process that holds a data directory, determined without disturbing it."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


def holder_of(lock: Path) -> str | None:
    """The process that holds the data directory, if there is one."""
    try:
        descriptor = os.open(lock, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
    finally:
        os.close(descriptor)
    return None
