"""Publishing: where the messages of a durable record become visible, at run time and in recovery alike."""

from __future__ import annotations

from millstream.protocol.offsets import START
from millstream.streams.machine import StateMachine
from millstream.streams.records import (
    AnyRecord,
    Appended,
    SnapshotPublished,
    StreamCreated,
    StreamDeleted,
    StreamTrimmed,
)
from millstream.streams.state import Stream
from millstream.tiers.hot import HotTier
from millstream.tiers.journal import Journals, Note
from millstream.units import Incarnation, Position


class Publisher:
    def __init__(self, machine: StateMachine, hot: HotTier, journals: Journals) -> None:
        self._machine = machine
        self._namespace = machine.namespace
        self._hot = hot
        self._journals = journals

    def publish(self, record: AnyRecord, position: Position) -> None:
        """Show what a record says to readers, if its stream is still there, and free what it let go."""
        if isinstance(record, Appended):
            stream = self._namespace.by_incarnation(record.stream)
            if stream is not None:
                self.appended(record, position, stream)
        elif isinstance(record, StreamCreated):
            stream = self._namespace.by_incarnation(Incarnation(position))
            if stream is not None:
                self._created(record, position, stream)
        elif isinstance(record, StreamDeleted):
            event = "expired" if record.expired else "deleted"
            note = Note(event, record.key.stream, record.at_ms, START, "")
            self._journals.add(record.key.bucket, position, record.stream, note)
        elif isinstance(record, SnapshotPublished):
            stream = self._namespace.by_incarnation(record.stream)
            if stream is not None:
                self._snapshot(record, position, stream)
        elif isinstance(record, StreamTrimmed):
            stream = self._namespace.by_incarnation(record.stream)
            if stream is not None:
                self.trim(stream)
        if self._machine.purged:
            self._free_purged()

    def appended(self, record: Appended, position: Position, stream: Stream) -> None:
        messages = record.messages
        if messages:
            self._hot.publish(stream, record.offset, position, record.at_ms, messages)
        if record.close:
            tail = record.offset + sum(map(len, messages))
            after = len(messages) + 1
            note = Note("closed", stream.key.stream, record.at_ms, tail, stream.content_type, after)
            self._journals.add(stream.key.bucket, position, record.stream, note)
        else:
            self._journals.add(stream.key.bucket, position, record.stream)

    def _created(self, record: StreamCreated, position: Position, stream: Stream) -> None:
        offset = record.fork.offset if record.fork is not None else START
        if record.messages:
            self._hot.publish(stream, offset, position, record.at_ms, record.messages)
        notes = [Note("created", record.stream, record.at_ms, offset, record.content_type)]
        if record.closed:
            tail = offset + sum(map(len, record.messages))
            notes.append(
                Note("closed", record.stream, record.at_ms, tail, record.content_type, len(record.messages) + 1)
            )
        self._journals.add(record.bucket, position, stream.incarnation, *notes)

    def _snapshot(self, record: SnapshotPublished, position: Position, stream: Stream) -> None:
        snapshot = record.snapshot
        note = Note("snapshot", stream.key.stream, record.at_ms, snapshot.offset, snapshot.content_type)
        self._journals.add(stream.key.bucket, position, record.stream, note)
        self.trim(stream)

    def trim(self, stream: Stream) -> None:
        """Free the messages nobody may read any more. Forks may: they see what their source had."""
        if stream.earliest and not stream.forks:
            self._hot.trim(stream, stream.earliest)

    def _free_purged(self) -> None:
        for stream in self._machine.take_purged():
            self._hot.purge(stream)
            if stream.fork is not None:
                source = self._namespace.by_incarnation(stream.fork.source)
                if source is not None:
                    self.trim(source)
