"""A node that is wrong on purpose: an append of `poison` becomes a record that no node can apply.

Started like `millstream serve`, to show what all of them do then.
"""

from __future__ import annotations

import sys
from typing import Any

from millstream.cli.main import main
from millstream.shard.shard import Shard
from millstream.streams.records import Appended
from millstream.units import Offset


def poison_appends() -> None:
    shard: Any = Shard
    append = shard.append

    def append_or_poison(self: Any, command: Any) -> Any:
        if command.body != b"poison":
            return append(self, command)
        stream = self.namespace.get(command.key, self.clock.now_ms())
        return self.committer.commit(Appended(stream.incarnation, Offset(0), self.clock.now_ms(), [command.body]))

    shard.append = append_or_poison


if __name__ == "__main__":
    poison_appends()
    sys.exit(main(sys.argv[1:]))
