"""Long work on the event loop, a slice at a time: whoever else wants the loop gets it in between."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Final

from millstream.clock import monotonic_seconds
from millstream.errors import MillstreamError
from millstream.pending import Pending

SLICE_SECONDS: Final = 0.005


def in_slices(steps: Iterator[object]) -> Pending[None]:
    """Run the steps, as many at a time as fit into a slice; settled when they are done, or with what ended them.

    A step should be short: the loop is given back only between two of them.
    """
    pending: Pending[None] = Pending(None)
    _run_slice(steps, pending)
    return pending


def _run_slice(steps: Iterator[object], pending: Pending[None]) -> None:
    until = monotonic_seconds() + SLICE_SECONDS
    try:
        for _ in steps:
            if monotonic_seconds() >= until:
                asyncio.get_running_loop().call_soon(_run_slice, steps, pending)
                return
    except MillstreamError as error:
        pending.settle(error)
    else:
        pending.settle()
