"""The batches of the replicated log, and which of them count. Knows no connection, only stored messages.

The header `Millstream-Batch` of a message holds `first next writer fence`; the last is the sequence of its writer's
fence. The message's data is the batch's payload.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from millstream.errors import Corrupt
from millstream.log.broker_link import Stored
from millstream.log.interface import LogBatch
from millstream.units import Position

BATCH: Final = "Millstream-Batch"


class StoredBatch(NamedTuple):
    sequence: int
    writer: str
    fence: int
    batch: LogBatch

    @property
    def is_fence(self) -> bool:
        return self.fence == self.sequence


class Chain:
    """Decides which stored batches count. It is fed every batch in order, and every node decides alike."""

    def __init__(self, start: int = 1, before: Sequence[StoredBatch] = ()) -> None:
        """Reading starts at a position; `before` are batches from around there, which determine the fence in force."""
        self._start = start
        self.fence = max((stored.fence for stored in before), default=0)
        self.position: int | None = None

    def begin_after(self, around: Sequence[StoredBatch]) -> int | None:
        """Start right after the batch that ends where reading starts; returns its sequence, None if it is not stored.

        If there are several copies, it is the last one of the fence in force: the others come before it.
        """
        found, fence = None, 0
        for stored in around:
            fence = max(fence, stored.fence)
            if stored.batch.next == self._start and stored.fence == fence:
                found, self.fence, self.position = stored.sequence, fence, self._start
        return found

    def accepts(self, stored: StoredBatch) -> bool:
        if stored.is_fence:
            self.fence = max(self.fence, stored.fence)
        if stored.fence != self.fence:
            return False
        if self.position is None:
            if not stored.batch.first <= self._start < stored.batch.next:
                return False
        elif stored.batch.first != self.position:
            return False
        self.position = stored.batch.next
        return True


def decode_batch(stored: Stored) -> StoredBatch:
    try:
        first, following, writer, fence = stored.headers[BATCH].split(" ")
        batch = LogBatch(Position(first), Position(following), stored.data)
        return StoredBatch(stored.sequence, writer, int(fence), batch)
    except (KeyError, ValueError):
        raise Corrupt(
            f"the log holds a message that is no batch, at sequence {stored.sequence}",
            hint="something other than millstream has published to the log's subject",
        ) from None
