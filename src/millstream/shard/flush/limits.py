"""When a flush is due, and how much of what is cold may stay in memory."""

from __future__ import annotations

from typing import NamedTuple


class FlushLimits(NamedTuple):
    interval_seconds: float
    flush_bytes: int
    keep_bytes: int  # flushed messages stay in memory as long as all of memory's messages take no more than this
    pressure_bytes: int  # when memory's messages take more than this, a flush is due at once
    resident_streams_max: int
