"""The hot tier: the messages that are in memory, by stream.

What it has of a stream hangs on the stream itself (`Stream.hot`): where there are very many, every further table to
look one up in is one more place in memory that no cache holds.

Messages are kept whole, in offset order, with where each ends, its position and its time in flat arrays beside
them: 65 bytes of overhead a message. Reads find their start by bisection and hand out the stored objects, so a
byte is copied only when a response is joined.

What the cold tier does not have yet is kept a second time, as columns in the order of the log: a flush of very many
streams then goes through a few long arrays, and not through every stream's own, each of which lies somewhere else.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Final, NamedTuple

import msgspec

from millstream.streams.state import Stream
from millstream.units import Column, Incarnation, Milliseconds, Offset, Position

# What a message costs beyond its payload: the bytes object, its slot, and three array entries.
MESSAGE_OVERHEAD_BYTES: Final = 65
# The same for the columns of what is not cold yet: five array entries and a slot.
UNFLUSHED_OVERHEAD_BYTES: Final = 48
# What an accepted message costs beyond its payload until it is cold.
MESSAGE_COST_BYTES: Final = MESSAGE_OVERHEAD_BYTES + UNFLUSHED_OVERHEAD_BYTES
# What a stream with a tail of one message costs beyond the message: two thirds are the state of the stream, which stays
# in memory as long as the tail. Then what a whole tail costs more.
STREAM_OVERHEAD_BYTES: Final = 900
TAIL_OVERHEAD_BYTES: Final = 350
# What is held of a stream that is gone, as long as messages of it wait for a flush: its state, and a note of that.
GONE_OVERHEAD_BYTES: Final = 700


Messages = Sequence[bytes | memoryview]


class Run(NamedTuple):
    """Consecutive whole messages of one stream: they start at `start` and end at `end`."""

    start: Offset
    end: Offset
    messages: Messages


def select(
    ends: Sequence[int],
    start: Offset,
    low: int,
    high: int,
    offset: Offset,
    limit: Offset,
    bytes_max: int,
    at_least_one: bool,
) -> tuple[int, int]:
    """Which of the messages `low` to `high` one read takes: the same rule in every tier, so chunks never differ.

    Whole messages whose end lies beyond `offset`, as many as fit into `bytes_max` and end by `limit`; the first is
    taken even if it is larger, when `at_least_one` is asked for. `start` is where message `low` starts.
    """
    first = bisect_right(ends, offset, low, high)
    begin = ends[first - 1] if first > low else start
    stop = bisect_right(ends, min(limit, begin + bytes_max), first, high)
    if stop == first and at_least_one and first < high and ends[first] <= limit:
        stop += 1
    return first, stop


class HotTail(msgspec.Struct, gc=False, eq=False):
    """The messages of one incarnation that are in memory, from `start` on."""

    start: Offset
    messages: list[bytes]
    ends: Column[Offset]
    positions: Column[Position]
    times: Column[Milliseconds]

    def read(self, offset: Offset, limit: Offset, bytes_max: int, *, at_least_one: bool = True) -> Run:
        """The whole messages whose end lies beyond `offset`, up to `limit` and `bytes_max`."""
        first, stop = select(self.ends, self.start, 0, len(self.ends), offset, limit, bytes_max, at_least_one)
        start = self.message_start(first)
        return Run(start, self.ends[stop - 1] if stop > first else start, self.messages[first:stop])

    def is_boundary(self, offset: Offset) -> bool:
        if offset == self.start:
            return True
        index = bisect_right(self.ends, offset)
        return index > 0 and self.ends[index - 1] == offset

    def append_at(self, offset: Offset) -> list[bytes]:
        """The messages, from this boundary on, that one append wrote: their positions are consecutive."""
        first = bisect_right(self.ends, offset)
        if first == len(self.ends):
            return []
        written = self.written_by(Position(self.positions[first] - 1))
        return self.messages[written.start : written.stop]

    def written_by(self, position: Position) -> range:
        """The indexes of the messages that the record at this position wrote."""
        first = stop = bisect_right(self.positions, position)
        while stop < len(self.positions) and self.positions[stop] == position + 1 + (stop - first):
            stop += 1
        return range(first, stop)

    def message_start(self, index: int) -> Offset:
        return self.ends[index - 1] if index else self.start


class LoneTail(msgspec.Struct, gc=False, eq=False):
    """A tail of one message. Where there are very many tails most are like that; it is made in a fifth of the time."""

    start: Offset
    end: Offset
    position: Position
    at_ms: Milliseconds
    message: bytes

    def whole(self) -> HotTail:
        ends: Column[Offset] = Column("q", (self.end,))
        positions: Column[Position] = Column("q", (self.position,))
        times: Column[Milliseconds] = Column("q", (self.at_ms,))
        return HotTail(self.start, [self.message], ends, positions, times)


class Unflushed:
    """Messages that the cold tier does not have yet, as columns in the order of the log; and whose they are, each
    stream at least once."""

    __slots__ = ("bytes", "ends", "incarnations", "messages", "positions", "starts", "streams", "times")

    def __init__(self) -> None:
        self.incarnations: Column[Incarnation] = Column("q")
        self.starts: Column[Offset] = Column("q")
        self.ends: Column[Offset] = Column("q")
        self.positions: Column[Position] = Column("q")
        self.times: Column[Milliseconds] = Column("q")
        self.messages: list[bytes] = []
        self.streams: list[Stream] = []
        self.bytes = 0

    def __len__(self) -> int:
        return len(self.positions)

    def since(self, position: Position) -> Unflushed:
        """The messages from a position on."""
        first, rest = bisect_left(self.positions, position), Unflushed()
        rest.incarnations = self.incarnations[first:]
        rest.starts = self.starts[first:]
        rest.ends = self.ends[first:]
        rest.positions = self.positions[first:]
        rest.times = self.times[first:]
        rest.messages = self.messages[first:]
        rest.streams = self.streams if rest.messages else []
        rest.bytes = sum(map(len, rest.messages))
        return rest

    def extend(self, later: Unflushed) -> None:
        self.incarnations += later.incarnations
        self.starts += later.starts
        self.ends += later.ends
        self.positions += later.positions
        self.times += later.times
        self.messages += later.messages
        self.streams += later.streams
        self.bytes += later.bytes


class HotTier:
    """All hot tails of a shard and what they cost together."""

    def __init__(self) -> None:
        self._streams = 0
        self.bytes = 0
        self.unflushed = Unflushed()
        # The last position that was captured to be flushed.
        self._captured_through = Position(0)
        self._captured_bytes = 0
        # Messages that were trimmed or deleted before they were cold stay in the columns until a flush has passed them:
        # the position of the last of each stream's, and what they take. Everything before `_cold_before` was passed.
        self._waiting: list[tuple[Position, int]] = []
        self._cold_before = Position(0)
        # All that was ever published here.
        self.published_bytes = 0
        self.published_messages = 0

    def __len__(self) -> int:
        """How many streams have messages here."""
        return self._streams

    def tail(self, stream: Stream) -> HotTail | None:
        """The messages of a stream that are here, if there are any. One that is looked at becomes whole."""
        tail: HotTail | LoneTail | None = stream.hot
        return self._whole(stream, tail) if isinstance(tail, LoneTail) else tail

    @staticmethod
    def bytes_of(stream: Stream) -> int:
        """What the messages of a stream take here, beside what any stream takes."""
        tail: HotTail | LoneTail | None = stream.hot
        if tail is None:
            return 0
        if isinstance(tail, LoneTail):
            return tail.end - tail.start + MESSAGE_OVERHEAD_BYTES
        return (tail.ends[-1] - tail.start if tail.ends else 0) + MESSAGE_OVERHEAD_BYTES * len(tail.ends)

    def _whole(self, stream: Stream, lone: LoneTail) -> HotTail:
        tail = stream.hot = lone.whole()
        self.bytes += TAIL_OVERHEAD_BYTES
        return tail

    def publish(
        self, stream: Stream, offset: Offset, position: Position, at_ms: Milliseconds, messages: list[bytes]
    ) -> None:
        """Add the messages of the record at `position`; the first one starts at `offset`."""
        unflushed, count, incarnation = self.unflushed, len(messages), stream.incarnation
        tail: HotTail | LoneTail | None = stream.hot
        if tail is None:
            self._streams += 1
            self.bytes += STREAM_OVERHEAD_BYTES
            unflushed.streams.append(stream)
        else:
            if isinstance(tail, LoneTail):
                tail = self._whole(stream, tail)
            if tail.positions[-1] <= self._captured_through:
                unflushed.streams.append(stream)
        if count == 1:
            message = messages[0]
            end = offset + len(message)
            position += 1
            if tail is None:
                stream.hot = LoneTail(offset, end, position, at_ms, message)
            else:
                tail.messages.append(message)
                tail.ends.append(end)
                tail.positions.append(position)
                tail.times.append(at_ms)
            unflushed.incarnations.append(incarnation)
            unflushed.starts.append(offset)
            unflushed.ends.append(end)
            unflushed.positions.append(position)
            unflushed.times.append(at_ms)
            unflushed.messages.append(message)
        else:
            bounds: Column[Offset] = Column("q", accumulate(map(len, messages), initial=offset))
            end, ends = bounds[-1], bounds[1:]
            positions: Column[Position] = Column("q", range(position + 1, position + 1 + count))
            times: Column[Milliseconds] = Column("q", [at_ms]) * count
            unflushed.incarnations += Column("q", [incarnation]) * count
            unflushed.starts += bounds[:-1]
            unflushed.messages += messages
            unflushed.ends += ends
            unflushed.positions += positions
            unflushed.times += times
            if tail is None:
                stream.hot = HotTail(offset, messages[:], ends, positions, times)
                self.bytes += TAIL_OVERHEAD_BYTES
            else:
                tail.messages += messages
                tail.ends += ends
                tail.positions += positions
                tail.times += times
        size = end - offset
        unflushed.bytes += size
        self.bytes += size + MESSAGE_COST_BYTES * count
        self.published_bytes += size
        self.published_messages += count

    def begin_capture(self) -> Unflushed:
        """What is to be flushed now. It costs memory until it is committed or rolled back."""
        captured, self.unflushed = self.unflushed, Unflushed()
        if captured:
            self._captured_through = captured.positions[-1]
        self._captured_bytes += captured.bytes
        return captured

    def roll_back(self, captured: Unflushed) -> None:
        """It could not be flushed: it is still to be."""
        merged = Unflushed()  # of its own: somebody may still look at the captured columns, and then they cannot grow
        merged.extend(captured)
        merged.extend(self.unflushed)
        self.unflushed = merged
        self._captured_bytes -= captured.bytes

    def commit(self, captured: Unflushed, position: Position) -> Unflushed:
        """What was captured is cold now, up to a position; returns the rest, which is not."""
        rest = captured.since(position)
        self.bytes -= UNFLUSHED_OVERHEAD_BYTES * (len(captured) - len(rest))
        self._cold_before = max(self._cold_before, position)
        if self._waiting:
            self.bytes -= sum(size for last, size in self._waiting if last < position)
            self._waiting = [one for one in self._waiting if one[0] >= position]
        self._captured_bytes -= captured.bytes - rest.bytes
        return rest

    @property
    def backlog_bytes(self) -> int:
        """How many bytes of messages are not cold yet, those that a flush is just storing included."""
        return self.unflushed.bytes + self._captured_bytes

    def trim(self, stream: Stream, offset: Offset) -> None:
        """Let go of the messages that end at or before an offset."""
        tail = self.tail(stream)
        if tail is not None and offset > tail.start:
            count = bisect_right(tail.ends, offset)
            if count:
                self._wait_for_flush(tail, count, 0)
            self._release(stream, tail, count)

    def purge(self, stream: Stream) -> None:
        """Let go of all messages of a stream that is gone."""
        tail = self.tail(stream)
        if tail is not None:
            self._wait_for_flush(tail, len(tail.ends), GONE_OVERHEAD_BYTES)
            self.drop(stream)

    def _wait_for_flush(self, tail: HotTail, count: int, more: int) -> None:
        """Of the first so many messages, those that are not cold yet stay in the columns, and go on counting."""
        last = tail.positions[count - 1]
        if last >= self._cold_before:
            first = bisect_left(tail.positions, self._cold_before, 0, count)
            size = tail.ends[count - 1] - tail.message_start(first) + MESSAGE_OVERHEAD_BYTES * (count - first) + more
            self._waiting.append((last, size))
            self.bytes += size

    def release(self, streams: Iterable[Stream], position: Position) -> None:
        """Let go of these streams' messages before a position: the cold tier has them."""
        freed = count = 0
        for stream in streams:
            tail: HotTail | LoneTail | None = stream.hot
            if isinstance(tail, LoneTail):
                if tail.position < position:
                    freed += tail.end - tail.start + STREAM_OVERHEAD_BYTES + MESSAGE_OVERHEAD_BYTES
                    count += 1
                    stream.hot = None
            elif tail is not None:
                self._release(stream, tail, bisect_left(tail.positions, position))
        self.bytes -= freed
        self._streams -= count

    def _release(self, stream: Stream, tail: HotTail, count: int) -> None:
        if count == len(tail.ends):
            self.drop(stream)
        elif count:
            start = tail.ends[count - 1]
            self.bytes -= start - tail.start + MESSAGE_OVERHEAD_BYTES * count
            tail.start = start
            del tail.messages[:count], tail.ends[:count], tail.positions[:count], tail.times[:count]

    def drop(self, stream: Stream) -> None:
        tail = self.tail(stream)
        if tail is not None:
            size = tail.ends[-1] - tail.start
            self.bytes -= size + MESSAGE_OVERHEAD_BYTES * len(tail.ends) + STREAM_OVERHEAD_BYTES + TAIL_OVERHEAD_BYTES
            self._streams -= 1
            stream.hot = None
