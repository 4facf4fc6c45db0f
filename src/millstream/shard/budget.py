"""The memory budget of a shard: what requests can make it keep, added up in one place.

Messages and their overhead, appends in flight, the state of streams and buckets, what waits for a flush (changes,
removals), journals, deadlines and subscriptions all count against `hot.bytes_max`. Whoever would add to them asks here
first and is refused with 503 `backpressure` when there is no room. Sizes are estimates for names of common length: the
limit is for memory to stay within a small factor of it, whatever is sent.

The parts that change with every message are read each time; the rest is weighed once a batch, so that an append pays
for one addition. It is weighed again before anybody is refused, because memory may have come free since.
"""

from __future__ import annotations

from collections.abc import Sized
from typing import Final

from millstream.shard.committer import Committer
from millstream.streams.machine import StateMachine
from millstream.tiers.hot import HotTier
from millstream.tiers.journal import Journals

# A stream in memory: its state and its entries in two tables. Those with messages are weighed with these, by the hot
# tier.
STREAM_BYTES: Final = 800
# A change or a removal that waits for a flush.
CHANGE_BYTES: Final = 100
REMOVAL_BYTES: Final = 300
PRODUCER_BYTES: Final = 350
BUCKET_BYTES: Final = 300
DEADLINE_BYTES: Final = 140
# No flush makes subscriptions smaller, so they may have no more of the budget than this share.
SUBSCRIPTIONS_SHARE: Final = 4
# What only takes away, as deletions do, may go so much beyond the limit: it is what makes room.
RESERVE_SHARE: Final = 8


class MemoryBudget:
    def __init__(
        self,
        bytes_max: int,
        hot: HotTier,
        journals: Journals,
        machine: StateMachine,
        committer: Committer,
        deadlines: Sized,
    ) -> None:
        self.bytes_max = bytes_max
        self._hot = hot
        self._journals = journals
        self._machine = machine
        self._committer = committer
        self._deadlines = deadlines
        self._state_bytes = 0
        # Bodies that are being split into messages.
        self.splitting_bytes = 0

    def weigh(self) -> None:
        """Look at what changes slowly; called once a batch."""
        machine, namespace = self._machine, self._machine.namespace
        self._state_bytes = (
            self._journals.bytes
            + STREAM_BYTES * max(0, namespace.resident_count() - len(self._hot))
            + CHANGE_BYTES * (len(namespace.changed) + len(namespace.captured))
            + REMOVAL_BYTES * (len(namespace.removed) + len(namespace.captured_removals))
            + PRODUCER_BYTES * len(namespace.producers)
            + BUCKET_BYTES * len(namespace.buckets)
            + DEADLINE_BYTES * len(self._deadlines)
            + machine.subscriptions.bytes
        )

    @property
    def used(self) -> int:
        self.weigh()
        return self._hot.bytes + self._committer.pending_bytes + self.splitting_bytes + self._state_bytes

    def has_room(self, size: int) -> bool:
        """Whether so many bytes more may be kept."""
        moving = self._hot.bytes + self._committer.pending_bytes + self.splitting_bytes
        if moving + self._state_bytes + size <= self.bytes_max:
            return True
        return self.used + size <= self.bytes_max

    @property
    def subscription_bytes_left(self) -> int:
        """How much more subscriptions may take."""
        return max(0, self.bytes_max // SUBSCRIPTIONS_SHARE - self._machine.subscriptions.bytes)

    def has_room_to_remove(self) -> bool:
        return self.used <= self.bytes_max + self.bytes_max // RESERVE_SHARE
