"""Long work on the event loop, a slice at a time: whoever else wants the loop gets it in between."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Final

from millstream.clock import monotonic_seconds
from millstream.errors import MillstreamError

SLICE_SECONDS: Final = 0.005


def in_slices(steps: Iterator[object], done: Callable[[MillstreamError | None], None]) -> None:
    """Run the steps, as many at a time as fit into a slice; `done` gets the error that ended them, or None.

    A step should be short: the loop is given back only between two of them.
    """
    until = monotonic_seconds() + SLICE_SECONDS
    try:
        for _ in steps:
            if monotonic_seconds() >= until:
                asyncio.get_running_loop().call_soon(in_slices, steps, done)
                return
    except MillstreamError as error:
        done(error)
    else:
        done(None)
