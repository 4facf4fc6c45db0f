"""The Python processes in which Spark runs tasks, one task after the other."""

from __future__ import annotations

import gc
from functools import cache


@cache
def exempt_modules_from_collection() -> None:
    """Exempt the modules that are loaded from garbage collection. Every task calls this first.

    Spark collects garbage after every task, and most of what the collector looks at are modules: a sixth of a worker's
    time when segments are read.
    """
    gc.collect()
    gc.freeze()
