"""Who holds a data directory, without disturbing them."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


def holder_of(lock: Path) -> str | None:
    """Which process holds the data directory, if one does."""
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
