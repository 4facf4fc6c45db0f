"""Measures: plain numbers that the components of a server count up as they work, for `/metrics` to read.

Counting must cost next to nothing: a histogram is a list of integers. Measures are written where the work is done and
read elsewhere, without locks. Knows nothing of HTTP or of the exposition format.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

REQUEST_SECONDS: Final = (
    0.0005,
    0.001,
    0.002,
    0.004,
    0.008,
    0.016,
    0.032,
    0.064,
    0.128,
    0.25,
    0.5,
    1.0,
    2.0,
    4.0,
    8.0,
    16.0,
    32.0,
    64.0,
)
SYNC_SECONDS: Final = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
WAKE_SECONDS: Final = (0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0)
FLUSH_SECONDS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
BATCH_RECORDS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
BATCH_BYTES: Final = tuple(256 << shift for shift in range(0, 17, 2))


class Histogram:
    """Counts of values between bounds. `counts` has one entry more than `bounds`, for values above the last bound."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum: float = 0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    @property
    def count(self) -> int:
        return sum(self.counts)


class ShardMeasures:
    """The measures of one shard."""

    def __init__(self) -> None:
        self.appends = 0
        self.sync_seconds = Histogram(SYNC_SECONDS)
        self.commit_seconds = Histogram(SYNC_SECONDS)
        self.batch_records = Histogram(BATCH_RECORDS)
        self.batch_bytes = Histogram(BATCH_BYTES)
        self.wake_seconds = Histogram(WAKE_SECONDS)
        self.flush_seconds = Histogram(FLUSH_SECONDS)
        self.flush_failures = 0
        self.backpressure_refusals = 0
        self.segments_reclaimed = 0
        self.scrubs = 0
        self.scrubbed_bytes = 0
        # Rewrites of stored data into fewer, larger pieces, by what is rewritten.
        self.compactions = {"segments": 0, "yjs": 0}
