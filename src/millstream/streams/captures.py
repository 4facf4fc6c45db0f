"""Captures: the changes up to a moment, kept apart from later ones until the catalog has them.

A checkpoint is stored while records go on being applied. `Namespace.begin_capture` hands out what has changed so far,
and starts to collect anew. `Namespace.commit` ends a capture whose changes are in the catalog; `Namespace.roll_back`
ends one that could not be stored, and returns its changes to those that are still to be captured.

A capture that was given an encoder also has each changed stream as it was at that moment, encoded: a stream that is
about to change is encoded first (`Namespace.grow`), the others some at a time, between requests (`encode_some`).
"""

from __future__ import annotations

from collections.abc import Callable

from millstream.protocol.keys import StreamKey
from millstream.streams.producers import ProducerChanges
from millstream.streams.state import Stream
from millstream.units import Incarnation

Encoder = Callable[[Stream], bytes]


class Capture:
    __slots__ = ("_encoder", "changed", "encoded", "freed_blobs", "producers", "removed", "unencoded")

    def __init__(
        self,
        changed: dict[Incarnation, Stream],
        removed: dict[Incarnation, StreamKey],
        freed_blobs: list[str],
        producers: ProducerChanges,
        encoder: Encoder | None,
    ) -> None:
        # Changed streams, but for those that only grew.
        self.changed = changed
        self.removed = removed
        self.freed_blobs = freed_blobs
        self.producers = producers
        self.encoded: list[bytes] = []
        self.unencoded = dict(changed) if encoder is not None else {}
        self._encoder = encoder

    def encode(self, stream: Stream) -> None:
        assert self._encoder is not None
        self.encoded.append(self._encoder(stream))

    def encode_some(self, count: int) -> bool:
        """Encode up to so many more streams; returns whether some are left."""
        unencoded = self.unencoded
        for _ in range(min(count, len(unencoded))):
            self.encode(unencoded.popitem()[1])
        return bool(unencoded)
