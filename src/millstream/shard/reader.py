"""Reading a stream: whole messages from an offset, across the seams between a fork and its sources."""

from __future__ import annotations

from typing import NamedTuple

from millstream.errors import Corrupt, InvalidRequest
from millstream.streams.machine import StateMachine
from millstream.streams.state import Stream
from millstream.tiers.hot import HotTail, HotTier


class ReadResult(NamedTuple):
    messages: list[bytes]
    next_offset: int
    up_to_date: bool
    closed: bool


class Reader:
    def __init__(self, machine: StateMachine, hot: HotTier) -> None:
        self._machine = machine
        self._hot = hot

    def read(self, stream: Stream, offset: int, bytes_max: int) -> ReadResult:
        """Messages beyond `offset`, about `bytes_max` of them but at least one if there is one.

        An offset beyond the tail reads as the tail.
        """
        messages: list[bytes] = []
        tail = stream.tail
        offset = min(offset, tail)
        while offset < tail and bytes_max > 0:
            owner, limit = self._owner(stream, offset)
            run = self._tail(owner).read(offset, limit, bytes_max)
            if run.end <= offset:
                raise Corrupt(f"stream {stream.key} lacks its messages from offset {offset}")
            messages = run.messages if not messages else messages + run.messages
            bytes_max -= run.end - run.start
            offset = run.end
        return ReadResult(messages, offset, offset == tail, stream.closed and offset == tail)

    def _tail(self, owner: Stream) -> HotTail:
        return self._hot.tails.get(owner.incarnation) or HotTail(owner.tail)

    def _owner(self, stream: Stream, offset: int) -> tuple[Stream, int]:
        """Whose message comes next after this offset, and up to where that one's messages count."""
        owner, limit = stream, stream.tail
        while owner.fork is not None and offset < owner.fork.offset:
            limit = min(limit, owner.fork.offset)
            source = self._machine.by_incarnation(owner.fork.source)
            if source is None:
                raise Corrupt(f"the source of stream {stream.key} is missing")
            owner = source
        return owner, limit

    def is_boundary(self, stream: Stream, offset: int) -> bool:
        if offset == stream.tail:
            return True
        owner, _ = self._owner(stream, offset)
        return self._tail(owner).is_boundary(offset)

    def resolve_fork(self, source: Stream, offset: int, sub_offset: int) -> tuple[int, list[bytes]]:
        """The boundary a fork shares its source up to, and the message that starts it if one is cut in two.

        A sub-offset counts inside the next stored append: messages for JSON, bytes otherwise.
        """
        if offset > source.tail:
            raise InvalidRequest("Stream-Fork-Offset lies beyond the source's tail", code="invalid_fork_offset")
        if not self.is_boundary(source, offset):
            raise InvalidRequest("Stream-Fork-Offset is not a message boundary", code="invalid_fork_offset")
        if sub_offset == 0:
            return offset, []
        messages = self._next_append(source, offset)
        if source.is_json:
            if sub_offset > len(messages):
                raise _overshoots(len(messages), "messages")
            return offset + sum(map(len, messages[:sub_offset])), []
        size = len(messages[0]) if messages else 0
        if sub_offset > size:
            raise _overshoots(size, "bytes")
        if sub_offset == size:
            return offset + size, []
        return offset, [messages[0][:sub_offset]]

    def _next_append(self, source: Stream, offset: int) -> list[bytes]:
        if offset >= source.tail:
            return []
        owner, limit = self._owner(source, offset)
        visible = []
        for message in self._tail(owner).append_at(offset):
            offset += len(message)
            if offset > limit:
                break
            visible.append(message)
        return visible


def _overshoots(size: int, unit: str) -> InvalidRequest:
    return InvalidRequest(
        f"Stream-Fork-Sub-Offset goes beyond the next append, which holds {size} {unit}",
        code="invalid_fork_offset",
    )
