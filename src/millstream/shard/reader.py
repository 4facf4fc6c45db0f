"""Reading a stream: whole messages from an offset, across the seams between hot and cold and between a fork and its
sources.

Hot messages are there at once. For cold ones `read_cold` waits for their row groups; both choose messages by the same
rule, so a response is the same wherever its bytes lie.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import Final, NamedTuple

from millstream.errors import Corrupt, InvalidRequest
from millstream.streams.machine import StateMachine
from millstream.streams.state import Stream
from millstream.tiers.catalog_rows import FoundExtent
from millstream.tiers.cold import ColdTier
from millstream.tiers.hot import HotTail, HotTier, Messages
from millstream.units import Milliseconds, Offset

EXTENTS_LOOKED_AT_MAX: Final = 10_000


class ReadResult(NamedTuple):
    """Consecutive messages for a response. A piece is one message or several joined, by commas if they are JSON: what a
    response joins from the pieces is the same either way."""

    pieces: Messages
    next_offset: Offset
    up_to_date: bool
    closed: bool


class MessagesResult(NamedTuple):
    """The same for whoever needs each message by itself."""

    messages: Messages
    next_offset: Offset
    up_to_date: bool
    closed: bool


class Survey(NamedTuple):
    """What lies at an offset: whether a message ends or starts there, and the messages of the append that follows."""

    is_boundary: bool
    append: list[bytes]


class ColdPiece(NamedTuple):
    """Messages beyond an offset and up to a bound, in one extent."""

    extent: FoundExtent
    offset: Offset
    bound: Offset


class Reader:
    def __init__(self, machine: StateMachine, hot: HotTier, cold: ColdTier) -> None:
        self._machine = machine
        self._hot = hot
        self._cold = cold

    def is_hot(self, stream: Stream, offset: Offset) -> bool:
        """Whether everything beyond an offset is in memory."""
        if offset >= stream.tail:
            return True
        owner, _ = self._owner(stream, offset)
        return owner is stream and self._tail_at(owner, offset) is not None

    def _tail_at(self, owner: Stream, offset: Offset) -> HotTail | None:
        """What of a stream is in memory, if that holds everything beyond an offset."""
        tail = self._hot.tail(owner)
        return tail if tail is not None and offset >= tail.start else None

    def _behind_gap(self, owner: Stream, offset: Offset) -> Offset | None:
        """Where reading goes on if a record that wrote what comes next was set aside, and what follows it is in memory.

        Elsewhere a gap needs no thought: both tiers look for the first message that ends beyond an offset.
        """
        tail = self._hot.tail(owner) if self._machine.has_gaps else None
        if tail is None or offset >= tail.start or self._cold.holds(owner.incarnation, offset):
            return None
        return tail.start

    def read(self, stream: Stream, offset: Offset, bytes_max: int) -> ReadResult:
        """Hot messages beyond `offset`; an offset beyond the tail reads as the tail."""
        tail = stream.tail
        if offset >= tail:
            return ReadResult([], tail, True, stream.closed)
        hot = self._hot.tail(stream)
        assert hot is not None, "only what is in memory is read here"
        run = hot.read(offset, tail, bytes_max)
        return ReadResult(run.messages, run.end, run.end == tail, stream.closed and run.end == tail)

    async def read_cold(self, stream: Stream, offset: Offset, bytes_max: int) -> ReadResult:
        """The same, from wherever the messages are."""
        tail = stream.tail
        pieces, end = await self._gather(stream, offset, tail, bytes_max, b"," if stream.is_json else b"")
        return ReadResult(pieces, end, end == tail, stream.closed and end == stream.tail)

    async def read_messages(self, stream: Stream, offset: Offset, bytes_max: int) -> MessagesResult:
        """The messages that `read_cold` reads, each by itself."""
        tail = stream.tail
        messages, end = await self._gather(stream, offset, tail, bytes_max, None)
        return MessagesResult(messages, end, end == tail, stream.closed and end == stream.tail)

    async def _gather(
        self, stream: Stream, offset: Offset, tail: Offset, bytes_max: int, separator: bytes | None
    ) -> tuple[Messages, Offset]:
        """What lies between an offset and the tail as of now, and where that ends; with a separator, cold messages that
        lie together are joined by it."""
        pieces: list[bytes | memoryview] = []
        offset = min(offset, tail)
        owners = self._owners(stream, offset) if offset < tail else []
        while offset < tail:
            owner, bound = _owner_at(owners, offset)
            bound = min(bound, tail)
            hot = self._tail_at(owner, offset)
            if hot is not None:
                run = hot.read(offset, bound, bytes_max, at_least_one=not pieces)
            elif (behind := self._behind_gap(owner, offset)) is not None:
                offset = min(behind, bound)
                continue
            else:
                run = await self._cold.read(
                    owner.incarnation, offset, bound, bytes_max, at_least_one=not pieces, separator=separator
                )
            if run.end <= offset:
                if pieces:
                    break
                raise Corrupt(f"stream {stream.key} lacks its messages from offset {offset}")
            pieces += run.messages
            bytes_max -= run.end - run.start
            offset = run.end
            if bytes_max <= 0:
                break
        return pieces, offset

    def cut(self, stream: Stream, offset: Offset, tail: Offset) -> list[Messages | ColdPiece]:
        """Where everything between two offsets lies at this moment: hot messages themselves, cold ones by place.

        Whatever is trimmed or deleted later, `fetch` still finds it: cold objects outlive what refers to them.
        """
        pieces: list[Messages | ColdPiece] = []
        owners = self._owners(stream, offset) if offset < tail else []
        while offset < tail:
            owner, bound = _owner_at(owners, offset)
            bound = min(bound, tail)
            hot = self._tail_at(owner, offset)
            if hot is not None:
                run = hot.read(offset, bound, bound)
                pieces.append(run.messages)
                offset = run.end
            elif (behind := self._behind_gap(owner, offset)) is not None:
                offset = min(behind, bound)
            else:
                extent = self._cold.extent_at(owner.incarnation, offset)
                pieces.append(ColdPiece(extent, offset, bound))
                offset = min(extent.row.offset_end, bound)
        return pieces

    async def fetch(self, piece: Messages | ColdPiece) -> Messages:
        if isinstance(piece, ColdPiece):
            return await self._cold.messages(piece.extent, piece.offset, piece.bound)
        return piece

    def _owner(self, stream: Stream, offset: Offset) -> tuple[Stream, Offset]:
        """Whose message comes next after this offset, and up to where that one's messages count."""
        return self._owners(stream, offset)[-1]

    def _owners(self, stream: Stream, offset: Offset) -> list[tuple[Stream, Offset]]:
        """Whose messages a read from this offset meets, the last one first: a stream, its source, that one's source
        and so on, each with up to where its messages count. Made once for each read: a chain may be long."""
        owner, limit = stream, stream.tail
        owners = [(owner, limit)]
        while owner.fork is not None and offset < owner.fork.offset:
            limit = min(limit, owner.fork.offset)
            source = self._machine.namespace.by_incarnation(owner.fork.source)
            if source is None:
                raise Corrupt(f"the source of stream {stream.key} is missing")
            owner = source
            owners.append((owner, limit))
        return owners

    # -- boundaries ------------------------------------------------------------------------------------------

    def survey_hot(self, stream: Stream, offset: Offset) -> Survey | None:
        """What lies at an offset, if that can be told from memory."""
        if offset >= stream.tail:
            return Survey(offset == stream.tail, [])
        owner, bound = self._owner(stream, offset)
        tail = self._tail_at(owner, offset)
        if tail is None:
            return None
        return Survey(tail.is_boundary(offset), _up_to(tail.append_at(offset), offset, bound))

    async def survey(self, stream: Stream, offset: Offset) -> Survey:
        """What lies at an offset, wherever it is. An append may go on from one row group to the next."""
        survey = self.survey_hot(stream, offset)
        if survey is not None:
            return survey
        owner, bound = self._owner(stream, offset)
        rows = await self._cold.rows_at(owner.incarnation, offset, with_order=True)
        is_boundary = offset == rows.extent.offset_start or offset in rows.group.ends[rows.first : rows.stop]
        first = bisect_right(rows.group.ends, offset, rows.first, rows.stop)
        position = rows.group.positions[first]
        messages: list[bytes] = []
        while True:
            stop = first
            while stop < rows.stop and rows.group.positions[stop] == position:
                stop, position = stop + 1, position + 1
            messages += rows.group.messages(first, stop)
            end = Offset(rows.group.ends[rows.stop - 1])
            if stop < rows.stop or end >= bound or self._tail_at(owner, end) is not None:
                return Survey(is_boundary, _up_to(messages, offset, bound))
            rows = await self._cold.rows_at(owner.incarnation, end, with_order=True)
            first = rows.first

    def hot_boundary(self, stream: Stream, offset: Offset) -> Offset:
        """The last boundary up to an offset, among what is in memory; the earliest offset if none of it is."""
        tail = self._hot.tail(stream)
        return stream.earliest if tail is None else tail.message_start(bisect_right(tail.ends, offset))

    def oldest_since(self, stream: Stream, at_ms: Milliseconds, limit: Offset) -> Offset:
        """A boundary up to `limit` before which all messages are older than a time. Of cold ones only the time of
        their segment is known, so some older ones may lie behind it. What a fork shares with its source stays."""
        offset = stream.earliest
        for _ in range(EXTENTS_LOOKED_AT_MAX):
            if offset >= limit:
                return limit
            owner, _ = self._owner(stream, offset)
            if owner is not stream:
                break
            tail = self._tail_at(stream, offset)
            if tail is not None:
                first = bisect_left(tail.times, at_ms, bisect_right(tail.ends, offset))
                return min(tail.message_start(first), limit)
            extent = self._cold.extent_at(stream.incarnation, offset)
            if self._cold.last_at_ms(extent) >= at_ms:
                break
            offset = extent.row.offset_end
        return offset

    def resolve_fork(
        self, source: Stream, offset: Offset, sub_offset: int, survey: Survey
    ) -> tuple[Offset, list[bytes]]:
        """The boundary a fork shares its source up to, and the message that starts it if one is cut in two.

        A sub-offset counts inside the next stored append: messages for JSON, bytes otherwise.
        """
        if offset > source.tail:
            raise InvalidRequest("Stream-Fork-Offset lies beyond the source's tail", code="invalid_fork_offset")
        if not survey.is_boundary:
            raise InvalidRequest("Stream-Fork-Offset is not a message boundary", code="invalid_fork_offset")
        if sub_offset == 0:
            return offset, []
        messages = survey.append
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


def _owner_at(owners: list[tuple[Stream, Offset]], offset: Offset) -> tuple[Stream, Offset]:
    """The owner at an offset that lies before the stream's tail; those that end before it are done with."""
    while len(owners) > 1 and owners[-1][1] <= offset:
        owners.pop()
    return owners[-1]


def _up_to(messages: list[bytes], offset: Offset, bound: Offset) -> list[bytes]:
    """The messages that end by a bound: a fork may show only the beginning of its source's append."""
    visible = []
    for message in messages:
        offset += len(message)
        if offset > bound:
            break
        visible.append(message)
    return visible


def _overshoots(size: int, unit: str) -> InvalidRequest:
    return InvalidRequest(
        f"Stream-Fork-Sub-Offset goes beyond the next append, which holds {size} {unit}", code="invalid_fork_offset"
    )
