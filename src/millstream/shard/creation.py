"""Creating a stream: with its name to itself, and with a look at the source if it is a fork.

What lies at a fork's point may have to be fetched from the cold tier first, and a snapshot that the fork inherits is
copied; the source's name is not held meanwhile, so what has changed by then makes the creation start over.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from millstream.pending import Pending
from millstream.shard.budget import STREAM_BYTES
from millstream.shard.reader import Survey
from millstream.streams.commands import Created, CreateStream
from millstream.streams.records import AnyRecord, StreamCreated
from millstream.tiers.hot import MESSAGE_COST_BYTES

if TYPE_CHECKING:
    from millstream.shard.shard import Shard

NOTHING_TO_SURVEY = Survey(True, [])
BEFORE_WHAT_IS_KEPT = Survey(False, [])


class Creation:
    def __init__(self, shard: Shard) -> None:
        self._shard = shard

    def create(self, command: CreateStream) -> Pending[Created]:
        """Create a stream, or find that it exists as asked."""
        held = self._held_name(command)
        if held is not None:
            return self._shard.names.wait_for(held, partial(self.create, command))
        return self._survey(command).then(partial(self._create_surveyed, command))

    def _survey(self, command: CreateStream) -> Pending[Survey]:
        """What lies at the point of a fork; messages never change, so it stays true."""
        source = self._shard.namespace.find(command.fork.source) if command.fork is not None else None
        if command.fork is None or source is None:
            return Pending.settled(NOTHING_TO_SURVEY)
        offset = source.tail if command.fork.offset is None else command.fork.offset
        if offset < source.earliest:
            return Pending.settled(BEFORE_WHAT_IS_KEPT)
        survey = self._shard.reader.survey_hot(source, offset)
        if survey is not None:
            return Pending.settled(survey)
        return self._shard.background.run(self._shard.reader.survey(source, offset))

    def _create_surveyed(self, command: CreateStream, survey: Survey) -> Pending[Created]:
        def finish(created: Created | None) -> Created | Pending[Created]:
            return created if created is not None else self.create(command)

        return self._shard.exclusively(command.key, partial(self._create, command, survey)).then(finish)

    @staticmethod
    def _other_names(command: CreateStream) -> list[Hashable]:
        """What else a creation depends on: its bucket, and the source of a fork with its snapshot."""
        names: list[Hashable] = [("bucket", command.key.bucket)]
        if command.fork is not None and command.fork.source != command.key:
            names += [command.fork.source, ("snapshot", str(command.fork.source))]
        return names

    def _held_name(self, command: CreateStream) -> Hashable | None:
        """A name that the creation depends on and that somebody else holds. It then starts over, holding nothing:
        two that waited for each other's names while holding their own would wait for ever."""
        return next((name for name in self._other_names(command) if self._shard.names.is_held(name)), None)

    def _create(self, command: CreateStream, survey: Survey) -> Pending[Created | None]:
        """Create the stream, holding its name; None if it has to start over."""
        if self._held_name(command) is not None:
            return Pending.settled(None)
        now_ms = self._shard.clock.now_ms()
        resolve_fork = partial(self._shard.reader.resolve_fork, survey=survey)
        records, existing = self._shard.checks.check_create(command, now_ms, resolve_fork)
        if existing is not None:
            return Pending.settled(existing)
        created = records[-1]
        assert isinstance(created, StreamCreated)
        size = len(command.body) + MESSAGE_COST_BYTES * len(created.messages) + STREAM_BYTES
        if not self._shard.budget.has_room(size):
            raise self._shard.backpressure()
        if created.snapshot is not None:
            return self._shard.background.run(self._create_with_snapshot(command, records[:-1], created))
        return self._submit(command, records[:-1], created)

    async def _create_with_snapshot(
        self, command: CreateStream, before: Sequence[AnyRecord], created: StreamCreated
    ) -> Created | None:
        """Give the fork a copy of the snapshot that it inherits, so neither stream can take the other's away."""
        assert created.snapshot is not None and created.fork is not None
        shard = self._shard
        name = shard.blobs.new_name(command.key, created.snapshot.offset, shard.clock.random_bytes(8))
        await shard.blobs.copy(created.snapshot.blob, name)
        source = shard.namespace.by_incarnation(created.fork.source)
        if self._held_name(command) is not None or source is None or source.snapshot != created.snapshot:
            shard.delete_blob(name)
            return None
        snapshot = msgspec.structs.replace(created.snapshot, blob=name)
        try:
            return await self._submit(command, before, msgspec.structs.replace(created, snapshot=snapshot))
        finally:
            shard.blobs.settled(name)

    def _submit(
        self, command: CreateStream, before: Sequence[AnyRecord], created: StreamCreated
    ) -> Pending[Created | None]:
        for record in before:
            self._shard.committer.submit(record)

        def describe(_: None) -> Created:
            stream = self._shard.namespace.find(command.key)
            assert stream is not None
            return Created(True, stream.incarnation, stream.content_type, stream.tail, stream.closed)

        return self._shard.committer.commit(created).then(describe)
