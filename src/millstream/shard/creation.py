"""Creating a stream: alone on its name, and with a look at the source if it is a fork.

What lies at a fork's point may have to be fetched from the cold tier first, and a snapshot that the fork inherits is
copied; names are not held meanwhile, so that what has changed by then makes it start over.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from millstream.errors import MillstreamError
from millstream.shard.budget import STREAM_BYTES
from millstream.shard.committer import Reply
from millstream.shard.reader import Survey
from millstream.streams.commands import Created, CreateStream
from millstream.streams.records import AnyRecord, StreamCreated
from millstream.streams.state import Stream
from millstream.tiers.hot import MESSAGE_COST_BYTES

if TYPE_CHECKING:
    from millstream.shard.shard import Shard

START_OVER: Final = object()


class Creation:
    def __init__(self, shard: Shard) -> None:
        self._shard = shard

    def create(self, command: CreateStream, reply: Reply) -> None:
        """Create a stream, or find that it exists as asked; the reply gets a Created or an error."""
        again = partial(self.create, command, reply)
        if any(self._shard.names.wait_for(name, again) for name in self._other_names(command)):
            return
        source = self._shard.namespace.find(command.fork.source) if command.fork is not None else None
        if command.fork is None or source is None:
            self._create_surveyed(command, reply, Survey(True, []))
            return
        offset = source.tail if command.fork.offset is None else command.fork.offset
        survey = self._shard.reader.survey_hot(source, offset) if offset >= source.earliest else Survey(False, [])
        if survey is not None:
            self._create_surveyed(command, reply, survey)
        else:
            surveyed = partial(self._reply_if_failed, reply)
            self._shard.errand(self._survey_and_create(command, reply, source, offset), surveyed)

    @staticmethod
    def _reply_if_failed(reply: Reply, error: MillstreamError | None) -> None:
        if error is not None:
            reply(error)

    async def _survey_and_create(self, command: CreateStream, reply: Reply, source: Stream, offset: int) -> None:
        self._create_surveyed(command, reply, await self._shard.reader.survey(source, offset))

    def _create_surveyed(self, command: CreateStream, reply: Reply, survey: Survey) -> None:
        """Create, knowing what lies at the fork point; messages never change, so that stays true."""

        def finish(outcome: object) -> None:
            if outcome is START_OVER:
                self.create(command, reply)
            else:
                reply(outcome)

        self._shard.alone(command.key, partial(self._create, command, survey), finish)

    @staticmethod
    def _other_names(command: CreateStream) -> list[Hashable]:
        """What else a creation depends on: its bucket, and the source of a fork with its snapshot."""
        names: list[Hashable] = [("bucket", command.key.bucket)]
        if command.fork is not None and command.fork.source != command.key:
            names += [command.fork.source, ("snapshot", str(command.fork.source))]
        return names

    def _must_wait(self, command: CreateStream) -> bool:
        """Whether something is happening to a name the creation depends on. It then starts over, holding nothing:
        two that waited for each other's names while holding their own would wait for ever."""
        return any(self._shard.names.is_held(name) for name in self._other_names(command))

    def _create(self, command: CreateStream, survey: Survey, reply: Reply) -> None:
        if self._must_wait(command):
            reply(START_OVER)
            return
        now_ms = self._shard.clock.now_ms()
        resolve_fork = partial(self._shard.reader.resolve_fork, survey=survey)
        records, existing = self._shard.checks.check_create(command, now_ms, resolve_fork)
        if existing is not None:
            reply(existing)
            return
        created = records[-1]
        assert isinstance(created, StreamCreated)
        size = len(command.body) + MESSAGE_COST_BYTES * len(created.messages) + STREAM_BYTES
        if not self._shard.budget.has_room(size):
            raise self._shard.backpressure()
        if created.snapshot is not None:
            # A fork's snapshot is a blob of its own, so neither stream can take the other's away.
            self._copy_snapshot(command, created, partial(self._submit_created, command, records[:-1], reply), reply)
        else:
            self._submit_created(command, records[:-1], reply, created)

    def _copy_snapshot(
        self, command: CreateStream, created: StreamCreated, then: Callable[[StreamCreated], None], reply: Reply
    ) -> None:
        assert created.snapshot is not None and created.fork is not None
        source = created.fork.source
        name = self._shard.blobs.new_name(command.key, created.snapshot.offset, self._shard.clock.random_bytes(8))
        copied = msgspec.structs.replace(created, snapshot=msgspec.structs.replace(created.snapshot, blob=name))

        def finished(error: MillstreamError | None) -> None:
            try:
                if error is not None:
                    raise error
                origin = self._shard.namespace.by_incarnation(source)
                if self._must_wait(command) or origin is None or origin.snapshot != created.snapshot:
                    self._shard.errand(self._shard.blobs.delete(name))
                    reply(START_OVER)
                else:
                    then(copied)
            except MillstreamError as refusal:
                reply(refusal)

        self._shard.errand(self._shard.blobs.copy(created.snapshot.blob, name), finished)

    def _submit_created(
        self, command: CreateStream, before: Sequence[AnyRecord], reply: Reply, created: StreamCreated
    ) -> None:
        for record in before:
            self._shard.submit(record)

        def answer(outcome: object) -> None:
            if created.snapshot is not None:
                self._shard.blobs.settled(created.snapshot.blob)
            if isinstance(outcome, MillstreamError):
                reply(outcome)
                return
            stream = self._shard.namespace.find(command.key)
            assert stream is not None
            reply(Created(True, stream.incarnation, stream.content_type, stream.tail, stream.closed))

        self._shard.submit(created, answer)
