"""What one command may ask of a shard's state. Limits are judged by checks; a record that is in the log is never
refused, so a limit may be lowered at any time."""

from __future__ import annotations

from typing import Final, NamedTuple

from millstream.units import Milliseconds


class StreamLimits(NamedTuple):
    """`fork_depth_max`: how many sources, each the fork of the next, a fork may rest on.

    `append_messages_max`: into how many messages one JSON body may fall.
    `producers_max`: how many producers a stream may have.
    `producer_expiry_ms`: after how long without an append a producer counts as one never seen; None for never.
    """

    fork_depth_max: int = 64
    append_messages_max: int = 131_072
    producers_max: int = 100_000
    producer_expiry_ms: Milliseconds | None = None


DEFAULT_LIMITS: Final = StreamLimits()
