"""The Python processes in which Spark runs tasks, one task after the other."""

from __future__ import annotations

import gc
from functools import cache


@cache
def settle() -> None:
    """Exempt what is loaded from the collection of garbage; called by whatever a task runs first.

    Spark collects after every task, and most of what it then looks at are modules: a sixth of a worker's time when
    segments are read.
    """
    gc.collect()
    gc.freeze()
