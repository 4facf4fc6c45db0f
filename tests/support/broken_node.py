"""A node that is wrong on purpose: it goes on answering as the leader when its lease has ended.

Started like `millstream serve`, to show that the tests would notice.
"""

from __future__ import annotations

import sys
from typing import Any

from millstream.cli.main import main
from millstream.cluster.membership import Membership
from millstream.cluster.replica import Replica


def break_leases() -> None:
    membership: Any = Membership
    replica: Any = Replica
    taken: set[int] = set()
    take_one = membership._take_one

    async def take_and_keep(self: Any, shard: int, seen: Any) -> None:
        await take_one(self, shard, seen)
        taken.update(self._held)

    membership._take_one = take_and_keep
    membership.holds = lambda self, shard: shard in taken
    membership.is_kept = lambda self, shard: shard in taken
    membership.generation = lambda self, shard: 1 if shard in taken else 0
    replica.membership_changed = lambda self: (
        None if self.role == "leading" else self._link.loop.call_soon_threadsafe(self._tail.wake)
    )


if __name__ == "__main__":
    break_leases()
    sys.exit(main(sys.argv[1:]))
