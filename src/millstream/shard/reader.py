"""Reading a stream: whole messages from an offset, across the seams between hot and cold and between a fork and its
sources.

Hot messages are there at once. For cold ones `read_cold` waits for their row groups; both choose messages by the same
rule, so a response is the same wherever its bytes lie.
"""

from __future__ import annotations

from typing import NamedTuple

from millstream.errors import Corrupt, InvalidRequest, Unavailable
from millstream.streams.machine import StateMachine
from millstream.streams.state import Stream
from millstream.tiers.catalog import FoundExtent
from millstream.tiers.cold import ColdTier
from millstream.tiers.hot import HotTail, HotTier


class ReadResult(NamedTuple):
    """`messages` of a byte stream may have been joined: only JSON streams and bootstrap need them apart."""

    messages: list[bytes]
    next_offset: int
    up_to_date: bool
    closed: bool


class ColdPiece(NamedTuple):
    """Messages beyond an offset and up to a bound, in one extent."""

    extent: FoundExtent
    offset: int
    bound: int


class Reader:
    def __init__(self, machine: StateMachine, hot: HotTier, cold: ColdTier) -> None:
        self._machine = machine
        self._hot = hot
        self._cold = cold

    def is_hot(self, stream: Stream, offset: int) -> bool:
        """Whether everything beyond an offset is in memory."""
        if offset >= stream.tail:
            return True
        owner, _ = self._owner(stream, offset)
        return owner is stream and self._is_hot_in(owner, offset)

    def _is_hot_in(self, owner: Stream, offset: int) -> bool:
        tail = self._hot.tails.get(owner.incarnation)
        return tail is not None and offset >= tail.start

    def read(self, stream: Stream, offset: int, bytes_max: int) -> ReadResult:
        """Hot messages beyond `offset`; an offset beyond the tail reads as the tail."""
        tail = stream.tail
        if offset >= tail:
            return ReadResult([], tail, True, stream.closed)
        run = self._hot.tails[stream.incarnation].read(offset, tail, bytes_max)
        return ReadResult(run.messages, run.end, run.end == tail, stream.closed and run.end == tail)

    async def read_cold(
        self, stream: Stream, offset: int, bytes_max: int, *, limit: int | None = None, apart: bool = False
    ) -> ReadResult:
        """The same, from wherever the messages are, up to `limit` if one is given."""
        messages: list[bytes] = []
        tail = stream.tail if limit is None else limit
        offset = min(offset, tail)
        joined = not apart and not stream.is_json
        while offset < tail:
            owner, bound = self._owner(stream, offset)
            bound = min(bound, tail)
            if self._is_hot_in(owner, offset):
                run = self._hot.tails[owner.incarnation].read(offset, bound, bytes_max, at_least_one=not messages)
            else:
                run = await self._cold.read(
                    owner.incarnation, offset, bound, bytes_max, at_least_one=not messages, joined=joined
                )
            if run.end <= offset:
                if messages:
                    break
                raise Corrupt(f"stream {stream.key} lacks its messages from offset {offset}")
            messages = messages + run.messages if messages else run.messages
            bytes_max -= run.end - run.start
            offset = run.end
            if bytes_max <= 0:
                break
        return ReadResult(messages, offset, offset == tail, stream.closed and offset == stream.tail)

    def cut(self, stream: Stream, offset: int, tail: int) -> list[list[bytes] | ColdPiece]:
        """Where everything between two offsets lies at this moment: hot messages themselves, cold ones by place.

        Whatever is trimmed or deleted later, `fetch` still finds it: cold objects outlive what refers to them.
        """
        pieces: list[list[bytes] | ColdPiece] = []
        while offset < tail:
            owner, bound = self._owner(stream, offset)
            bound = min(bound, tail)
            if self._is_hot_in(owner, offset):
                run = self._hot.tails[owner.incarnation].read(offset, bound, bound)
                pieces.append(run.messages)
                offset = run.end
            else:
                extent = self._cold.extent_at(owner.incarnation, offset)
                pieces.append(ColdPiece(extent, offset, bound))
                offset = min(extent.row.offset_end, bound)
        return pieces

    async def fetch(self, piece: list[bytes] | ColdPiece) -> list[bytes]:
        return piece if isinstance(piece, list) else await self._cold.messages(piece.extent, piece.offset, piece.bound)

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

    # -- boundaries ------------------------------------------------------------------------------------------

    async def warm(self, stream: Stream, offset: int) -> None:
        """Bring what decides about an offset into memory, so that the check itself need not wait."""
        if offset < stream.tail:
            owner, _ = self._owner(stream, offset)
            if not self._is_hot_in(owner, offset):
                await self._cold.rows_at(owner.incarnation, offset)

    def is_boundary(self, stream: Stream, offset: int) -> bool:
        """Whether a message starts or ends at an offset. Cold ones must have been warmed."""
        if offset == stream.tail or offset == 0:
            return True
        owner, _ = self._owner(stream, offset)
        if self._is_hot_in(owner, offset):
            return self._hot.tails[owner.incarnation].is_boundary(offset)
        rows = self._cold.cached_rows_at(owner.incarnation, offset)
        if rows is None:
            raise Unavailable("the messages at this offset are being fetched", code="cold_read_pending")
        if offset == rows.extent.offset_start:
            return True
        return offset in rows.group.ends[rows.first : rows.stop]

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
        """The messages that the next stored append wrote, as far as the source shows them."""
        if offset >= source.tail:
            return []
        owner, limit = self._owner(source, offset)
        visible = []
        for message in self._append_at(owner, offset):
            offset += len(message)
            if offset > limit:
                break
            visible.append(message)
        return visible

    def _append_at(self, owner: Stream, offset: int) -> list[bytes]:
        if self._is_hot_in(owner, offset):
            tail: HotTail = self._hot.tails[owner.incarnation]
            return tail.append_at(offset)
        rows = self._cold.cached_rows_at(owner.incarnation, offset)
        if rows is None:
            raise Unavailable("the messages at this offset are being fetched", code="cold_read_pending")
        group = rows.group
        first = next((row for row in range(rows.first, rows.stop) if group.ends[row] > offset), rows.stop)
        stop = first
        while stop < rows.stop and group.positions[stop] == group.positions[first] + (stop - first):
            stop += 1
        return group.messages(first, stop)


def _overshoots(size: int, unit: str) -> InvalidRequest:
    return InvalidRequest(
        f"Stream-Fork-Sub-Offset goes beyond the next append, which holds {size} {unit}", code="invalid_fork_offset"
    )
