"""The shards of a cluster on this node: a replica of each, with the handlers over it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from millstream.cluster.replica import Replica
from millstream.server.api.handlers import Handlers
from millstream.streams.subscriptions import Subscription


class LocalShard:
    """A shard on this node. Replica and handlers are replaced together when the shard is restored."""

    def __init__(self, replica: Replica, handlers: Handlers) -> None:
        self.replica = replica
        self.handlers = handlers
        self.is_open = True


class AllReaders:
    """The live reads of every shard."""

    def __init__(self, shards: Sequence[LocalShard]) -> None:
        self._shards = shards

    def end_all(self) -> None:
        for local in self._shards:
            local.handlers.readers.end_all()


class AllSubscriptions(Mapping[str, Subscription]):
    """The subscriptions of every shard, by name."""

    def __init__(self, shards: Sequence[LocalShard]) -> None:
        self._shards = shards

    def __getitem__(self, name: str) -> Subscription:
        for local in self._shards:
            found = local.replica.shard.machine.subscriptions.by_id.get(name)
            if found is not None:
                return found
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return (name for local in self._shards for name in local.replica.shard.machine.subscriptions.by_id)

    def __len__(self) -> int:
        return sum(len(local.replica.shard.machine.subscriptions.by_id) for local in self._shards)
