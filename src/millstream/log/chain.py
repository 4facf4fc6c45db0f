"""What the replicated log holds, and which of it counts. Knows no broker's connection, only what one has stored.

A message's header `Millstream-Batch` holds `first next writer fence`, the last being the sequence of its writer's
fence; its data is the batch's payload.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from millstream.errors import Corrupt
from millstream.log.broker_link import Stored
from millstream.log.interface import LogBatch

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
    """Which stored batches count. Fed with every batch in order; the same on every node."""

    def __init__(self, start: int = 1, before: Sequence[StoredBatch] = ()) -> None:
        """Reading starts at a position; `before` are batches from around there, which tell whose fence holds."""
        self._start = start
        self.fence = max((one.fence for one in before), default=0)
        self.position: int | None = None

    def begin_behind(self, around: Sequence[StoredBatch]) -> int | None:
        """Start right behind the batch that ends where reading starts; returns its sequence, None if it is not there.

        Among several it is the last of the fence in force: copies that do not count come before the one that does.
        """
        found, fence = None, 0
        for one in around:
            fence = max(fence, one.fence)
            if one.batch.next == self._start and one.fence == fence:
                found, self.fence, self.position = one.sequence, fence, self._start
        return found

    def accepts(self, one: StoredBatch) -> bool:
        if one.is_fence:
            self.fence = max(self.fence, one.fence)
        if one.fence != self.fence:
            return False
        if self.position is None:
            if not one.batch.first <= self._start < one.batch.next:
                return False
        elif one.batch.first != self.position:
            return False
        self.position = one.batch.next
        return True


def decode_batch(stored: Stored) -> StoredBatch:
    try:
        first, following, writer, fence = stored.headers[BATCH].split(" ")
        batch = LogBatch(int(first), int(following), stored.data)
        return StoredBatch(stored.sequence, writer, int(fence), batch)
    except (KeyError, ValueError):
        raise Corrupt(
            f"the log holds a message that is no batch, at sequence {stored.sequence}",
            hint="something other than millstream has published to the log's subject",
        ) from None
